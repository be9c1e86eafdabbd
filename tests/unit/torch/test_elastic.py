"""``hvd.elastic.run``: what it accepts, how it is entered again, and how it ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import horovod_ft.torch as hvd
from horovod_ft.errors import ConfigurationError, PolicyError, RecoveryError, UsageError
from horovod_ft.membership.base import Group
from horovod_ft.policies.rollback import MiniBatchRollback
from horovod_ft.policy import Abort, Decision, Failure, Replay
from horovod_ft.torch.elastic import HostsChanged, ObjectState, TorchState
from horovod_ft.torch.runtime import current


@pytest.fixture
def reforming(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of one that can be formed anew."""
    membership = current().membership
    monkeypatch.setattr(membership, "_group", Group(0, 1))
    monkeypatch.setattr(membership, "reform", lambda: membership.group)


def gone() -> BaseException:
    error: BaseException = hvd.HorovodInternalError("the peer is gone")
    return error


def test_arguments_and_the_result_go_through() -> None:
    @hvd.elastic.run
    def train(state: Any, first: int, *, second: int) -> tuple[int, int, int]:
        return state.epoch, first, second

    assert train(TorchState(epoch=1), 2, second=3) == (1, 2, 3)


def test_the_decorated_function_keeps_its_name() -> None:
    @hvd.elastic.run(policy="rollback")
    def train(state: Any) -> None:
        """Train."""

    assert (train.__name__, train.__doc__) == ("train", "Train.")


@pytest.mark.parametrize("state", [None, 1, torch.nn.Linear(1, 1)])
def test_something_else_than_a_state_is_refused(state: Any) -> None:
    @hvd.elastic.run
    def train(state: Any) -> None:
        """Never run."""

    with pytest.raises(ConfigurationError, match="the first argument of train must be a state"):
        train(state)


@pytest.mark.parametrize("policy", ["lossless", "rollback(", "rollback(max_consecutive=x)", 3])
def test_a_policy_that_is_none_is_refused_at_once(policy: Any) -> None:
    with pytest.raises(PolicyError):
        hvd.elastic.run(policy=policy)


def test_a_state_cannot_be_run_inside_its_own_run() -> None:
    @hvd.elastic.run
    def inner(state: Any) -> None:
        """Never run."""

    @hvd.elastic.run
    def outer(state: Any) -> None:
        inner(state)

    with pytest.raises(UsageError, match=r"already inside elastic\.run"):
        outer(TorchState(epoch=0))


def test_an_error_of_the_function_goes_through_and_it_can_be_run_again() -> None:
    @hvd.elastic.run
    def train(state: Any, fail: bool) -> str:
        if fail:
            raise KeyError("a bug")
        return "done"

    state = TorchState(epoch=0)
    with pytest.raises(KeyError, match="a bug"):
        train(state, fail=True)
    assert train(state, fail=False) == "done"


@pytest.mark.usefixtures("reforming")
def test_a_failure_outside_a_step_enters_the_function_again_with_the_committed_values() -> None:
    entered: list[int] = []

    @hvd.elastic.run
    def train(state: Any) -> int:
        entered.append(state.epoch)
        if len(entered) == 1:
            state.epoch = 1
            state.commit()
            state.epoch = 2
            raise gone()
        return int(state.epoch)

    assert train(TorchState(epoch=0)) == 1
    assert entered == [0, 1]


@pytest.mark.usefixtures("reforming")
def test_an_announced_change_enters_the_function_again(monkeypatch: pytest.MonkeyPatch) -> None:
    news = iter([True])
    monkeypatch.setattr(current().membership, "changed", lambda: next(news, False))
    entered: list[int] = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        entered.append(state.epoch)
        state.epoch += 1
        state.commit()

    train(TorchState(epoch=0))
    assert entered == [0, 1]


