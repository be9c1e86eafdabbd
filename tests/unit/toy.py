"""A training small enough to run on threads: integers instead of floats, so that "equal" means equal.

Each step maps the weights to something that depends on the weights and on the samples of the whole global batch. The
map is exact and does not commute, so a step that is lost, repeated or computed on other samples changes the result.
Two updates a step stand for two optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_ft.agreement import Gradients, Reach
from horovod_ft.checkpoint.options import Checkpoints
from horovod_ft.checkpoint.partition import Part, Piece
from horovod_ft.checkpoint.tensors import Tensor, TensorSpec, tensor
from horovod_ft.committer import Committer
from horovod_ft.data import BatchSize, Cursor, Deal, EpochOrder, Place, Range
from horovod_ft.events import Event, EventBus
from horovod_ft.faults.inject import Injector
from horovod_ft.faults.plan import Fault
from horovod_ft.guard import ReplicaGuard
from horovod_ft.ledger import Ledger
from horovod_ft.membership.base import Bytes, Group
from horovod_ft.policies.rollback import MiniBatchRollback
from horovod_ft.policy import Forward, RecoveryPolicy
from horovod_ft.recovery import Engine
from horovod_ft.snapshot import ARENAS, Copies
from horovod_ft.testing.fake_world import Breakage, FakeMembership, FakeWorld, Outcome
from horovod_ft.trainee import Finished
from horovod_ft.transfer import Block

Integers = NDArray[np.int64]
MODULUS = 1_000_003
WIDTH = 3


SIX_A_STEP = BatchSize(total=6)


@dataclass(frozen=True)
class Job:
    """What is trained, and how."""

    samples: int = 20
    batch: BatchSize = SIX_A_STEP
    epochs: int = 2
    updates: int = 1
    passes: int = 1
    ledger: Path | None = None

    def order(self) -> EpochOrder:
        return EpochOrder(self.samples, shuffle=True, seed=11)


DEFAULT = Job()


def initial() -> Integers:
    return np.arange(1, WIDTH + 1, dtype=np.int64)


def contribution(ids: Sequence[int], which: int) -> int:
    """What some samples add to an update; the sum over parts of a batch is that of the batch."""
    return sum((sample + 2) ** 2 + which for sample in ids)


def updated(weights: Integers, gradient: int) -> Integers:
    return (weights * 31 + gradient * np.arange(1, WIDTH + 1)) % MODULUS


def expected(job: Job) -> Integers:
    """The weights at the end of a training by one worker without failures."""
    assert job.batch.total is not None
    weights = np.stack([initial()] * job.updates)
    order = job.order()
    batches = [
        order(epoch)[at : at + job.batch.total]
        for epoch in range(job.epochs)
        for at in range(0, job.samples, job.batch.total)
    ]
    for step in range(0, len(batches), job.passes):
        for which in range(job.updates):
            gradient = sum(contribution(ids.tolist(), which) for ids in batches[step : step + job.passes])
            weights[which] = updated(weights[which], gradient)
    return weights


class ArrayBlock:
    """An array as a ``transfer.Block``."""

    def __init__(self, array: NDArray[Any], *, local: bool = False) -> None:
        self.array = array
        self.local = local
        self.nbytes = array.nbytes

    def host(self, *, read: bool) -> Bytes:
        return self.array.reshape(-1).view(np.uint8)

    def write_back(self) -> None:
        """``host`` is the memory itself."""


class Value:
    """A light value that steps change; a ``committer.Part``."""

    def __init__(self, value: int = 0, *, replicated: bool = True) -> None:
        self.replicated = replicated
        self.value = value
        self.saved = value

    def begin(self) -> None:
        self.saved = self.value

    def commit(self) -> None:
        """The present value is the committed one."""

    def rollback(self) -> None:
        self.value = self.saved

    def export(self) -> int:
        return self.value

    def adopt(self, value: int) -> None:
        self.value = value


class CursorPart:
    """The cursor as a ``committer.Part``."""

    replicated = True

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor

    def begin(self) -> None:
        """The cursor remembers its last commit itself."""

    def commit(self) -> None:
        self._cursor.commit()

    def rollback(self) -> None:
        self._cursor.rollback()

    def export(self) -> Place:
        return self._cursor.committed

    def adopt(self, value: Place) -> None:
        self._cursor.go_to(value)


class WeightsCopy:
    """The full copy of the weights that scripts with explicit commits go back to; a ``committer.Part``."""

    replicated = False

    def __init__(self, weights: Integers) -> None:
        self._weights = weights
        self._saved = weights.copy()
        self.enabled = True

    def begin(self) -> None:
        self._saved = self._weights.copy()

    def commit(self) -> None:
        """The present value is the committed one."""

    def rollback(self) -> None:
        if self.enabled:
            self._weights[:] = self._saved

    def export(self) -> None:
        return None

    def adopt(self, value: Any) -> None:
        """Never: it is not replicated."""


class WeightsArena:
    """Room for one copy of the weights; a ``snapshot.Arena``."""

    def __init__(self, weights: Integers) -> None:
        self.nbytes = 0
        self.settled = 0
        self._weights = weights
        self.saved = weights.copy()

    def fits(self) -> bool:
        return True

    def reserve(self) -> None:
        self.nbytes = self._weights.nbytes

    def write(self) -> None:
        self.saved[:] = self._weights

    def settle(self) -> None:
        self.settled += 1

    def read(self) -> None:
        self._weights[:] = self.saved


class ToyDurable:
    """What a durable checkpoint holds of a Toy; a ``trainee.Durable``."""

    def __init__(self, toy: Toy) -> None:
        self.versions: Mapping[str, str] = {}
        self._toy = toy

    def _tensor(self) -> Tensor:
        return tensor("weights", "I64", self._toy.weights.shape, self._toy.weights)

    def tensors(self) -> list[TensorSpec]:
        return [self._tensor().spec]

    def capture(self, pieces: Sequence[Piece]) -> tuple[list[Part], Callable[[], None]]:
        spec, data = self._tensor()
        copies = [memoryview(bytes(data[piece.start : piece.stop])) for piece in pieces]
        return [Part(spec, piece, copy) for piece, copy in zip(pieces, copies, strict=True)], lambda: None

    def shared(self) -> dict[str, Any]:
        return {"updates": self._toy.schedule.value, "place": list(self._toy.cursor.committed)}

    def local(self) -> Any:
        return [self._toy.draws.value, self._toy.running]

    def open(self, shared: dict[str, Any]) -> list[Tensor]:
        return [self._tensor()]

    def restored(self, shared: dict[str, Any], local: Any) -> None:
        self._toy.schedule.value = shared["updates"]
        self._toy.cursor.go_to(Place(*shared["place"]))
        self._toy.draws.value, self._toy.running[:] = local


@dataclass
class Result:
    """What one worker has at the end."""

    weights: Integers
    steps: int
    schedule: int
    place: Place
    group: Group


class Toy:
    """One worker's training: a ``recovery.Trainee``, its loader and its training function."""

    def __init__(
        self,
        membership: FakeMembership,
        job: Job,
        *,
        policy: RecoveryPolicy | None = None,
        faults: Sequence[Fault] = (),
        attempt: int = 0,
    ) -> None:
        self.membership = membership
        self.job = job
        self.policy = policy or MiniBatchRollback()
        self.weights = np.stack([initial()] * job.updates)
        self.running = np.zeros(2, dtype=np.int64)  # a buffer of this worker's own
        self.schedule = Value()
        self.draws = Value(replicated=False)
        self.cursor = Cursor(job.order(), job.batch)
        self.copy = WeightsCopy(self.weights)
        self.committer = Committer([self.schedule, self.draws, CursorPart(self.cursor), self.copy])
        self.events: list[Event] = []
        self.calls: list[str] = []
        self.names = [f"weights ({job.updates}, {WIDTH}) int64"]
        worker = f"host{membership.index}:{membership.index}:1"
        self.bus = EventBus(worker)
        self.bus.subscribe(self._record)
        self.injector = Injector(faults, membership.index, "host", self.bus, send=membership.die, sleep=lambda _: None)
        self.ledger = Ledger(job.ledger, worker)
        self.ledger.describe(length=job.samples, drop_last=False)
        self.engine = Engine(
            membership, self, self.committer, self.bus, self.injector, self.ledger, attempt=attempt
        )
        self.checkpoints: Checkpoints | None = None
        self.in_body: Callable[[Deal], None] = lambda deal: None
        self.before_step: Callable[[Deal], None] = lambda deal: None
        self.original: Callable[[Deal], None] = self.body
        self.extra = Value()
        self._batches_summed = 0
        self._gradients = [0] * job.updates
        self.guarded: ReplicaGuard | None = None
        self.copies: Copies | None = None
        self.durable: ToyDurable | None = ToyDurable(self)
        self.sane = True
        self._waiting: int | None = None
        self._reduced: int | None = None
        self._lossy = False

    def _record(self, event: Event) -> None:
        self.events.append(event)

    @property
    def steps(self) -> int:
        return self.committer.frontier.step

    def keep_copies(self, every: int | None) -> Copies:
        arenas = [WeightsArena(self.weights) for _ in range(ARENAS)]
        self.copies = Copies(arenas, self.committer.parts, every, mono=lambda: 0.0)
        return self.copies

    # --- the training script ---------------------------------------------------------------------------------------

    def run(self) -> Result:
        self.engine.run(self.policy, self.train, self.checkpoints)
        return Result(self.weights, self.steps, self.schedule.value, self.cursor.committed, self.membership.group)

    def train(self) -> None:
        for _ in self.epochs():
            for deal in self.batches():
                self.before_step(deal)
                with self.engine.step():
                    self.in_body(deal)
                    self.body(deal)

    def body(self, deal: Deal) -> None:
        """Forward, backward, and all optimizers' updates."""
        self.draws.value += 1
        self.running[0] += 1
        for which in range(self.job.updates):
            self._gradients[which] += contribution([] if deal.idle else deal.ids.tolist(), which)
        self._batches_summed += 1
        if self._batches_summed < self.job.passes:
            return
        for which in range(self.job.updates):
            gradient = self.wait_for_gradient(which)
            if self.engine.admit_update():
                self.weights[which] = updated(self.weights[which], gradient)
                self.engine.update_applied()
        self._batches_summed = 0
        self._gradients = [0] * self.job.updates
        self.schedule.value += 1

    def wait_for_gradient(self, which: int) -> int:
        self._waiting, self._reduced, self._lossy = which, None, False
        try:
            self._reduced = self.reduce(self._gradients[which], f"gradient.{which}")
        except self.membership.failure_types as error:
            if not self.engine.broken_update(error):
                raise
        finally:
            self._waiting = None
        assert self._reduced is not None
        return self._reduced

    def reduce(self, value: int, name: str) -> int:
        try:
            return sum(self.membership.comm.allgather_object(value, name))
        except self.membership.failure_types as error:
            self.engine.note(error)
            raise

    def epochs(self) -> Iterator[int]:
        while self.cursor.epoch < self.job.epochs:
            epoch = self.cursor.epoch
            yield epoch
            if self.cursor.epoch == epoch:
                self.cursor.begin_epoch(epoch + 1)

    def batches(self) -> Iterator[Deal]:
        epoch = self.cursor.epoch
        while self.cursor.epoch == epoch:
            group = self.membership.group
            deal = self.cursor.peek(generation=group.generation, rank=group.rank, size=group.size)
            if deal is None:
                return
            self.engine.begin()
            self.cursor.take(deal)
            self.ledger.dealt(self.steps + 1, deal)
            yield deal

    # --- what the engine uses --------------------------------------------------------------------------------------

    def schema(self) -> list[str]:
        return self.names

    def structure(self) -> str:
        return "one array of weights"

    def prepare(self, structure: str) -> None:
        assert structure == self.structure()
        self.calls.append("prepare")

    def blocks(self) -> list[Block]:
        return [ArrayBlock(self.weights), ArrayBlock(self.running, local=True)]

    def joined(self, generation: int, rank: int) -> None:
        self.calls.append(f"joined {generation} {rank}")

    def drain(self) -> tuple[int, int]:
        self.calls.append("drain")
        return 0, self.job.updates

    def keep_gradients(self, keep: bool) -> None:
        """The reduction is waited for where it is begun."""

    def gradients(self) -> Gradients | str:
        if self._waiting is None:
            return "was elsewhere"
        return Gradients(f"update {self._waiting}", (self._reduced is not None,), (self._lossy,), (1,), 1.0)

    def finish(self, reach: Reach, decision: Forward) -> Finished:
        assert self._waiting is not None
        holder = reach.holders[0]
        if holder is not None:
            self._reduced = self.membership.comm.broadcast_object(self._reduced, holder, "completion")
            self._lossy = reach.lossy[0]
        else:
            local = self._gradients[self._waiting]
            self._reduced = sum(self.membership.comm.allgather_object(local, "completion"))
            self._lossy = bool(reach.gone)
        return Finished(1, 1, ("weights",) if self._lossy else (), int(self._lossy))

    def update_elements(self) -> int:
        return 1

    def reduction_s(self) -> float:
        return 0.0

    def dealt_to(self, ranks: Iterable[int]) -> list[int]:
        return self.cursor.dealt_to(ranks)

    def ft_copies(self) -> Copies | None:
        return self.copies

    def ft_durable(self) -> ToyDurable | None:
        return self.durable

    def ft_guard(self) -> ReplicaGuard | None:
        return self.guarded

    def digest(self) -> int:
        return int.from_bytes(self.weights.tobytes(), "little") % (2**61 - 1)

    def finite(self) -> bool:
        return self.sane

    def refuse(self, error: BaseException) -> None:
        self.calls.append("refuse")

    def discard(self) -> None:
        self._batches_summed = 0
        self._gradients = [0] * self.job.updates

    def accumulating(self) -> bool:
        return self._batches_summed > 0

    def open_ranges(self) -> tuple[Range, ...]:
        return self.cursor.open_ranges()

    def repeat(self, ranges: tuple[Range, ...]) -> None:
        self.cursor.repeat(ranges)

    def regrouped(self, group: Group) -> None:
        self.calls.append("regrouped")

    def settled(self, group: Group) -> None:
        self.calls.append(f"settled {group.rank} {group.size} {group.generation}")

    def reentering(self) -> None:
        self.calls.append("reentering")

    def stepping(self) -> None:
        self.copy.enabled = False


