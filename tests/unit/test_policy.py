"""Policies: what they are asked, what they may answer, and how they combine."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from horovod_ft.errors import PolicyError
from horovod_ft.policies.lossy_forward import LossyForward
from horovod_ft.policies.rollback import MiniBatchRollback
from horovod_ft.policy import (
    Abort,
    Budget,
    Costs,
    Decision,
    Escalation,
    Failure,
    Forward,
    Policy,
    RecoveryPolicy,
    Replay,
    Restart,
    decide,
    decisions_of,
)

FAILURE = Failure(
    generation=2, step=7, updates=0, phases=("update", "update"), lost=(1,), survivors=(0, 2), size_before=3,
    size_after=2, newcomers=0, behind=0, consecutive=1, ages_s=(), samples_at_risk=12, shares=3,
    shares_lost=1, gradients=4, gradients_done=1,
    elements=100, elements_done=40, closed="", diverged=False, checkpoint_step=5, checkpoint_age_s=1.5,
    costs=Costs(replay_s=0.2, forward_s=0.1),
)  # fmt: skip


def test_a_failure_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        FAILURE.step = 8  # type: ignore[misc]


@pytest.mark.parametrize("answer", [Replay(), Forward(), Restart(), Abort("enough"), None])
def test_a_decision_is_passed_on(answer: Decision | None) -> None:
    assert decide(lambda failure: answer, FAILURE) is answer


def test_a_policy_that_raises_is_the_policys_fault() -> None:
    def broken(failure: Failure) -> Decision:
        raise KeyError("x")

    with pytest.raises(PolicyError, match=r"broken.* raised KeyError\('x'\) when asked about Failure\(") as raised:
        decide(broken, FAILURE)
    assert isinstance(raised.value.__cause__, KeyError)


@pytest.mark.parametrize("answer", [True, "replay", Replay])
def test_anything_else_is_no_decision(answer: Any) -> None:
    with pytest.raises(PolicyError, match=r"which is not Replay\(\), Forward"):
        decide(lambda failure: answer, FAILURE)


# --- combining -----------------------------------------------------------------------------------------------------


def declines(failure: Failure) -> None:
    return None


def test_the_next_policy_is_asked_when_one_has_no_answer() -> None:
    policy = LossyForward(max_consecutive=2) | MiniBatchRollback()
    assert policy(replace(FAILURE, consecutive=2)) == Forward()
    assert policy(replace(FAILURE, consecutive=3)) == Replay()


def test_a_function_can_stand_on_either_side() -> None:
    assert (MiniBatchRollback() | (lambda failure: Abort("never asked")))(FAILURE) == Replay()
    assert (declines | MiniBatchRollback())(FAILURE) == Replay()


def test_without_any_answer_there_is_none() -> None:
    assert (MiniBatchRollback(1) | declines)(replace(FAILURE, lost=(), consecutive=2)) is None


def test_combining_is_associative() -> None:
    one, two, three = LossyForward(), MiniBatchRollback(1), MiniBatchRollback(2)
    assert (one | two) | three == one | (two | three) == Escalation((one, two, three))


def test_it_says_what_it_is() -> None:
    told = repr(MiniBatchRollback(2) | MiniBatchRollback(5))
    assert told.startswith("MiniBatchRollback(max_consecutive=2")
    assert " | MiniBatchRollback(max_consecutive=5" in told


def test_an_abort_is_an_answer() -> None:
    assert ((lambda failure: Abort("no")) | MiniBatchRollback())(FAILURE) == Abort("no")


def test_what_is_no_policy_cannot_be_combined() -> None:
    with pytest.raises(PolicyError, match="'rollback' cannot be combined"):
        MiniBatchRollback() | "rollback"  # type: ignore[operator]


def test_a_combination_can_decide_what_its_parts_can() -> None:
    assert decisions_of(MiniBatchRollback() | MiniBatchRollback()) == {Replay}
    assert decisions_of(MiniBatchRollback() | LossyForward()) == {Replay, Forward}
    assert decisions_of(declines) == {Replay, Forward, Restart, Abort}
    assert Forward in decisions_of(MiniBatchRollback() | declines)


# --- ways that are closed --------------------------------------------------------------------------------------------


def test_without_a_copy_there_is_nothing_to_go_back_to() -> None:
    failure = replace(FAILURE, checkpoint_step=None, checkpoint_age_s=None)
    with pytest.raises(PolicyError, match=r"answered Restart\(\), but there is no full copy of the state"):
        decide(lambda failure: Restart(), failure)


@pytest.mark.parametrize("answer", [Replay(), Forward()])
def test_a_replay_is_no_answer_to_replicas_that_differ(answer: Decision) -> None:
    assert decide(lambda failure: answer, replace(FAILURE, diverged=True)) is None


@pytest.mark.parametrize("policy", [MiniBatchRollback(), LossyForward()], ids=repr)
def test_replicas_that_differ_are_left_to_the_next_policy(policy: Policy) -> None:
    failure = replace(FAILURE, diverged=True, closed="worker 0 was elsewhere")
    assert decide(policy, failure) is None
    assert decide(policy | (lambda failure: Restart()), failure) == Restart()


# --- going forward -------------------------------------------------------------------------------------------------


def test_a_way_that_is_closed_cannot_be_taken() -> None:
    with pytest.raises(PolicyError, match=r"Forward.*that way is closed: worker 1 is behind.*failure\.closed"):
        decide(lambda failure: Forward(), replace(FAILURE, closed="worker 1 is behind"))


@pytest.mark.parametrize("arguments", [{"missing": "guess"}, {"rescale": 1}])
def test_a_forward_that_means_nothing_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(PolicyError, match="must be"):
        Forward(**arguments)


# --- budgets -------------------------------------------------------------------------------------------------------


def test_a_budget_of_consecutive_failures() -> None:
    assert not Budget(max_consecutive=2).spent(replace(FAILURE, consecutive=2))
    assert Budget(max_consecutive=2).spent(replace(FAILURE, consecutive=3))


def test_a_budget_of_a_rate_counts_the_present_failure() -> None:
    assert not Budget(at_most=1, within=5.0).spent(FAILURE)
    assert Budget(at_most=1, within=5.0).spent(replace(FAILURE, ages_s=(5.0,)))


def test_without_arguments_it_is_never_spent() -> None:
    assert not Budget().spent(replace(FAILURE, consecutive=1000, ages_s=(0.0,) * 1000))


@pytest.mark.parametrize(
    "arguments",
    [{"max_consecutive": 0}, {"max_consecutive": True}, {"at_most": 3}, {"within": 3.0}, {"at_most": 0, "within": 1.0},
     {"at_most": 1, "within": 0.0}, {"at_most": 1, "within": float("nan")}],
)  # fmt: skip
def test_a_budget_that_means_nothing_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(PolicyError, match=r"must be|belong together"):
        Budget(**arguments)


# --- conformance of what is a policy -------------------------------------------------------------------------------


def test_a_function_is_a_policy() -> None:
    assert isinstance(lambda failure: Replay(), RecoveryPolicy)


def test_a_policy_decides_by_the_failure_alone() -> None:
    policy = MiniBatchRollback()
    assert policy(FAILURE) == policy(replace(FAILURE)) == Replay()
