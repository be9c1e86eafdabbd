"""Conformance kits: what every recovery policy and every membership must keep to, whoever wrote it.

Our own run through them too. A kit raises AssertionError at the first thing that is wrong; the message says what it is,
where it was seen and what to do. This file knows no framework, and no implementation.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from types import FunctionType
from typing import Any

from horovod_ft.errors import PolicyError
from horovod_ft.policy import (
    EVERY_DECISION,
    Abort,
    Costs,
    Decision,
    Escalation,
    Failure,
    RecoveryPolicy,
    decide,
    decisions_of,
)
from horovod_ft.testing.membership_kit import Killed, Run, check_membership

__all__ = ["Killed", "Run", "check_membership", "check_policy", "every_failure"]

GRADIENTS, ELEMENTS = 8, 1_000_000
MOST_IN_A_ROW = 50


# --- failures ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Situation:
    """Where a failure found the survivors.

    Attributes:
        phase: of the survivors; of those behind, if there are any: all others had committed.
        done: how many gradients of the update at least one survivor has; None if they are not in the same update.
        closed, behind, newcomers: as in Failure.
    """

    phase: str
    done: int | None = None
    closed: str = ""
    behind: int = 0
    newcomers: int = 0


SITUATIONS = (
    _Situation("update", done=0),
    _Situation("update", done=3),
    _Situation("update", done=GRADIENTS),
    _Situation("outside", closed="worker 0 was outside of a step"),
    _Situation("step", closed="worker 0 was outside of optimizer.step()"),
    _Situation("update", closed="worker 1 is behind worker 0, who has finished that update", behind=1),
    _Situation("update", closed="worker 2 has just joined and has no part of the mini-batch", newcomers=1),
    _Situation("update", closed="worker 3 has just joined and has no part of the mini-batch", behind=1, newcomers=2),
)


def every_failure() -> Iterator[Failure]:
    """The failures that ``check_policy`` asks about: some two thousand, always the same, small groups first.

    They vary the size (2 to 1000), who is lost (nobody, one, all but one), where the survivors were (in an update of
    which no, some or all gradients are done; elsewhere or with newcomers, which closes the way forward; some behind),
    the updates of the step that are applied already, the failures in a row (1 to 50) and before, and the checkpoint.
    """
    for size in (2, 3, 8, 1000):
        for lost in dict.fromkeys([(), (size - 1,), tuple(range(1, size))]):
            for situation in SITUATIONS:
                if situation.behind < size - len(lost):
                    yield from _variants(size, lost, situation)
    for series in _series_that_lose_nobody():
        yield from series


def _variants(size: int, lost: tuple[int, ...], situation: _Situation) -> Iterator[Failure]:
    for consecutive in (1, 2, 4, 10):
        plain = _failure(size, lost, situation, consecutive)
        yield plain
        yield replace(plain, updates=1)
        yield replace(plain, ages_s=(*plain.ages_s, 90.0, 4000.0))
        costs = replace(plain.costs, restart_s=30.0)
        yield replace(plain, checkpoint_step=60, checkpoint_age_s=25.0, costs=costs)


def _series_that_lose_nobody() -> Iterator[list[Failure]]:
    """One failure after the other, without a committed step, a lost worker or a newcomer between them."""
    for size in (2, 8):
        for situation in SITUATIONS:
            if not situation.newcomers:
                yield [_failure(size, (), situation, count) for count in range(1, MOST_IN_A_ROW + 1)]


def _failure(size: int, lost: tuple[int, ...], situation: _Situation, consecutive: int) -> Failure:
    """The failures before it in the same step came half a second apart."""
    survivors = tuple(sorted(set(range(size)) - set(lost)))
    size_after = len(survivors) + situation.newcomers
    ahead = len(survivors) - situation.behind if situation.behind else 0
    done = ELEMENTS * (situation.done or 0) // GRADIENTS
    return Failure(
        generation=4, step=70, updates=0,
        phases=("commit",) * ahead + (situation.phase,) * (len(survivors) - ahead),
        lost=lost, survivors=survivors, size_before=size, size_after=size_after, newcomers=situation.newcomers,
        behind=situation.behind, consecutive=consecutive, ages_s=tuple(0.5 * nth for nth in range(1, consecutive)),
        samples_at_risk=0 if situation.phase == "outside" else 32 * size,
        shares=size, shares_lost=len(lost),
        gradients=0 if situation.done is None else GRADIENTS, gradients_done=situation.done or 0,
        elements=0 if situation.done is None else ELEMENTS, elements_done=done,
        closed=situation.closed, diverged=False, checkpoint_step=None, checkpoint_age_s=None,
        costs=Costs(0.2 * size / size_after, None if situation.closed else 0.5 * (1 - done / ELEMENTS)),
    )  # fmt: skip


# --- policies ------------------------------------------------------------------------------------------------------


def check_policy(policy: RecoveryPolicy, failures: Iterable[Failure] | None = None, *, must_end: bool = True) -> None:
    """Check that a recovery policy keeps to its contract. Takes less than a second for a policy that is quick itself.

    It cannot see what a policy reads besides the failure as long as that is the same in all of one process: the clock,
    the name of the host, an environment variable, the order of a set of strings.

    Args:
        failures: what to ask about; default: ``every_failure()``.
        must_end: while steps keep failing and nobody is lost, the policy has to give up (Abort, or None) after at most
            50 in a row. This is asked with failures of its own, half a second apart.

    Raises:
        AssertionError: it answers with something that is no decision, raises, goes forward where that is closed, makes
            a decision that its ``decisions`` do not name, changes the failure, decides differently about the same
            failure, never gives up, or has a ``repr`` that differs between processes.
    """
    asked = tuple(every_failure() if failures is None else failures)
    if not asked:
        raise AssertionError("`failures` is empty: there is nothing to ask the policy about")
    _check_repr(policy)
    _check_named_decisions(policy)
    copies = list(_copies(policy))  # before it was asked anything, as the policy of another process
    answers = [_answer_twice(policy, failure) for failure in asked]
    _check_order(policy, asked, answers)
    _check_thread(policy, asked, answers)
    for how, twin in copies:
        again = [_answer(twin, failure) for failure in asked]
        _check_same(policy, asked, answers, again, f"from {how} of it")
    if must_end:
        _check_end(policy)


def _check_repr(policy: RecoveryPolicy) -> None:
    for part in policy.policies if isinstance(policy, Escalation) else (policy,):
        if not isinstance(part, FunctionType) and " at 0x" in repr(part):
            raise AssertionError(
                f"the repr of the recovery policy, {part!r}, holds an address, which differs between workers and says "
                "nothing in a log: make the policy a dataclass, or give it a __repr__"
            )


def _check_named_decisions(policy: RecoveryPolicy) -> None:
    named = decisions_of(policy)
    if not isinstance(named, frozenset | set) or not named or not named <= EVERY_DECISION:
        kinds = ", ".join(sorted(kind.__name__ for kind in EVERY_DECISION))
        raise AssertionError(
            f"`decisions` of the recovery policy {policy!r} is {named!r}: it must be a set of classes out of {kinds} "
            "(if it is a method, make it a property), or leave it out"
        )


def _answer_twice(policy: RecoveryPolicy, failure: Failure) -> Decision | None:
    before = replace(failure, costs=replace(failure.costs))
    answer = _answer(policy, failure)
    if failure != before:
        raise _wrong(policy, f"has changed the failure to {_told(failure)}. It may only read it", before)
    named = decisions_of(policy)
    if answer is not None and not isinstance(answer, tuple(named)):
        kinds = ", ".join(sorted(kind.__name__ for kind in named))
        what = f"answered {answer!r}, but its `decisions` name only {kinds}: the engine prepares for no other. Name it"
        raise _wrong(policy, what, failure)
    _check_same(policy, [failure], [answer], [_answer(policy, failure)], "at once, for the second time")
    return answer


def _answer(policy: RecoveryPolicy, failure: Failure) -> Decision | None:
    try:
        return decide(policy, failure)
    except PolicyError as error:
        rule = "A policy has to answer every failure with a decision that can be taken, or None if it has no answer"
        raise AssertionError(f"{error}\n{rule}\nAsked about: {_told(failure)}") from error


def _check_order(policy: RecoveryPolicy, asked: Sequence[Failure], answers: Sequence[Decision | None]) -> None:
    backwards = [_answer(policy, failure) for failure in reversed(asked)]
    _check_same(policy, asked, answers, backwards[::-1], "in another order")


def _check_thread(policy: RecoveryPolicy, asked: Sequence[Failure], answers: Sequence[Decision | None]) -> None:
    with ThreadPoolExecutor(1) as other:
        again = other.submit(lambda: [_answer(policy, failure) for failure in asked]).result()
    _check_same(policy, asked, answers, again, "from another thread")


def _check_same(
    policy: RecoveryPolicy,
    asked: Sequence[Failure],
    answers: Sequence[Decision | None],
    again: Sequence[Decision | None],
    how: str,
) -> None:
    for failure, first, second in zip(asked, answers, again, strict=True):
        if first != second:
            what = (
                f"answered {first!r}, and when asked {how}: {second!r}. It must depend on nothing but the failure: the "
                "survivors are separate processes, and the job ends with DivergenceError if they disagree"
            )
            raise _wrong(policy, what, failure)


def _copies(policy: RecoveryPolicy) -> Iterator[tuple[str, RecoveryPolicy]]:
    with contextlib.suppress(Exception):  # nobody has to make policies that can be copied
        yield "a deep copy", copy.deepcopy(policy)
    with contextlib.suppress(Exception):
        yield "a pickled copy", pickle.loads(pickle.dumps(policy))


def _check_end(policy: RecoveryPolicy) -> None:
    for series in _series_that_lose_nobody():
        if not any(isinstance(_answer(policy, failure), Abort | None) for failure in series):
            what = (
                f"never gave up in {len(series)} failures in a row of one step, although nobody was lost: what fails "
                "then is the step itself, and the job would hang in it for ever. Answer None or Abort from some "
                "failure.consecutive on; or, if you mean it, check with must_end=False"
            )
            raise _wrong(policy, what, series[-1])


def _wrong(policy: RecoveryPolicy, what: str, failure: Failure) -> AssertionError:
    return AssertionError(f"the recovery policy {policy!r} {what}\nAsked about: {_told(failure)}")


def _told(failure: Failure) -> str:
    values = ((field.name, getattr(failure, field.name)) for field in fields(failure))
    return "Failure(" + ", ".join(f"{name}={_short(value)}" for name, value in values) + ")"


def _short(value: Any) -> str:
    if not isinstance(value, tuple) or len(value) <= 8:
        return repr(value)
    return f"({', '.join(map(repr, value[:3]))}, ... {len(value)} in all)"