@dataclass
class Ended:
    """How a job ended; keys are worker indices."""

    outcomes: dict[int, Outcome[Result]]
    toys: dict[int, Toy] = field(default_factory=dict)

    @property
    def results(self) -> dict[int, Result]:
        """Of those who are left."""
        return {index: outcome.value for index, outcome in self.outcomes.items() if not outcome.died}

    @property
    def dead(self) -> set[int]:
        return {index for index, outcome in self.outcomes.items() if outcome.died}

    @property
    def errors(self) -> dict[int, BaseException]:
        return {index: outcome.error for index, outcome in self.outcomes.items() if outcome.error is not None}

    def events(self, index: int, kind: str) -> list[Event]:
        return [event for event in self.toys[index].events if event.kind == kind]

    def kinds(self, index: int) -> list[str]:
        return [event.kind for event in self.toys[index].events]


def run_toys(
    size: int,
    breakages: Sequence[Breakage] = (),
    job: Job = DEFAULT,
    *,
    policy: Callable[[int], RecoveryPolicy] = lambda index: MiniBatchRollback(),
    faults: Sequence[Fault] = (),
    attempt: int = 0,
    prepare: Callable[[Toy], None] = lambda toy: None,
    script: Callable[[Toy], Result] = Toy.run,
    **world: Any,
) -> Ended:
    """Run a job on a world of ``size`` workers to its end.

    Args:
        policy: for each worker index.
        prepare: called with each worker's training before it begins.
        script: what each worker runs.
        world: further arguments of FakeWorld.
    """
    toys: dict[int, Toy] = {}

    def live(membership: FakeMembership) -> Result:
        membership.start()
        toy = Toy(membership, job, policy=policy(membership.index), faults=faults, attempt=attempt)
        toys[membership.index] = toy
        prepare(toy)
        return script(toy)

    try:
        return Ended(FakeWorld(size, breakages, **world).run(live), toys)
    finally:
        for toy in toys.values():
            if toy.ledger._lines is not None:  # processes leave that to their end
                toy.ledger._lines.close()
