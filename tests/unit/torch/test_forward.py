"""A training that is carried forward, in one process: more than one gradient, and more than one update."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import horovod_ft.torch as hvd
from horovod_ft import LossyForward
from horovod_ft.agreement import Reach
from horovod_ft.data import Deal
from horovod_ft.errors import RecoveryError
from horovod_ft.membership.base import Group
from horovod_ft.policy import Abort, Forward
from horovod_ft.torch import reducer as reducer_module
from horovod_ft.torch import slots
from horovod_ft.torch.elastic import ElasticDataLoader, TorchState
from horovod_ft.torch.runtime import current
from tests.unit.torch.test_completion import Mail, broken, complete
from tests.unit.torch.tools import Peers


@pytest.fixture
def reforming(monkeypatch: pytest.MonkeyPatch) -> None:
    membership = current().membership
    monkeypatch.setattr(membership, "_group", Group(0, 1))
    monkeypatch.setattr(membership, "reform", lambda: membership.group)


def two() -> Any:
    torch.manual_seed(0)
    d, g = nn.Linear(4, 1), nn.Linear(4, 1)
    opts = [hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1), m.named_parameters()) for m in (d, g)]
    loader: Any = ElasticDataLoader(TensorDataset(torch.randn(16, 4)), global_batch_size=4)
    return TorchState(model=d, gen=g, opt_d=opts[0], opt_g=opts[1], loader=loader)


@pytest.mark.usefixtures("reforming")
def test_one_failure_is_one_recovery_with_two_optimizers() -> None:
    state = two()
    seen: list[Any] = []
    current().bus.subscribe(lambda event: seen.extend([event]))

    @hvd.elastic.run(policy=LossyForward(max_consecutive=None))
    def loop(state: Any) -> None:
        for _ in state.loader.epochs(1):
            for (x,) in state.loader:
                with state.step():
                    state.opt_d.zero_grad()
                    state.model(x).mean().backward()
                    state.opt_d.step()
                    state.opt_g.zero_grad()
                    state.gen(x).mean().backward()
                    if state.steps == 1 and not [e for e in seen if e.kind == "failure_detected"]:
                        state.opt_g.ft_reducer.lose_after = 0
                    state.opt_g.step()

    loop(state)
    failures = [(e.step, e.data["error"]) for e in seen if e.kind == "failure_detected"]
    assert len(failures) == 1, failures


@pytest.mark.usefixtures("reforming")
@pytest.mark.parametrize("how", ["wrapped", "swallowed"])
def test_a_job_that_was_given_up_ends(how: str) -> None:
    state = two()
    bodies = []

    @hvd.elastic.run(policy=lambda failure: Abort("enough"))
    def loop(state: Any) -> None:
        for _ in state.loader.epochs(1):
            for (x,) in state.loader:
                with state.step():
                    bodies.append(1)
                    state.opt_d.zero_grad()
                    state.model(x).mean().backward()
                    if state.steps == 1 and len(bodies) == 2:
                        state.opt_d.ft_reducer.lose_after = 0
                    try:
                        state.opt_d.step()
                    except Exception as error:
                        if how == "wrapped":
                            raise RuntimeError("my step failed") from error

    with pytest.raises((RecoveryError, RuntimeError)):
        loop(state)
    assert len(bodies) == 2


@pytest.mark.usefixtures("reforming")
def test_an_error_inside_a_recovery_within_the_update_is_not_swallowed() -> None:
    state = two()
    bodies = []

    def callback() -> None:
        raise ValueError("a bug in the user's reset callback")

    state.register_reset_callbacks([callback])

    @hvd.elastic.run(policy=LossyForward())
    def loop(state: Any) -> None:
        for _ in state.loader.epochs(1):
            for (x,) in state.loader:
                with state.step():
                    bodies.append(1)
                    state.opt_d.zero_grad()
                    state.model(x).mean().backward()
                    if len(bodies) == 2:
                        state.opt_d.ft_reducer.lose_after = 0
                    state.opt_d.step()

    with pytest.raises(ValueError, match="a bug"):
        loop(state)


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Peers:
    return Peers(monkeypatch, size=3)


def test_what_was_lost_in_a_completion_that_broke_is_still_lost(three: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer = broken(three)
    mail = Mail(monkeypatch, rank=0)
    mail.broken = {"horovod_ft.forward.2.weight"}
    with pytest.raises(hvd.HorovodInternalError, match="broke again"):
        complete(optimizer, mail, (None, 0), Forward())
    done, lossy, _ = optimizer.ft_reducer.frontier()
    mail.broken = set()
    holders = [0 if here else None for here in done]
    assert complete(optimizer, mail, holders, Forward(), lossy=lossy) == ["0.weight"]


def test_memory_that_horovod_may_still_write_is_not_done(three: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder's broadcast hangs beyond the drain's bound."""
    _, optimizer = broken(three)
    mail = Mail(monkeypatch, rank=0)
    mail.broken = {"horovod_ft.forward.2.weight"}
    monkeypatch.setattr(reducer_module, "DRAIN_S", -1.0)
    monkeypatch.setattr(slots, "wait", lambda handle, deadline=0, stopped=None: False)
    with pytest.raises(hvd.HorovodInternalError, match="broke again"):
        complete(optimizer, mail, (None, 0), Forward())
    bucket = optimizer.ft_reducer.buckets[1]
    assert bucket.slots[0].result is None
    assert not optimizer.ft_reducer.frontier()[0][1], "done, but its memory is forgotten: garbage would be broadcast"


