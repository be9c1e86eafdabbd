"""The conformance kit of policies: our own pass, and each check catches what it is there for.

Every broken policy below is right but for one thing.
"""

from __future__ import annotations

import itertools
import pickle
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from horovod_ft import testing
from horovod_ft.policies.auto import Auto
from horovod_ft.policies.lossy_forward import LossyForward
from horovod_ft.policies.rollback import MiniBatchRollback
from horovod_ft.policy import (
    EVERY_DECISION,
    MISSING,
    Abort,
    Decision,
    Failure,
    Forward,
    Policy,
    RecoveryPolicy,
    Replay,
)
from horovod_ft.testing.conformance import MOST_IN_A_ROW, check_membership, check_policy, every_failure
from tests.unit.test_policy import FAILURE

# --- failures ------------------------------------------------------------------------------------------------------

FAILURES = tuple(every_failure())


def test_the_failures_are_always_the_same() -> None:
    assert tuple(every_failure()) == FAILURES


def test_there_are_enough_to_be_broad_and_few_enough_to_be_quick() -> None:
    assert 1000 < len(FAILURES) < 10_000


@pytest.mark.parametrize(
    ("what", "values"),
    [
        (lambda failure: failure.size_before, {2, 3, 8, 1000}),
        (lambda failure: failure.consecutive, set(range(1, MOST_IN_A_ROW + 1))),
        (lambda failure: failure.updates, {0, 1}),
        (lambda failure: failure.behind, {0, 1}),
        (lambda failure: failure.newcomers, {0, 1, 2}),
        (lambda failure: bool(failure.closed), {False, True}),
        (lambda failure: len(failure.ages_s) >= failure.consecutive, {False, True}),
        (lambda failure: failure.checkpoint_step is None, {False, True}),
        (lambda failure: set(failure.phases) == {"update"}, {False, True}),
        (lambda failure: failure.gradients_done, {0, 3, 8}),
    ],
)
def test_they_vary(what: Callable[[Failure], Any], values: set[Any]) -> None:
    assert {what(failure) for failure in FAILURES} == values


@pytest.mark.parametrize("size", [2, 3, 8, 1000])
def test_they_lose_nobody_or_one_or_all_but_one(size: int) -> None:
    assert {len(failure.lost) for failure in FAILURES if failure.size_before == size} == {0, 1, size - 1}


@pytest.mark.parametrize("way", [Replay(), Forward()])
def test_either_way_is_the_cheaper_one_in_some(way: Decision) -> None:
    assert way in {Auto(max_loss=1.0)(failure) for failure in FAILURES if failure.lost and not failure.closed}


@pytest.mark.parametrize(
    "holds",
    [
        lambda failure: sorted((*failure.lost, *failure.survivors)) == list(range(failure.size_before)),
        lambda failure: len(failure.phases) == len(failure.survivors) == failure.size_after - failure.newcomers > 0,
        lambda failure: failure.behind < len(failure.survivors),
        lambda failure: len(failure.ages_s) >= failure.consecutive - 1,
        lambda failure: list(failure.ages_s) == sorted(failure.ages_s),
        lambda failure: bool(failure.closed) == (failure.costs.forward_s is None),
        lambda failure: bool(failure.closed) == (failure.gradients == 0) == (failure.elements == 0),
        lambda failure: bool(failure.closed) or failure.behind == failure.newcomers == 0,
        lambda failure: 0 <= failure.elements_done <= failure.elements,
        lambda failure: (failure.checkpoint_step is None) == (failure.costs.restart_s is None),
    ],
)
def test_each_can_happen(holds: Callable[[Failure], bool]) -> None:
    assert [failure for failure in FAILURES if not holds(failure)] == []


# --- our own policies ----------------------------------------------------------------------------------------------

LOSSY = [LossyForward(missing, rescale) for missing, rescale in itertools.product(MISSING, (True, False))]
BUDGETED = LossyForward(max_consecutive=None, at_most=3, within=60.0)


@pytest.mark.parametrize(
    "policy",
    [
        MiniBatchRollback(), MiniBatchRollback(1), MiniBatchRollback(50, at_most=2, within=10.0), *LOSSY, BUDGETED,
        Auto(), Auto(0.0), Auto(1.0, "skip", rescale=False), LossyForward() | MiniBatchRollback(),
        Auto(max_consecutive=1) | BUDGETED | MiniBatchRollback(5),
    ],
    ids=repr,
)  # fmt: skip
def test_our_policies_pass(policy: RecoveryPolicy) -> None:
    check_policy(policy)


