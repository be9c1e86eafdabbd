"""A world of workers as threads with a fake Horovod between them, to test what runs above a ``Membership``.

Nothing depends on timing: a collective completes if and only if every member of the group takes part in it, however the
threads are scheduled, and it fails on the others as soon as a member is gone that will never take part. There are no
sleeps. If all workers wait for each other, each raises WorldError at once, which says who waits for what.
"""

from __future__ import annotations

import functools
import operator
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NoReturn, TypeVar, cast

import numpy as np

from horovod_ft.membership.base import Bytes, Group

T = TypeVar("T")


class GroupBroken(RuntimeError):  # noqa: N818  stands for HorovodInternalError
    """What a collective of a broken group raises; the failure type of this membership."""


class WorkerDied(BaseException):
    """Ends the thread of a dead worker; raised again by whatever that asks of its world. Nobody may catch it."""


class WorldError(AssertionError):
    """The workers wait for each other for ever, or use a collective wrongly: a bug in what is being tested."""


@dataclass(frozen=True)
class Breakage:
    """The group breaks when a worker comes to a collective.

    Attributes:
        worker: index of the worker.
        name: of the collective.
        nth: which of the worker's collectives of this name, counted from 1 over its whole life.
        reaches: indices of workers on whom the collective completes nevertheless. If there are any, the worker takes
            part in it before the group breaks.
        dies: the worker is dead from then on; otherwise the group breaks and nobody is lost.
    """

    worker: int
    name: str
    nth: int = 1
    reaches: Collection[int] = ()
    dies: bool = True


@dataclass
class Outcome(Generic[T]):
    """How one worker ended: its script returned a result, raised an error, or it died."""

    result: T | None = None
    error: BaseException | None = None
    died: bool = False

    @property
    def value(self) -> T:
        """The result; raises the error if there is one."""
        if self.error is not None:
            raise self.error
        assert not self.died, "this worker died"
        return cast(T, self.result)


@dataclass
class _Round:
    """One collective of one group: what each member gave, by index."""

    given: dict[int, Any] = field(default_factory=dict)
    reaches: Collection[int] | None = None


@dataclass
class _Formation:
    """One group: its members' indices by rank, and those of them that will take part in nothing more."""

    members: tuple[int, ...]
    gone: set[int] = field(default_factory=set)
    rounds: dict[tuple[str, int], _Round] = field(default_factory=dict)
    asked: Counter[tuple[int, str]] = field(default_factory=Counter)

    def round_of(self, index: int, name: str) -> _Round:
        """The collective that a member's next call of this name belongs to."""
        self.asked[index, name] += 1
        return self.rounds.setdefault((name, self.asked[index, name]), _Round())

    def complete(self, round_: _Round) -> bool:
        return len(round_.given) == len(self.members)

    def hopeless(self, round_: _Round) -> bool:
        return bool(self.gone - round_.given.keys())


@dataclass(frozen=True)
class _Wait:
    what: str
    ready: Callable[[], bool]