@pytest.mark.usefixtures("reforming")
def test_two_places_of_one_step_are_two_updates() -> None:
    """A step with an update applied is replayed; one worker waits for the first update anew, another for the second."""
    said = []
    for asked in (0, 1):
        state = two()
        state._committer.frontier = state._committer.frontier._replace(updates=1)  # one is applied already
        for _ in range(asked):
            assert not state._committer.admit_update()
        state._waiting = state.opt_d
        state.opt_d.ft_reducer.drain()
        said.append(state.gradients().update)
    assert said[0] != said[1], said


@pytest.mark.usefixtures("reforming")
def test_skip_with_a_gradient_scaler() -> None:
    state = two()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    bodies = []

    @hvd.elastic.run(policy=LossyForward(missing="skip"))
    def loop(state: Any) -> None:
        for _ in state.loader.epochs(1):
            for (x,) in state.loader:
                with state.step():
                    bodies.append(1)
                    state.opt_d.zero_grad()
                    scaler.scale(state.model(x).mean()).backward()
                    if len(bodies) == 2:
                        state.opt_d.ft_reducer.lose_after = 0
                    scaler.step(state.opt_d)
                    scaler.update()

    loop(state)
    assert state.steps == 4


@pytest.mark.usefixtures("reforming")
def test_all_optimizers_of_a_step_get_the_factor_of_what_is_left() -> None:
    """Two of three workers are left, with 1 and 2 of 4 samples; D is carried forward, G's backward comes later."""
    state = two()
    loader = state.loader
    deal = Deal(0, 0, 4, 0, 0, 3, np.arange(2), False)  # weight 2 * 3 / 4 = 1.5
    loader.cursor.open.append(deal)
    for o in (state.opt_d, state.opt_g):
        o.ft_reducer.set_weight(deal.weight)
    state.opt_d.zero_grad()
    state.model(torch.ones(1, 4)).mean().backward()
    state.drain()
    state._waiting = state.opt_d
    assert state.gradients().weight == 1.5
    reach = Reach((None, None), (False, False), (4, 1), (1.5,), Group(0, 3, 0), (0,))
    state.finish(reach, Forward())
    assert state.opt_d.ft_reducer.weight == 1.0
    assert state.opt_g.ft_reducer.weight == 1.0


@pytest.mark.usefixtures("reforming")
def test_a_second_forward_in_one_step_starts_from_the_weights_in_use() -> None:
    state = two()
    deal = Deal(0, 0, 4, 0, 0, 3, np.arange(2), False)
    state.loader.cursor.open.append(deal)
    state.opt_d.ft_reducer.set_weight(deal.weight)
    local = []
    for _ in range(2):
        state.opt_d.zero_grad()
        state.model(torch.ones(1, 4)).mean().backward()
        local = [p.grad.clone() for p in state.model.parameters()]
        state.drain()
        state._waiting = state.opt_d
        weight = state.gradients().weight
        reach = Reach((None, None), (False, False), (4, 1), (weight,), Group(0, 3, 0), (0,))
        state.finish(reach, Forward())
        for p, one in zip(state.model.parameters(), local, strict=True):
            torch.testing.assert_close(p.grad, one)  # alone, rescaled: its own mean


@pytest.mark.usefixtures("reforming")
def test_a_replay_after_a_completed_but_unapplied_update_is_computed_by_the_new_group() -> None:
    state = two()
    bodies: list[Any] = []

    @hvd.elastic.run(policy=LossyForward())
    def loop(state: Any) -> None:
        for _ in state.loader.epochs(1):
            for (x,) in state.loader:
                with state.step():
                    bodies.append(state._committer.computed_by)
                    state.opt_d.zero_grad()
                    state.model(x).mean().backward()
                    if len(bodies) == 2:
                        state.opt_d.ft_reducer.lose_after = 0
                        state.opt_d.synchronize()  # goes forward
                        raise hvd.HorovodInternalError("the norm of the gradients could not be reduced")
                    state.opt_d.step()

    loop(state)
    assert bodies == [None] * 5