@pytest.mark.parametrize("policy", [LossyForward(max_consecutive=None), Auto(max_consecutive=None)], ids=repr)
def test_without_any_bound_they_pass_if_they_need_not_end(policy: RecoveryPolicy) -> None:
    check_policy(policy, must_end=False)


def careful(failure: Failure) -> Decision | None:
    return Replay() if failure.consecutive <= 3 else None


@pytest.mark.parametrize("policy", [careful, lambda failure: None, careful | MiniBatchRollback()], ids=repr)
def test_a_function_passes_alone_and_in_a_combination(policy: RecoveryPolicy) -> None:
    check_policy(policy)


# --- broken policies -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asking(Policy):
    """Asks a function."""

    function: Callable[[Failure], Any] = field(repr=False)
    named: Any = EVERY_DECISION

    @property
    def decisions(self) -> frozenset[type]:
        named: frozenset[type] = self.named
        return named

    def __call__(self, failure: Failure) -> Decision | None:
        answer: Decision | None = self.function(failure)
        return answer


def caught(policy: RecoveryPolicy, match: str, **arguments: Any) -> str:
    with pytest.raises(AssertionError, match=match) as raised:
        check_policy(policy, **arguments)
    return str(raised.value)


def test_what_is_no_decision_is_caught() -> None:
    caught(Asking(lambda failure: "replay"), r"'replay', which is not Replay\(\)")


def test_a_policy_that_raises_is_caught() -> None:
    policy = Asking(lambda failure: Forward() if not failure.closed else failure.ages_s[0] and Replay())
    caught(policy, r"raised IndexError(.|\n)*None if it has no answer")


def test_a_policy_that_cannot_be_called_is_caught() -> None:
    caught("rollback", "'rollback' raised TypeError")  # type: ignore[arg-type]


def test_going_forward_where_that_is_closed_is_caught() -> None:
    caught(Asking(lambda failure: Forward()), r"that way is closed.*failure\.closed")


def test_a_decision_that_is_not_named_is_caught() -> None:
    policy = Asking(lambda failure: careful(failure) or Abort("enough"), frozenset({Replay, Forward}))
    caught(policy, r"answered Abort\(reason='enough'\), but its `decisions` name only Forward, Replay")


@pytest.mark.parametrize("named", [len, frozenset(), {"Replay"}, {Replay()}, [Replay]], ids=repr)
def test_decisions_that_are_no_set_of_decisions_are_caught(named: Any) -> None:
    caught(Asking(careful, named), r"`decisions` of the recovery policy Asking.* must be a set of classes")


def test_a_failure_that_is_changed_is_caught() -> None:
    def change(failure: Failure) -> Decision | None:
        object.__setattr__(failure, "consecutive", 1)
        return Replay()

    assert "Asked about: Failure(" in caught(Asking(change), r"has changed the failure to Failure\(.*only read it")


def test_costs_that_are_changed_are_caught() -> None:
    def change(failure: Failure) -> Decision | None:
        object.__setattr__(failure.costs, "replay_s", 0.0)
        return careful(failure)

    caught(Asking(change), "has changed the failure")


def test_chance_is_caught() -> None:
    chance = random.Random(1)
    caught(Asking(lambda failure: Abort(str(chance.random()))), "asked at once, for the second time: .*DivergenceError")


def test_counting_its_own_calls_is_caught() -> None:
    calls = itertools.count()
    caught(Asking(lambda failure: Replay() if next(calls) % 7 else None), "asked at once, for the second time")


def test_remembering_earlier_failures_is_caught() -> None:
    most = 0

    def remember(failure: Failure) -> Decision | None:
        nonlocal most
        most = max(most, failure.size_before)
        return careful(failure) if failure.size_before == most else None

    caught(Asking(remember), "asked in another order")


def test_depending_on_the_thread_is_caught() -> None:
    def here(failure: Failure) -> Decision | None:
        return careful(failure) if threading.current_thread() is threading.main_thread() else None

    caught(Asking(here), "asked from another thread")