class FakeWorld:
    """``size`` workers, and those that are announced later.

    Args:
        size: workers at the start; their indices are 0 to ``size - 1``, newcomers are numbered on.
        breakages: what goes wrong, each once.
        arrange: puts the indices of a new group, which come as survivors by rank and then newcomers, in the order of
            the new ranks. Default: as they come.
        must_break: all breakages have to come; a plan that injects nothing would otherwise pass for a success.
        timeout_s: bound of each wait, in case this file has a bug.
    """

    def __init__(
        self,
        size: int,
        breakages: Iterable[Breakage] = (),
        *,
        arrange: Callable[[Sequence[int]], Sequence[int]] = tuple,
        must_break: bool = True,
        timeout_s: float = 10.0,
    ) -> None:
        self._breakages = list(breakages)
        self._arrange = arrange
        self._must_break = must_break
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._members = [FakeMembership(self, index) for index in range(size)]
        self._living = set(range(size))
        self._forming: set[int] = set()
        self._waiting: dict[int, _Wait] = {}
        self._stuck: str | None = None
        self._threads: list[threading.Thread] = []
        self._outcomes: dict[int, Outcome[Any]] = {}
        self._script: Callable[[FakeMembership], Any] | None = None

    # --- running ---------------------------------------------------------------------------------------------------

    def run(self, script: Callable[[FakeMembership], T]) -> dict[int, Outcome[T]]:
        """Run the script on every worker, newcomers included, until all have ended. Once a world.

        Raises:
            WorldError: the workers were stuck, or a planned breakage never came.
        """
        self._script = script
        with self._changed:
            for member in self._members:
                self._begin(member)
        for thread in self._threads:  # the list grows while newcomers are announced
            thread.join(self._timeout_s)
            if thread.is_alive():
                raise WorldError(f"{thread.name} did not end within {self._timeout_s} s")
        if self._stuck is not None:
            raise WorldError(self._stuck)
        for outcome in self._outcomes.values():
            if isinstance(outcome.error, WorldError):
                raise outcome.error
        if self._breakages and self._must_break:
            raise WorldError(f"never came: {self._breakages}")
        return dict(sorted(self._outcomes.items()))

    def _begin(self, member: FakeMembership) -> None:
        thread = threading.Thread(target=self._live, args=(member,), name=f"worker {member.index}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _live(self, member: FakeMembership) -> None:
        assert self._script is not None
        outcome: Outcome[Any] = Outcome()
        try:
            outcome.result = self._script(member)
        except WorkerDied:
            outcome.died = True
        except BaseException as error:  # told by ``Outcome.value``
            outcome.error = error
        with self._changed:
            self._outcomes[member.index] = outcome
            self._end(member)

    # --- what workers ask; each method below holds the lock ----------------------------------------------------------

    def add(self, teller: FakeMembership, newcomers: int) -> None:
        """Start new workers; from now on no group forms without them."""
        with self._changed:
            self._check_alive(teller)
            for _ in range(newcomers):
                member = FakeMembership(self, len(self._members))
                self._members.append(member)
                self._living.add(member.index)
                self._begin(member)

    def die(self, member: FakeMembership) -> NoReturn:
        with self._changed:
            self._die(member)

    def leave(self, member: FakeMembership) -> int:
        """Take part in nothing more of the present group. Returns how many links that cut."""
        with self._changed:
            self._check_alive(member)
            formation = member.formation
            if formation is None or member.index in formation.gone:
                return 0
            self._go(member)
            return len(formation.members) - 1

    def form(self, member: FakeMembership) -> tuple[int, int]:
        """Wait for a new group of all who are alive. Returns rank and size."""
        with self._changed:
            self._check_alive(member)
            self._forming.add(member.index)
            self._go(member)
            self._wait(member, "a new group", lambda: member.index not in self._forming)
            assert member.formation is not None
            return member.formation.members.index(member.index), len(member.formation.members)

    def give(self, member: FakeMembership, name: str, value: Any) -> _Round:
        """Take part in a collective, without waiting for the others."""
        with self._changed:
            self._check_alive(member)
            formation = self._formation_of(member)
            round_ = formation.round_of(member.index, name)
            breakage = self._due(member, name)
            if breakage is not None and not breakage.reaches:
                self._break(member, breakage)
            round_.given[member.index] = value
            if breakage is not None:
                round_.reaches = breakage.reaches
                if breakage.dies or member.index not in breakage.reaches:
                    self._break(member, breakage)
            self._notify()
            return round_

    def take(self, member: FakeMembership, name: str, round_: _Round) -> list[Any]:
        """Wait until all have taken part. Returns what they gave, by rank."""
        with self._changed:
            self._check_alive(member)
            formation = self._formation_of(member)
            self._wait(member, f"{name!r}", lambda: formation.complete(round_) or formation.hopeless(round_))
            reached = round_.reaches is None or member.index in round_.reaches
            if not formation.complete(round_) or not reached:
                self._go(member)
                raise GroupBroken(f"{name} failed: a worker is gone")
            return [round_.given[index] for index in formation.members]

    # --- inside, the lock is held ------------------------------------------------------------------------------------

    def _check_alive(self, member: FakeMembership) -> None:
        if member.index not in self._living:
            raise WorkerDied(f"worker {member.index}")

    def _formation_of(self, member: FakeMembership) -> _Formation:
        if member.formation is None:
            raise WorldError(f"worker {member.index} is in no group")
        if member.index in member.formation.gone:
            raise GroupBroken("this worker has left the group")
        return member.formation

    def _due(self, member: FakeMembership, name: str) -> Breakage | None:
        member.calls[name] += 1
        for breakage in self._breakages:
            if (breakage.worker, breakage.name, breakage.nth) == (member.index, name, member.calls[name]):
                self._breakages.remove(breakage)
                return breakage
        return None

    def _break(self, member: FakeMembership, breakage: Breakage) -> NoReturn:
        if breakage.dies:
            self._die(member)
        self._go(member)
        raise GroupBroken(f"{breakage.name} failed on worker {member.index}")

    def _die(self, member: FakeMembership) -> NoReturn:
        self._end(member)
        raise WorkerDied(f"worker {member.index}")

    def _end(self, member: FakeMembership) -> None:
        self._living.discard(member.index)
        self._go(member)

    def _go(self, member: FakeMembership) -> None:
        if member.formation is not None:
            member.formation.gone.add(member.index)
        self._form_if_all_are_there()
        self._notify()

    def _form_if_all_are_there(self) -> None:
        if not self._forming or self._forming != self._living:
            return
        order = self._arrange(sorted(self._forming, key=self._present_place))
        formation = _Formation(tuple(order))
        for index in order:
            self._members[index].formation = formation
        self._forming.clear()

    def _present_place(self, index: int) -> tuple[bool, int]:
        formation = self._members[index].formation
        return (True, index) if formation is None else (False, formation.members.index(index))

    def _wait(self, member: FakeMembership, what: str, ready: Callable[[], bool]) -> None:
        self._waiting[member.index] = _Wait(what, ready)
        self._notify()
        in_time = self._changed.wait_for(lambda: ready() or self._stuck is not None, self._timeout_s)
        del self._waiting[member.index]
        if not ready():
            raise WorldError(self._stuck if in_time else f"worker {member.index} waited {self._timeout_s} s for {what}")

    def _notify(self) -> None:
        """Something changed: whoever waits looks again. Says so if nobody can ever go on."""
        waiting = self._waiting
        if waiting and waiting.keys() == self._living and not any(wait.ready() for wait in waiting.values()):
            listed = ", ".join(f"worker {index} for {wait.what}" for index, wait in sorted(waiting.items()))
            self._stuck = f"all workers wait, each for something else: {listed}"
        self._changed.notify_all()


class FakeMembership:
    """One worker's way into the world: a ``membership.base.Membership``.

    Attributes:
        index: number of the worker, for its whole life.
        aborts: how often ``abort`` was called.
    """

    failure_types: tuple[type[BaseException], ...] = (GroupBroken,)

    def __init__(self, world: FakeWorld, index: int) -> None:
        self.index = index
        self.aborts = 0
        self.told = False
        self.noticed = False
        self.formation: _Formation | None = None
        self.calls: Counter[str] = Counter()
        self._world = world
        self._group = Group(0, 1)
        self._comm = FakeCollectives(world, self)

    @property
    def group(self) -> Group:
        return self._group

    @property
    def comm(self) -> FakeCollectives:
        return self._comm

    def start(self) -> Group:
        return self.reform()

    def watch(self) -> None:
        """Changes are heard without it."""

    def changed(self) -> bool:
        return self.told

    def preempted(self) -> bool:
        return self.noticed

    def abort(self) -> int:
        self.aborts += 1
        return self._world.leave(self)

    def reform(self) -> Group:
        rank, size = self._world.form(self)
        self.told = False
        self._group = Group(rank, size, self._group.generation)
        return self._group

    def adopt_generation(self, generation: int) -> None:
        self._group = replace(self._group, generation=generation)

    def stop(self) -> None:
        self._world.leave(self)

    # --- what a test makes happen ----------------------------------------------------------------------------------

    def announce(self, newcomers: int = 1) -> None:
        """The launcher tells this worker, and nobody else, of new workers. They wait for the next group."""
        self._world.add(self, newcomers)
        self.told = True

    def preempt(self) -> None:
        """The launcher tells this worker, and nobody else, that the job is about to be ended."""
        self.noticed = True

    def die(self, *_: Any) -> NoReturn:
        """This worker is dead. Fits where a function that sends a signal is wanted."""
        self._world.die(self)


class FakeCollectives:
    """The collectives of one worker's present group. Values are pickled on the way, so that nothing is shared."""

    def __init__(self, world: FakeWorld, member: FakeMembership) -> None:
        self._world = world
        self._member = member

    def allgather_object(self, value: Any, name: str) -> list[Any]:
        return [pickle.loads(given) for given in self._exchange(name, pickle.dumps(value))]

    def broadcast_object(self, value: Any, root: int, name: str) -> Any:
        mine = self._member.group.rank == root
        given = pickle.dumps(value) if mine else None
        received = self._exchange(name, given)[root]
        return value if mine else pickle.loads(received)

    def broadcast_bytes(self, buffer: Bytes, root: int, name: str) -> None:
        if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous:
            raise WorldError(f"{name}: not a contiguous, one-dimensional array of uint8")
        given = self._exchange(name, (len(buffer), buffer.copy() if self._member.group.rank == root else None))
        if len({length for length, _ in given}) > 1:
            raise WorldError(f"{name}: buffers of different lengths {[length for length, _ in given]}")
        buffer[:] = given[root][1]

    def any_async(self, flags: int) -> FakePending:
        return FakePending(self._world, self._member, self._world.give(self._member, "changed", flags))

    def _exchange(self, name: str, value: Any) -> list[Any]:
        return self._world.take(self._member, name, self._world.give(self._member, name, value))


class FakePending:
    """Flags that are being merged over all workers; their collective is named ``changed``."""

    def __init__(self, world: FakeWorld, member: FakeMembership, round_: _Round) -> None:
        self._world = world
        self._member = member
        self._round = round_

    def result(self) -> int:
        said: list[int] = self._world.take(self._member, "changed", self._round)
        return functools.reduce(operator.or_, said)
