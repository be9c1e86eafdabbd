"""The conformance kit of memberships: see ``conformance``, which offers it as well. It knows no implementation."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import numpy as np

from horovod_ft.membership.base import Collectives, Group, Membership


class Killed(BaseException):
    """Raised by a script of ``check_membership``: the member that runs it is dead from here on, as by SIGKILL."""


class Run(Protocol):
    """Runs a script on a new group of members, each in a thread of this process. What it returns is ignored.

    It has to call the script once for each of ``size`` members, with a membership that is not started yet, and to
    return when all have ended, with a bound of its own. A member whose script raises Killed has to be to the others as
    a process that was killed. An example is ``lambda size, script: FakeWorld(size).run(script)``.
    """

    def __call__(self, size: int, script: Callable[[Membership], None], /) -> object: ...


def check_membership(run: Run, *, preempt: Callable[[Any], None] | None = None, patience_s: float = 5.0) -> None:
    """Check that a way to form groups keeps to the contract of ``membership.base.Membership``.

    It is for memberships that can form a group anew. Blocks until all members of all groups have ended.

    Args:
        run: see Run.
        preempt: has a member that it is given hear that the job is about to be ended, before it returns. Without it
            nobody hears so, and that is what is checked.
        patience_s: how long to wait for what must come at once.

    Raises:
        AssertionError: begins with the name of the check, one of MEMBERSHIP_CHECKS.
    """
    for name, check in MEMBERSHIP_CHECKS.items():
        try:
            check(_Trial(run, preempt, patience_s))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@dataclass
class _Trial:
    run: Run
    preempt: Callable[[Any], None] | None
    patience_s: float

    def values(self, script: Callable[[Membership], Any], size: int = 3) -> list[Any]:
        """What the script returned on each member that was not killed, by the rank it had at first."""
        return [value for _, value in self.told(script, size)]

    def told(self, script: Callable[[Membership], Any], size: int = 3) -> list[tuple[Group, Any]]:
        """The same, each with what ``start()`` returned."""
        ended: list[tuple[Group, Any]] = []
        errors: list[Exception] = []
        killed: list[Killed] = []

        def live(membership: Membership) -> None:
            try:
                first = membership.start()
                ended.append((first, script(membership)))
            except Killed as end:
                killed.append(end)
                raise
            except Exception as error:
                errors.append(error)

        try:
            self.run(size, live)
        except Exception as error:
            errors.append(error)
        if errors:
            raise AssertionError(f"a member, or run(), raised {errors[0]!r}") from errors[0]
        count = len(ended) + len(killed)
        _require(count == size, f"run() has to run the script on {size} members to its end; it did so on {count}")
        return sorted(ended, key=lambda one: one[0].rank)


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise AssertionError(otherwise)


def _require_dense(groups: Sequence[Group], size: int) -> None:
    ranks, sizes = sorted(group.rank for group in groups), {group.size for group in groups}
    _require(ranks == list(range(size)), f"the ranks of {size} members are {ranks}: they must be 0 to {size - 1}")
    _require(sizes == {size}, f"the size of a group of {size} is {sorted(sizes)} to its members")


def _check_failure_types(trial: _Trial) -> None:
    for types in trial.values(lambda membership: membership.failure_types):
        _require(
            isinstance(types, tuple) and bool(types) and all(issubclass(kind, BaseException) for kind in types),
            f"{types!r} is no tuple of exception classes: it is what `except` gets",
        )
        _require(not {Exception, BaseException} & set(types), f"{types} takes any error for a failure of the group")


def _check_start(trial: _Trial) -> None:
    told = trial.told(lambda membership: membership.group)
    _require_dense([first for first, _ in told], 3)
    for first, group in told:
        _require(first.generation == 0, f"start() returned {first}: the first group has generation 0")
        _require(first == group, f"start() returned {first}, but the member's group is {group}")


def _check_watch(trial: _Trial) -> None:
    def script(membership: Membership) -> bool:
        membership.watch()
        membership.watch()
        return membership.changed()

    heard = trial.values(script)
    _require(heard == [False] * 3, f"changed() is {heard}, but nobody has come or gone: it must be False")


def _check_allgather_object(trial: _Trial) -> None:
    def script(membership: Membership) -> list[Any]:
        return membership.comm.allgather_object({"from": membership.group.rank}, "values")

    for values in trial.values(script):
        _require(values == [{"from": rank} for rank in range(3)], f"it returned {values}: not the values by rank")


def _check_broadcast_object(trial: _Trial) -> None:
    def script(membership: Membership) -> Any:
        return membership.comm.broadcast_object({"from": membership.group.rank}, 1, "value")

    values = trial.values(script)
    _require(values == [{"from": 1}] * 3, f"from root 1 it returned {values}: not the value of the root everywhere")


def _check_broadcast_bytes(trial: _Trial) -> None:
    def script(membership: Membership) -> list[int]:
        buffer = np.full(4, membership.group.rank, np.uint8)
        membership.comm.broadcast_bytes(buffer, 2, "bytes")
        return [int(value) for value in buffer]

    buffers = trial.values(script)
    _require(buffers == [[2] * 4] * 3, f"from root 2, who has 2 2 2 2, the buffers are {buffers}: fill them in place")


def _check_any_async(trial: _Trial, flags: Sequence[int]) -> None:
    def script(membership: Membership) -> int:
        return membership.comm.any_async(flags[membership.group.rank]).result()

    told = trial.values(script)
    merged = [flags[0] | flags[1] | flags[2]] * 3
    _require(told == merged, f"the members said {list(flags)}, and it told them {told} in place of {merged}")


def _check_any_async_at_once(trial: _Trial) -> None:
    returned = threading.Event()

    def script(membership: Membership) -> bool:
        at_once = membership.group.rank != 0 or returned.wait(trial.patience_s)
        pending = membership.comm.any_async(0)
        returned.set()
        pending.result()
        return at_once

    _require(all(trial.values(script)), "it waits for the other members: only result() may block")


Collective: TypeAlias = Callable[[Collectives, int], Any]

COLLECTIVES: dict[str, Collective] = {
    "allgather_object": lambda comm, root: comm.allgather_object(1, "broken"),
    "broadcast_object": lambda comm, root: comm.broadcast_object(1, root, "broken"),
    "broadcast_bytes": lambda comm, root: comm.broadcast_bytes(np.zeros(4, np.uint8), root, "broken"),
    "any_async": lambda comm, root: comm.any_async(0).result(),
}


def _wrong_outcome(membership: Membership, collective: Collective, root: int) -> str:
    """What a collective does that has to fail, if it does not."""
    try:
        return f"returned {collective(membership.comm, root)!r}"
    except membership.failure_types:
        return ""
    except Exception as error:
        return f"raised {error!r}"


def _check_death(trial: _Trial, collective: Collective) -> None:
    def script(membership: Membership) -> str:
        if membership.group.rank == 2:
            raise Killed
        return _wrong_outcome(membership, collective, 2)

    for outcome in trial.values(script):
        _require(not outcome, f"a member was dead, and it {outcome}: it must raise one of the failure types")


def _check_abort(trial: _Trial) -> None:
    def script(membership: Membership) -> tuple[Sequence[int], str]:
        cut = [membership.abort(), membership.abort()] if membership.group.rank == 0 else [0, 0]
        return cut, _wrong_outcome(membership, COLLECTIVES["allgather_object"], 0)

    told = trial.values(script)
    _require(told[0][0][1] == 0, f"called twice it returned {told[0][0]}: there is nothing left to cut in the second")
    for _, outcome in told:
        _require(not outcome, f"rank 0 called it, and a collective {outcome}: it must raise one of the failure types")


def _check_reform(trial: _Trial, size: int, killed: Sequence[int]) -> None:
    def script(membership: Membership) -> tuple[Group, Group, list[Any]]:
        if membership.group.rank in killed:
            raise Killed
        if killed:
            _wrong_outcome(membership, COLLECTIVES["allgather_object"], 0)
            membership.abort()
        group = membership.reform()
        return group, membership.group, membership.comm.allgather_object(group.rank, "after")

    told = trial.values(script, size)
    left = size - len(killed)
    _require_dense([group for group, _, _ in told], left)
    for returned, group, ranks in told:
        _require(returned == group, f"it returned {returned}, but the member's group is {group}")
        _require(ranks == list(range(left)), f"an allgather of the ranks in the new group gives {ranks}")


def _check_generation(trial: _Trial) -> None:
    def script(membership: Membership) -> list[Group]:
        first = membership.group
        membership.adopt_generation(4)
        adopted = membership.group
        reformed = membership.reform()
        membership.adopt_generation(5)
        return [first, adopted, reformed, membership.group]

    for first, adopted, reformed, last in trial.values(script):
        _require(adopted == replace(first, generation=4), f"adopt_generation(4) turned {first} into {adopted}")
        _require(reformed.generation == 4, f"reform() in generation 4 gave {reformed}: it stays until it is adopted")
        _require(last == replace(reformed, generation=5), f"adopt_generation(5) turned {reformed} into {last}")


def _check_preempted(trial: _Trial) -> None:
    def script(membership: Membership) -> list[bool]:
        membership.watch()
        told = [membership.preempted()]
        if trial.preempt is not None:
            trial.preempt(membership)
        told.append(membership.preempted())
        membership.reform()
        return [*told, membership.preempted()]

    for before, heard, reformed in trial.values(script):
        _require(not before, "it is True, but nobody has said that the job will be ended")
        _require(heard == (trial.preempt is not None), f"it is {heard} {_after(trial)}")
        _require(reformed == heard, f"it is {reformed} after a reform(), and was {heard} before: it must stay")


def _after(trial: _Trial) -> str:
    return "without a notice" if trial.preempt is None else "after a notice"


def _check_stop(trial: _Trial) -> None:
    def script(membership: Membership) -> None:
        membership.stop()
        membership.stop()

    trial.values(script)


#: By name, in the order in which they are made.
MEMBERSHIP_CHECKS: dict[str, Callable[[_Trial], None]] = {
    "failure_types": _check_failure_types,
    "start": _check_start,
    "watch twice": _check_watch,
    "allgather_object": _check_allgather_object,
    "broadcast_object": _check_broadcast_object,
    "broadcast_bytes": _check_broadcast_bytes,
    "any_async with no yes": functools.partial(_check_any_async, flags=(0, 0, 0)),
    "any_async with one yes": functools.partial(_check_any_async, flags=(0, 1, 0)),
    "any_async with different ones": functools.partial(_check_any_async, flags=(8, 1, 1)),
    "any_async returns at once": _check_any_async_at_once,
    **{
        f"{name} after a death": functools.partial(_check_death, collective=collective)
        for name, collective in COLLECTIVES.items()
    },
    "abort": _check_abort,
    "reform with nobody lost": functools.partial(_check_reform, size=3, killed=()),
    "reform after a death": functools.partial(_check_reform, size=4, killed=(1,)),
    "reform down to one": functools.partial(_check_reform, size=3, killed=(0, 2)),
    "generation": _check_generation,
    "preempted": _check_preempted,
    "stop twice": _check_stop,
}
