"""Faults strike at the moment that the plan names, and nothing is installed without a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from horovod_ft.committer import Committer, Frontier
from horovod_ft.events import Event, EventBus
from horovod_ft.faults.inject import FaultInjected, Injector
from horovod_ft.faults.plan import Fault
from horovod_ft.torch.faults import install_faults
from tests.unit.torch.tools import Peers, backward, copy_of, distributed, network, same


class Rig:
    """A model and an optimizer under a plan; ``step`` is the number of committed steps."""

    def __init__(self, *faults: Fault, worker: int = 0, step: int = 0) -> None:
        self.model = network()
        self.optimizer = distributed(self.model)
        self.events: list[Event] = []
        bus = EventBus("worker")
        bus.subscribe(self.see)
        self.injector = Injector(faults, worker, "localhost", bus)
        committer = Committer([])
        committer.frontier = Frontier(step, 0)
        install_faults(self.injector, committer, [self.model], [self.optimizer])

    def see(self, event: Event) -> None:
        self.events.append(event)


def fault(phase: Any, **options: Any) -> Fault:
    return Fault(phase=phase, kind="exception", **{"worker": 0, **options})


def test_without_a_plan_nothing_is_installed() -> None:
    rig = Rig()
    assert rig.optimizer.ft_reducer.probe is None
    assert not any(module._forward_hooks for module in rig.model.modules())


def test_a_plan_for_another_worker_installs_nothing() -> None:
    rig = Rig(fault("backward"), worker=1)
    assert rig.optimizer.ft_reducer.probe is None


@pytest.mark.parametrize(
    ("phase", "act", "handed_over"),
    [
        ("forward", lambda rig: rig.model[0](next(rig.model.parameters())[:, :4]), 0),
        ("backward", lambda rig: backward(rig.model), 0),
    ],
    ids=["forward", "backward"],
)
def test_it_strikes_in_its_phase(peers: Peers, phase: str, act: Callable[[Rig], None], handed_over: int) -> None:
    rig = Rig(fault(phase))
    with pytest.raises(FaultInjected, match=phase):
        act(rig)
    assert len(peers.calls) == handed_over
    assert [event.data["phase"] for event in rig.events] == [phase]


@pytest.mark.parametrize("after", [0, 1])
def test_it_strikes_after_so_many_reduced_gradients(peers: Peers, after: int) -> None:
    rig = Rig(fault("allreduce", after=after))
    with pytest.raises(FaultInjected):
        backward(rig.model)
    assert len(peers.calls) == after


def test_it_strikes_after_the_last_gradient_and_before_the_update(peers: Peers) -> None:
    rig = Rig(fault("allreduce", after=2))
    before = copy_of(rig.model)
    backward(rig.model)
    with pytest.raises(FaultInjected):
        rig.optimizer.step()
    assert len(peers.calls) == 2
    assert same(copy_of(rig.model), before)


def test_gradients_before_it_are_really_reduced() -> None:
    rig = Rig(fault("allreduce", after=1))
    with pytest.raises(FaultInjected):
        backward(rig.model)
    assert rig.optimizer.ft_reducer.drain() == (1, 1)
    rig.optimizer.ft_reducer.discard()


@pytest.mark.parametrize(("committed", "strikes"), [(1, False), (2, True), (3, False)])
def test_it_strikes_in_its_step_only(peers: Peers, committed: int, strikes: bool) -> None:
    rig = Rig(fault("backward", step=3), step=committed)
    if strikes:
        with pytest.raises(FaultInjected):
            backward(rig.model)
    else:
        backward(rig.model)


def test_it_strikes_once(peers: Peers) -> None:
    rig = Rig(fault("backward"))
    with pytest.raises(FaultInjected):
        backward(rig.model)
    rig.optimizer.ft_reducer.discard()
    backward(rig.model)
    assert not rig.injector.waiting


def test_more_gradients_than_there_are_never_come(peers: Peers) -> None:
    rig = Rig(fault("allreduce", after=9))
    backward(rig.model)
    rig.optimizer.step()
    assert len(rig.injector.waiting) == 1