@pytest.mark.usefixtures("reforming")
def test_an_announced_change_at_the_end_of_a_step_does_not_leave_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    news = iter([True])
    monkeypatch.setattr(current().membership, "changed", lambda: next(news, False))
    entered: list[int] = []
    groups: list[Any] = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        entered.append(state.epoch)
        for _ in range(3):
            with state.step():
                state.epoch += 1

    state: Any = TorchState(epoch=0)
    state.register_reset_callbacks([lambda: groups.append(current().group())])
    train(state)
    assert (entered, state.epoch, len(groups)) == ([0], 3, 1)


def test_hosts_changed_is_what_a_commit_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current().membership, "changed", lambda: True)

    @hvd.elastic.run
    def train(state: Any) -> bool:
        try:
            state.check_host_updates()
        except HostsChanged:
            return True
        return False

    assert train(TorchState(epoch=0))


@pytest.mark.usefixtures("reforming")
@pytest.mark.parametrize("as_text", [False, True])
def test_a_policy_that_gives_up_ends_the_run_with_its_reason(as_text: bool) -> None:
    def give_up(failure: Failure) -> Decision:
        return Abort("enough is enough")

    policy: Any = "rollback(max_consecutive=1)" if as_text else give_up
    attempts: list[int] = []

    @hvd.elastic.run(policy=policy)
    def train(state: Any) -> None:
        while True:
            with state.step():
                attempts.append(1)
                raise gone()

    with pytest.raises(RecoveryError) as caught:
        train(TorchState(epoch=0))
    assert isinstance(caught.value.__cause__, hvd.HorovodInternalError)
    assert len(attempts) == (2 if as_text else 1)


@pytest.mark.usefixtures("reforming")
def test_a_policy_is_told_what_happened() -> None:
    told: list[Failure] = []

    def policy(failure: Failure) -> Decision:
        told.append(failure)
        return Replay()

    @hvd.elastic.run(policy=policy)
    def train(state: Any) -> None:
        for _ in range(3):
            with state.step():
                state.epoch += 1
                if state.epoch == 2 and not told:
                    raise gone()

    state: Any = TorchState(epoch=0)
    train(state)
    failure = told[0]
    assert (failure.step, failure.size_before, failure.size_after, failure.consecutive) == (1, 1, 1, 1)
    assert state.epoch == 2  # the loop of three went on: one of its steps was the failed one


def test_without_elastic_mode_a_failure_ends_the_run_with_what_to_do() -> None:
    @hvd.elastic.run
    def train(state: Any) -> None:
        with state.step():
            raise gone()

    with pytest.raises(RecoveryError, match="horovodrun --min-np"):
        train(TorchState(epoch=0))


@pytest.mark.usefixtures("reforming")
def test_the_policy_of_the_environment_is_used_if_the_script_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = current().settings
    monkeypatch.setattr(current(), "settings", type(settings)(policy="rollback(max_consecutive=0)"))

    @hvd.elastic.run
    def train(state: Any) -> None:
        """Never run."""

    with pytest.raises(PolicyError, match="max_consecutive"):
        train(TorchState(epoch=0))


# --- states of other classes -----------------------------------------------------------------------------------------


def object_state(**values: Any) -> Any:
    return ObjectState(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, **values)


@pytest.mark.usefixtures("reforming")
def test_horovods_object_state_is_restored_and_synced_after_a_failure() -> None:
    entered: list[int] = []

    @hvd.elastic.run
    def train(state: Any) -> int:
        entered.append(state.epoch)
        if len(entered) == 1:
            state.epoch = 1
            state.commit()
            state.epoch = 2
            raise gone()
        return int(state.epoch)

    assert train(object_state(epoch=0)) == 1
    assert entered == [0, 1]


@pytest.mark.usefixtures("reforming")
def test_horovods_object_state_hears_of_new_groups() -> None:
    resets: list[str] = []
    state = object_state(epoch=0)
    state.register_reset_callbacks([lambda: resets.append("reset")])

    @hvd.elastic.run
    def train(state: Any) -> None:
        if not resets:
            raise gone()

    train(state)
    assert resets == ["reset"]


def test_the_default_policy_is_rollback() -> None:
    assert hvd.elastic.MiniBatchRollback is MiniBatchRollback
