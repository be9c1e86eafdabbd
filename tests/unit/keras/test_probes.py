"""Faults strike a step of Keras at the moment that the plan names, in a graph and outside."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

from horovod_ft.events import Event, EventBus
from horovod_ft.faults.inject import Injector
from horovod_ft.faults.plan import Fault
from horovod_ft.keras.arrivals import Arrivals
from horovod_ft.keras.failures import failures
from horovod_ft.keras.probes import FaultProbes, corrupt

GRADIENTS = [tf.constant([1.0]), tf.constant([2.0])]


class Rig:
    """The probes of a step under a plan.

    Attributes:
        seen: what has happened, in order; in a graph only which faults have struck.
    """

    def __init__(self, *faults: Fault, step: int = 1) -> None:
        self.seen: list[str] = []
        bus = EventBus("worker")
        bus.subscribe(self._see)
        self.injector = Injector(faults, 0, "localhost", bus, sleep=lambda seconds: None)
        self.step = step
        self.probes = FaultProbes(self.injector, lambda: self.step)

    def _see(self, event: Event) -> None:
        self.seen.append(event.data["phase"])

    def _mark(self, what: str, tensor: Any) -> Any:
        if tf.executing_eagerly():
            self.seen.append(what)
        return tf.identity(tensor, name=what)

    def run(self) -> Any:
        """As a step does it."""
        with self.probes.forward():
            first = self._mark("computed", tf.constant([1.0]))
        gradients = self.probes.backward([first, tf.constant([2.0])])
        reduced: list[Any] = []
        for gradient in gradients:
            with self.probes.before(reduced):
                reduced.append(self._mark(f"reduced{len(reduced)}", gradient))
        with self.probes.before(reduced):
            self._mark("metrics", tf.constant(0.0))
        return [self._mark("updated", one) for one in self.probes.update(self.probes.lost(reduced))]


def slow(phase: Any, **options: Any) -> Fault:
    return Fault(phase, "slow", seconds=0.1, **{"worker": 0, **options})


LOST = Fault("allreduce", "lose", worker=0, after=1)
WAYS = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
#: A fault, what is done before it, and what comes after it.
MOMENTS = pytest.mark.parametrize(
    ("fault", "before", "after"),
    [
        (slow("forward"), None, "computed"),
        (slow("backward"), "computed", "reduced0"),
        (slow("allreduce", after=1), "reduced0", "reduced1"),
        (slow("allreduce", after=2), "reduced1", "metrics"),
        (slow("optimizer"), "reduced1", "updated"),
        (LOST, "reduced1", "updated"),
    ],
    ids=str,
)


def step_of(rig: Rig, graph: bool) -> None:
    with failures():
        (tf.function(rig.run, autograph=False) if graph else rig.run)()


@MOMENTS
def test_it_strikes_in_its_phase(fault: Fault, before: str | None, after: str) -> None:
    rig = Rig(fault)
    with pytest.raises(HorovodInternalError) if fault is LOST else nullcontext():
        step_of(rig, graph=False)
    assert rig.injector.waiting == []
    strike = rig.seen.index(fault.phase)
    assert before is None or before in rig.seen[:strike]
    assert after not in rig.seen[:strike]
    assert fault is LOST or rig.seen.count("updated") == 2


def above(operation: Any) -> set[str]:
    """Names of all operations that a graph runs before this one."""
    found: set[str] = set()
    left = [operation]
    while left:
        one = left.pop()
        if one.name not in found:
            found.add(one.name)
            left += [*(tensor.op for tensor in one.inputs), *one.control_inputs]
    return found - {operation.name}


@MOMENTS
def test_a_graph_has_the_strike_between_what_comes_before_and_after(
    fault: Fault, before: str | None, after: str
) -> None:
    """In a graph of TensorFlow's first version: a function of the second lets its strikes come in order by itself."""
    with tf.Graph().as_default() as graph:
        Rig(fault).run()
    strikes = {one.name for one in graph.get_operations() if one.type == "EagerPyFunc"}
    late = strikes & above(graph.get_operation_by_name(after))
    assert late
    assert before is None or any(before in above(graph.get_operation_by_name(strike)) for strike in late)


@WAYS
def test_in_its_step_only(graph: bool) -> None:
    rig = Rig(slow("forward", step=2))
    traced = tf.function(rig.run, autograph=False) if graph else rig.run
    traced()
    assert "forward" not in rig.seen
    rig.step = 2
    traced()
    assert "forward" in rig.seen


def test_without_a_fault_for_this_worker_nothing_is_in_the_graph() -> None:
    rig = Rig(slow("forward", worker=1), slow("allreduce", worker=1))
    assert isinstance(rig.probes.forward(), nullcontext)
    assert isinstance(rig.probes.before([]), nullcontext)
    assert rig.probes.backward(GRADIENTS) is GRADIENTS
    assert rig.probes.lost(GRADIENTS) is GRADIENTS
    assert rig.probes.update(GRADIENTS) is GRADIENTS


@WAYS
def test_a_failure_that_only_this_worker_sees_breaks_the_step_once(graph: bool) -> None:
    rig = Rig(LOST)
    with pytest.raises(HorovodInternalError, match="says the fault plan: lose worker 0 at step 1"):
        step_of(rig, graph)
    step_of(rig, graph)


@WAYS
@pytest.mark.parametrize("reverse", [False, True])
def test_faults_of_one_step_do_not_hide_each_other(graph: bool, reverse: bool) -> None:
    faults = [slow("allreduce", after=99), slow("allreduce", after=2), LOST]
    rig = Rig(*(reversed(faults) if reverse else faults))
    with pytest.raises(HorovodInternalError):
        step_of(rig, graph)
    assert [fault.after for fault in rig.injector.waiting] == [99]  # which the step does not come to


def test_between_two_stages_it_takes_back_what_has_arrived() -> None:
    rig = Rig(Fault("allreduce", "lose", worker=0, after=1, step=3), step=2)
    arrivals = Arrivals()
    arrivals.begin(GRADIENTS, {})
    arrivals.keep(GRADIENTS, {})
    rig.probes.arrived(arrivals)
    assert arrivals.done() == (True, True)
    rig.step = 3
    with pytest.raises(HorovodInternalError):
        rig.probes.arrived(arrivals)
    assert arrivals.done() == (True, False)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_flipped_bit_changes_one_number_of_the_largest_variable(dtype: str) -> None:
    small, large = tf.Variable([9.0], dtype=dtype), tf.Variable([[1.0, 2.0], [3.0, 4.0]], dtype=dtype)
    corrupt([small, large], "bitflip")
    assert small.numpy().tolist() == [9.0]
    assert large.numpy().tolist() == [[1.0, 2.0], [6.0, 4.0]]


def test_the_exponent_of_bfloat16_begins_elsewhere() -> None:
    variable = tf.Variable([3.0], dtype="bfloat16")
    corrupt([variable], "bitflip")
    assert tf.cast(variable, tf.float32).numpy().tolist() == [6.0]


def test_the_largest_variable_may_be_one_number() -> None:
    variable = tf.Variable(3.0)
    corrupt([variable], "bitflip")
    assert variable.numpy() == 6.0


def test_a_number_can_become_nan() -> None:
    variable = tf.Variable([[1.0, 2.0], [3.0, 4.0]])
    corrupt([variable], "nan")
    assert np.isnan(variable.numpy()).tolist() == [[False, False], [True, False]]