class Uncopied:
    """Its deep copies are itself; what it decides is lost when it is pickled."""

    limit = 3

    def __call__(self, failure: Failure) -> Decision | None:
        return Replay() if failure.consecutive <= self.limit else None

    def __repr__(self) -> str:
        return "Uncopied()"

    def __deepcopy__(self, memo: dict[int, Any]) -> Uncopied:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Uncopied, ()


def test_a_pickled_copy_that_decides_otherwise_is_caught() -> None:
    policy = Uncopied()
    policy.limit = 5
    caught(policy, "asked from a pickled copy of it")


def test_a_deep_copy_that_decides_otherwise_is_caught() -> None:
    class ById:
        def __init__(self) -> None:
            self.me = id(self)

        def __call__(self, failure: Failure) -> Decision | None:
            return careful(failure) if id(self) == self.me else None

        def __repr__(self) -> str:
            return "ById()"

    caught(ById(), "asked from a deep copy of it")


def test_a_copy_is_made_before_the_policy_is_asked() -> None:
    @dataclass
    class Learning:
        """Decides by the first failure it has ever seen."""

        first: Failure | None = None

        def __call__(self, failure: Failure) -> Decision | None:
            if self.first is None:
                self.first = failure
            return careful(self.first)

        def __deepcopy__(self, memo: dict[int, Any]) -> RecoveryPolicy:
            return careful if self.first is None else Learning(self.first)

        def __repr__(self) -> str:
            return "Learning()"

    caught(Learning(), "asked from a deep copy of it")


def test_a_policy_that_cannot_be_copied_passes() -> None:
    class Single(Uncopied):
        def __reduce__(self) -> tuple[Any, ...]:
            raise TypeError("there is only one")

        def __deepcopy__(self, memo: dict[int, Any]) -> Uncopied:
            raise TypeError("there is only one")

    with pytest.raises(TypeError):
        pickle.dumps(Single())
    check_policy(Single())


class Nameless(Policy):
    def __call__(self, failure: Failure) -> Decision | None:
        return careful(failure)


@pytest.mark.parametrize("policy", [Nameless(), Nameless() | MiniBatchRollback(), Nameless().__call__])
def test_an_address_in_its_repr_is_caught(policy: RecoveryPolicy) -> None:
    caught(policy, "holds an address.* make the policy a dataclass, or give it a __repr__")


@pytest.mark.parametrize("policy", [MiniBatchRollback(51), BUDGETED | (lambda failure: Replay())])
def test_replaying_for_ever_is_caught(policy: RecoveryPolicy) -> None:
    caught(policy, r"never gave up in 50 failures .*failure\.consecutive.*must_end=False")
    check_policy(policy, must_end=False)


def test_it_has_to_end_wherever_the_failure_comes() -> None:
    outside = Asking(lambda failure: Replay() if failure.phases[0] == "outside" else careful(failure))
    told = caught(outside, "never gave up")
    assert "phases=('outside', 'outside')" in told
    assert "consecutive=50" in told


def test_an_end_that_is_no_limit_is_an_end() -> None:
    check_policy(Asking(lambda failure: Replay() if failure.consecutive != MOST_IN_A_ROW else Abort("enough")))


def test_losing_workers_need_not_end() -> None:
    check_policy(Asking(lambda failure: Replay() if failure.lost else careful(failure)))


def test_other_failures_can_be_asked_about() -> None:
    policy = Asking(lambda failure: careful(failure) if failure.step != 7 else "seven")
    check_policy(policy)
    caught(policy, "'seven'", failures=[FAILURE])


def test_no_failure_at_all_is_a_mistake() -> None:
    caught(MiniBatchRollback(), "nothing to ask", failures=[])


def test_a_large_failure_is_told_in_short() -> None:
    large = next(failure for failure in FAILURES if failure.size_before == 1000)
    told = caught(Asking(lambda failure: "x"), "Asked about", failures=[large]).splitlines()[-1]
    assert "survivors=(0, 1, 2, ... 1000 in all)" in told
    assert len(told) < 1000


# --- the package ---------------------------------------------------------------------------------------------------


def test_the_kits_are_offered_by_the_package() -> None:
    assert testing.check_policy is check_policy
    assert testing.check_membership is check_membership
    assert testing.every_failure is every_failure


def test_importing_them_imports_no_framework_and_no_horovod() -> None:
    heavy = ["horovod", "keras", "matplotlib", "tensorflow", "torch"]
    script = f"import sys, horovod_ft.testing; print([name for name in {heavy} if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == "[]"
