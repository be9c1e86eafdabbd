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
        seen: what has happened, in order.
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
        def note(value: Any) -> Any:
            self.seen.append(what)
            return value

        return tf.py_function(note, [tensor], tensor.dtype)

    def run(self) -> None:
        """As a step does it."""
        with self.probes.forward():
            computed = [self._mark("computed", tf.identity(one)) for one in GRADIENTS[:1]] + GRADIENTS[1:]
        gradients = self.probes.backward(computed)
        reduced: list[Any] = []
        for gradient in gradients:
            with self.probes.before(reduced):
                reduced.append(self._mark(f"reduced {len(reduced)}", tf.identity(gradient)))
        with self.probes.before(reduced):
            sums = self._mark("metrics", tf.constant(0.0))
        with tf.control_dependencies([sums]):
            for one in self.probes.update(reduced):
                self._mark("updated", tf.identity(one))


def slow(phase: Any, **options: Any) -> Fault:
    return Fault(phase, "slow", seconds=0.1, **{"worker": 0, **options})


WAYS = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])


def step_of(rig: Rig, graph: bool) -> None:
    with failures():
        (tf.function(rig.run, autograph=False) if graph else rig.run)()


@WAYS
@pytest.mark.parametrize(
    ("fault", "before", "after"),
    [
        (slow("forward"), None, "computed"),
        (slow("backward"), "computed", "reduced 0"),
        (slow("allreduce", after=1), "reduced 0", "reduced 1"),
        (slow("allreduce", after=2), "reduced 1", "metrics"),
        (slow("optimizer"), "reduced 1", "updated"),
    ],
    ids=str,
)
def test_it_strikes_in_its_phase(graph: bool, fault: Fault, before: str | None, after: str) -> None:
    rig = Rig(fault)
    step_of(rig, graph)
    assert rig.injector.waiting == []
    strike = rig.seen.index(fault.phase)
    assert before is None or before in rig.seen[:strike]
    assert after in rig.seen[strike:]
    assert rig.seen.count("updated") == 2


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
    assert rig.probes.update(GRADIENTS) is GRADIENTS


@WAYS
def test_a_failure_that_only_this_worker_sees_comes_before_the_update(graph: bool) -> None:
    rig = Rig(Fault("allreduce", "lose", worker=0, after=1))
    with pytest.raises(HorovodInternalError, match="says the fault plan: lose worker 0 at step 1"):
        step_of(rig, graph)
    assert {"reduced 0", "reduced 1", "metrics"} <= set(rig.seen)
    assert "updated" not in rig.seen
    step_of(rig, graph)
    assert rig.seen.count("updated") == 2


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


def test_a_number_can_become_nan() -> None:
    variable = tf.Variable([[1.0, 2.0], [3.0, 4.0]])
    corrupt([variable], "nan")
    assert np.isnan(variable.numpy()).tolist() == [[False, False], [True, False]]
