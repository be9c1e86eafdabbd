"""The conformance kit of memberships: the fake world passes, and each check catches what it is there for.

Every broken membership below is right but for one thing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from horovod_ft.membership.base import Bytes, Group, Membership, Pending
from horovod_ft.testing.fake_world import FakeCollectives, FakeMembership, FakeWorld, WorldError
from horovod_ft.testing.membership_kit import MEMBERSHIP_CHECKS, Run, check_membership


def test_the_fake_world_passes() -> None:
    check_membership(lambda size, script: FakeWorld(size).run(script), preempt=FakeMembership.preempt)


def test_one_that_cannot_be_told_of_its_end_passes_if_it_says_nothing_of_it() -> None:
    check_membership(lambda size, script: FakeWorld(size).run(script))


def test_new_groups_may_come_in_any_order() -> None:
    check_membership(lambda size, script: FakeWorld(size, arrange=lambda order: order[::-1]).run(script))


class Other:
    """A member of a fake world and its collectives in one; right but for what a subclass changes."""

    def __init__(self, member: FakeMembership) -> None:
        self.failure_types = member.failure_types
        self.member = member

    @property
    def group(self) -> Group:
        return self.member.group

    @property
    def comm(self) -> Any:
        return self

    def start(self) -> Group:
        self.member.start()
        return self.group

    def watch(self) -> None:
        self.member.watch()

    def changed(self) -> bool:
        return self.member.changed()

    def preempted(self) -> bool:
        return self.member.preempted()

    def abort(self) -> int:
        return self.member.abort()

    def reform(self) -> Group:
        self.member.reform()
        return self.group

    def adopt_generation(self, generation: int) -> None:
        self.member.adopt_generation(generation)

    def stop(self) -> None:
        self.member.stop()

    @property
    def inner(self) -> FakeCollectives:
        return self.member.comm

    def allgather_object(self, value: Any, name: str) -> list[Any]:
        return self.inner.allgather_object(value, name)

    def broadcast_object(self, value: Any, root: int, name: str) -> Any:
        return self.inner.broadcast_object(value, root, name)

    def broadcast_bytes(self, buffer: Bytes, root: int, name: str) -> None:
        self.inner.broadcast_bytes(buffer, root, name)

    def any_async(self, flags: int) -> Pending:
        return self.inner.any_async(flags)


@dataclass
class Known:
    """An answer that is there already."""

    flags: int

    def result(self) -> int:
        return self.flags


class AnyFailure(Other):
    failure_types = (Exception,)

    def __init__(self, member: FakeMembership) -> None:
        self.member = member


class NoTuple(AnyFailure):
    failure_types = RuntimeError  # type: ignore[assignment]


class NoTypes(AnyFailure):
    failure_types = ()  # type: ignore[assignment]


class FromOne(Other):
    @property
    def group(self) -> Group:
        return replace(self.member.group, rank=self.member.group.rank + 1)


class AllFirst(Other):
    @property
    def group(self) -> Group:
        return replace(self.member.group, rank=0)


class TooLarge(Other):
    @property
    def group(self) -> Group:
        return replace(self.member.group, size=self.member.group.size + 1)


class LateGeneration(Other):
    def start(self) -> Group:
        self.member.start()
        self.adopt_generation(1)
        return self.group


class OtherGroupAtStart(Other):
    def start(self) -> Group:
        self.member.start()
        first = self.group
        self.adopt_generation(1)
        return first


class WatchedOnce(Other):
    def watch(self) -> None:
        if vars(self).setdefault("watched", False):
            raise ValueError("is watched already")
        self.watched = True


class AlwaysChanged(Other):
    def changed(self) -> bool:
        return True


class AlwaysPreempted(Other):
    def preempted(self) -> bool:
        return True


class NeverPreempted(Other):
    def preempted(self) -> bool:
        return False


class ForgetsTheNotice(Other):
    def reform(self) -> Group:
        self.member.noticed = False
        return super().reform()


class Backwards(Other):
    def allgather_object(self, value: Any, name: str) -> list[Any]:
        return super().allgather_object(value, name)[::-1]


class OwnObject(Other):
    def broadcast_object(self, value: Any, root: int, name: str) -> Any:
        super().broadcast_object(value, root, name)
        return value


class FirstRoot(Other):
    def broadcast_object(self, value: Any, root: int, name: str) -> Any:
        return super().broadcast_object(value, 0, name)


class NotInPlace(Other):
    def broadcast_bytes(self, buffer: Bytes, root: int, name: str) -> None:
        super().broadcast_bytes(buffer.copy(), root, name)


class AlwaysYes(Other):
    def any_async(self, flags: int) -> Pending:
        super().any_async(flags).result()
        return Known(1)


class OwnFlag(Other):
    def any_async(self, flags: int) -> Pending:
        pending = super().any_async(flags)
        return Known(flags & pending.result())


class FirstQuestionOnly(Other):
    def any_async(self, flags: int) -> Pending:
        return super().any_async(flags & 1)


class AnyAtOnceOnly(Other):
    def any_async(self, flags: int) -> Pending:
        return Known(super().any_async(flags).result())


class OtherError(Other):
    def allgather_object(self, value: Any, name: str) -> list[Any]:
        try:
            return super().allgather_object(value, name)
        except self.failure_types as error:
            raise OSError("connection reset") from error


class OwnObjectOfTheDead(Other):
    def broadcast_object(self, value: Any, root: int, name: str) -> Any:
        try:
            return super().broadcast_object(value, root, name)
        except self.failure_types:
            return value


class BytesOfTheDead(Other):
    def broadcast_bytes(self, buffer: Bytes, root: int, name: str) -> None:
        try:
            super().broadcast_bytes(buffer, root, name)
        except self.failure_types:
            buffer[:] = 0


class FlagOfTheDead(Other):
    def any_async(self, flags: int) -> Pending:
        pending = super().any_async(flags)

        class Lenient(Known):
            def result(self) -> int:
                try:
                    return pending.result()
                except RuntimeError:
                    return self.flags

        return Lenient(flags)


class AbortsNothing(Other):
    def abort(self) -> int:
        return 0


class AbortsOnce(Other):
    def abort(self) -> int:
        if not super().abort():
            raise ValueError("is aborted already")
        return 2


class CutsAgain(Other):
    def abort(self) -> int:
        super().abort()
        return 2


class OldRank(Other):
    """Survivors keep the ranks they had at first."""

    @property
    def group(self) -> Group:
        group = self.member.group
        return replace(group, rank=self.member.index) if group.size < 4 and self.member.index == 3 else group


class OldSize(Other):
    def reform(self) -> Group:
        size = self.group.size
        super().reform()
        self.member._group = replace(self.group, size=size)
        return self.group


class OldGroup(Other):
    def reform(self) -> Group:
        old = self.group
        super().reform()
        return replace(self.group, generation=old.generation + 1)


class NeverAlone(Other):
    def reform(self) -> Group:
        if super().reform().size == 1:
            raise ValueError("nobody else is left")
        return self.group


class NeedsADeath(Other):
    def reform(self) -> Group:
        size = self.group.size
        if super().reform().size == size:
            raise ValueError("nobody died")
        return self.group


class BrokenAfterwards(Other):
    """After a second group its collectives mix up the ranks."""

    reformed = False

    def reform(self) -> Group:
        self.reformed = True
        return super().reform()

    def allgather_object(self, value: Any, name: str) -> list[Any]:
        values = super().allgather_object(value, name)
        return values[::-1] if self.reformed else values


class CountsGenerations(Other):
    """``reform`` gives a new generation of its own."""

    def reform(self) -> Group:
        super().reform()
        if self.group.generation:
            self.member.adopt_generation(self.group.generation + 1)
        return self.group


class AdoptsNothing(Other):
    def adopt_generation(self, generation: int) -> None:
        pass


class AdoptsOnce(Other):
    def adopt_generation(self, generation: int) -> None:
        if not self.group.generation:
            super().adopt_generation(generation)


class ForgetsItsRank(Other):
    def adopt_generation(self, generation: int) -> None:
        self.member._group = Group(0, self.group.size, generation)


class StopsOnce(Other):
    def stop(self) -> None:
        if self.member.aborts == -1:
            raise ValueError("is stopped already")
        self.member.aborts = -1


#: What each check is there for. Each of these passes all checks before the one that it is listed for.
BROKEN: dict[str, list[tuple[type[Other], str]]] = {
    "failure_types": [
        (AnyFailure, "takes any error for a failure"), (NoTuple, "no tuple of exception classes"),
        (NoTypes, "no tuple of exception classes"),
    ],
    "start": [
        (FromOne, r"ranks of 3 members are \[1, 2, 3\]"), (AllFirst, r"ranks of 3 members are \[0, 0, 0\]"),
        (TooLarge, r"size of a group of 3 is \[4\]"), (LateGeneration, "the first group has generation 0"),
        (OtherGroupAtStart, "but the member's group is"),
    ],
    "watch twice": [(WatchedOnce, "watched already"), (AlwaysChanged, "must be False")],
    "allgather_object": [(Backwards, "not the values by rank")],
    "broadcast_object": [(OwnObject, "not the value of the root"), (FirstRoot, "not the value of the root")],
    "broadcast_bytes": [(NotInPlace, r"\[0, 0, 0, 0\].* fill them in place")],
    "any_async with no yes": [(AlwaysYes, r"said \[0, 0, 0\], and it told them \[1, 1, 1\]")],
    "any_async with one yes": [(OwnFlag, r"said \[0, 1, 0\], and it told them \[0, 1, 0\]")],
    "any_async with different ones": [(FirstQuestionOnly, r"it told them \[1, 1, 1\] in place of \[9, 9, 9\]")],
    "any_async returns at once": [(AnyAtOnceOnly, r"only result\(\) may block")],
    "allgather_object after a death": [(OtherError, r"raised OSError.* must raise one of the failure types")],
    "broadcast_object after a death": [(OwnObjectOfTheDead, "returned 1: it must raise")],
    "broadcast_bytes after a death": [(BytesOfTheDead, "returned None: it must raise")],
    "any_async after a death": [(FlagOfTheDead, "returned 0: it must raise")],
    "abort": [
        (AbortsNothing, r"rank 0 called it, and a collective returned \[1, 1, 1\]"),
        (AbortsOnce, "aborted already"), (CutsAgain, r"returned \[2, 2\]: there is nothing left"),
    ],
    "reform with nobody lost": [
        (NeedsADeath, "nobody died"), (OldGroup, "but the member's group is"),
        (BrokenAfterwards, r"in the new group gives \[2, 1, 0\]"),
    ],
    "reform after a death": [
        (OldRank, r"ranks of 3 members are \[0, 1, 3\]"), (OldSize, r"size of a group of 3 is \[4\]"),
    ],
    "reform down to one": [(NeverAlone, "nobody else is left")],
    "generation": [
        (CountsGenerations, r"in generation 4 gave Group\(.*generation=5\): it stays"),
        (AdoptsNothing, r"adopt_generation\(4\) turned"), (AdoptsOnce, r"adopt_generation\(5\) turned"),
        (ForgetsItsRank, r"adopt_generation\(4\) turned"),
    ],
    "preempted": [
        (AlwaysPreempted, "nobody has said"), (NeverPreempted, "is False after a notice"),
        (ForgetsTheNotice, r"is False after a reform\(\), and was True before"),
    ],
    "stop twice": [(StopsOnce, "stopped already")],
}  # fmt: skip


def world_of(kind: type[Other]) -> Run:
    return lambda size, script: FakeWorld(size).run(lambda member: script(kind(member)))


def preempt(membership: Other) -> None:
    membership.member.preempt()


def test_what_the_broken_ones_are_made_from_passes() -> None:
    check_membership(world_of(Other), preempt=preempt)


def test_every_check_has_something_that_it_catches() -> None:
    assert BROKEN.keys() == MEMBERSHIP_CHECKS.keys()


@pytest.mark.parametrize(
    ("name", "kind", "match"), [(name, *broken) for name, several in BROKEN.items() for broken in several]
)
def test_a_broken_membership_is_caught_by_its_check(name: str, kind: type[Other], match: str) -> None:
    with pytest.raises(AssertionError, match=f"^{name}: .*{match}"):
        check_membership(world_of(kind), preempt=preempt, patience_s=0.05)


def test_a_run_that_leaves_members_out_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match=r"^failure_types: run\(\) has to run the script on 3 members.* on 2"):
        check_membership(lambda size, script: FakeWorld(size - 1).run(script))


def test_a_run_that_does_not_come_to_its_end_is_told_with_the_check() -> None:
    def late(size: int, script: Callable[[Membership], None]) -> None:
        FakeWorld(size).run(script)
        raise TimeoutError("a member did not end")

    with pytest.raises(AssertionError, match=r"^failure_types: .*TimeoutError.*did not end"):
        check_membership(late)


def test_members_that_wait_for_each_other_are_told_with_the_check() -> None:
    class OwnNames(Other):
        def allgather_object(self, value: Any, name: str) -> list[Any]:
            return super().allgather_object(value, f"{name} {self.group.rank}")

    with pytest.raises(AssertionError, match=r"^allgather_object: .*all workers wait, each for something else") as told:
        check_membership(world_of(OwnNames))
    assert isinstance(told.value.__cause__, AssertionError)
    assert isinstance(told.value.__cause__.__cause__, WorldError)
