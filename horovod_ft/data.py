"""Which sample goes to which worker at which step: the global order of an epoch, the cursor in it, and the deal.

No framework, no files, no collectives. Every worker computes the same thing from the same few numbers, so a group of
any size can go on where another one stopped.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from horovod_ft.errors import ConfigurationError, UsageError

Ids = NDArray[np.int64]


class Place(NamedTuple):
    """A point in the stream of samples: ``position`` samples of ``epoch`` are used up."""

    epoch: int
    position: int


class Range(NamedTuple):
    """A global batch: ``order(epoch)[start:stop]``."""

    epoch: int
    start: int
    stop: int


@dataclass(frozen=True)
class Deal:
    """One worker's share of one global batch.

    Attributes:
        epoch, start, stop: the global batch is ``order(epoch)[start:stop]``.
        generation, rank, size: the group it was dealt to.
        ids: int64, shape ``(n,)``: this worker's sample ids; of an idle worker, one id to compute on in vain.
        idle: the global batch has fewer samples than the group has workers, and none is left for this one.
    """

    epoch: int
    start: int
    stop: int
    generation: int
    rank: int
    size: int
    ids: Ids = field(repr=False)
    idle: bool

    @property
    def share(self) -> int:
        """How many samples this worker contributes."""
        return 0 if self.idle else len(self.ids)

    @property
    def weight(self) -> float:
        """Factor for this worker's mean gradient, so that the average over workers is the mean over all samples.

        ``share / total * size``: the sum of ``share / total * local mean`` is wanted, and an average divides by
        ``size`` again. Exactly 1.0 when all shares are equal.
        """
        return self.share * self.size / (self.stop - self.start)

    def same_batch(self, other: Deal) -> bool:
        """Whether both are the same slice of the same global batch for the same group."""
        mine = (self.epoch, self.start, self.stop, self.generation, self.rank, self.size)
        return mine == (other.epoch, other.start, other.stop, other.generation, other.rank, other.size)


def shares(total: int, size: int) -> Iterator[tuple[int, int]]:
    """Cut ``total`` samples into ``size`` contiguous ``(start, stop)`` slices whose lengths differ by at most one."""
    length, longer = divmod(total, size)
    start = 0
    for rank in range(size):
        stop = start + length + (rank < longer)
        yield start, stop
        start = stop


class EpochOrder:
    """The order in which an epoch visits the samples: a permutation seeded by ``(seed, epoch)``, or 0..n-1.

    Args:
        length: samples in the dataset, at least 1.
        shuffle: permute anew for each epoch.
        seed: non-negative; the same on all workers.
    """

    def __init__(self, length: int, *, shuffle: bool, seed: int) -> None:
        if length < 1:
            raise ConfigurationError("the dataset is empty: there is nothing to train on")
        if seed < 0:
            raise ConfigurationError(f"seed is {seed}; it must not be negative")
        self.length = length
        self.shuffle = shuffle
        self.seed = seed
        self._cached: tuple[int, Ids] | None = None

    def __call__(self, epoch: int) -> Ids:
        """int64, shape ``(length,)``. The last epoch asked for is kept."""
        if self._cached is None or self._cached[0] != epoch:
            self._cached = (epoch, self._compute(epoch))
        return self._cached[1]

    def _compute(self, epoch: int) -> Ids:
        if not self.shuffle:
            return np.arange(self.length, dtype=np.int64)
        return np.random.default_rng((self.seed, epoch)).permutation(self.length).astype(np.int64, copy=False)


@dataclass(frozen=True)
class BatchSize:
    """How large a global batch is: constant, or constant for each worker.

    Exactly one of the two is given; both are in samples.
    """

    total: int | None = None
    per_worker: int | None = None

    def __post_init__(self) -> None:
        if (self.total is None) == (self.per_worker is None):
            raise ConfigurationError(
                "give either global_batch_size=G (constant, whatever the number of workers) or batch_size=B (for each "
                "worker), and not both"
            )
        for name, value in (("global_batch_size", self.total), ("batch_size", self.per_worker)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigurationError(f"{name} is {value!r}; it must be a whole number of samples, at least 1")

    def of(self, size: int) -> int:
        """Samples in a global batch of a group of ``size`` workers."""
        if self.total is not None:
            return self.total
        assert self.per_worker is not None
        return self.per_worker * size


class Cursor:
    """Where training is in the stream of samples: what is committed, and what has been taken since.

    ``take`` moves ahead, ``commit`` makes it lasting, ``rollback`` returns to the last commit. The committer calls the
    last two together with the step counter, which is what makes the cursor atomic with the step.

    Attributes:
        open: what has been taken since the last commit.

    Args:
        order: the global order of every epoch.
        batch: size of a global batch.
        drop_last: leave out a last global batch that is not full. Which batch that is can change with the number of
            workers only under ``batch_size``; under ``global_batch_size`` it never does.
    """

    def __init__(self, order: EpochOrder, batch: BatchSize, *, drop_last: bool = False) -> None:
        self.order = order
        self.batch = batch
        self.drop_last = drop_last
        self.committed = Place(0, 0)
        self.taken = Place(0, 0)
        self.open: list[Deal] = []
        self._repeated: dict[Place, int] = {}

    @property
    def epoch(self) -> int:
        return self.taken.epoch

    def exhausted(self, size: int) -> bool:
        """Whether the epoch has no further global batch for a group of ``size`` workers."""
        return self._samples_after(self.taken, size) == 0

    def _samples_after(self, place: Place, size: int) -> int:
        """Samples of the global batch that begins at a place; 0 if there is none."""
        if place in self._repeated:
            return self._repeated[place] - place.position
        total = min(self.batch.of(size), self.order.length - place.position)
        return 0 if total < (self.batch.of(size) if self.drop_last else 1) else total

    def peek(self, *, generation: int, rank: int, size: int, after: Place | None = None) -> Deal | None:
        """The deal that follows ``after`` (default: what was taken last), or None at the end of its epoch."""
        place = self.taken if after is None else after
        total = self._samples_after(place, size)
        if total == 0:
            return None
        start, stop = list(shares(total, size))[rank]
        order = self.order(place.epoch)
        idle = start == stop
        first = place.position if idle else place.position + start
        last = first + 1 if idle else place.position + stop
        return Deal(
            epoch=place.epoch,
            start=place.position,
            stop=place.position + total,
            generation=generation,
            rank=rank,
            size=size,
            ids=order[first:last],
            idle=idle,
        )

    def take(self, deal: Deal) -> None:
        """Move past a deal that ``peek`` gave for the present place."""
        if (deal.epoch, deal.start) != self.taken:
            raise UsageError(f"{deal} does not begin at {self.taken}")
        self.taken = Place(deal.epoch, deal.stop)
        self.open.append(deal)

    def begin_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch. Committed at once, unless batches that were taken before are still open."""
        self.taken = Place(epoch, 0)
        if not self.open:
            self.committed = self.taken

    def commit(self) -> None:
        self.go_to(self.taken)

    def rollback(self) -> None:
        self.taken = self.committed
        self.open.clear()

    def go_to(self, place: Place) -> None:
        """Jump, committed: where the others are."""
        self.taken = self.committed = place
        self.open.clear()
        self._repeated.clear()

    def open_ranges(self) -> tuple[Range, ...]:
        """The global batches of the open step, in order."""
        if self._repeated:
            return tuple(Range(place.epoch, place.position, stop) for place, stop in sorted(self._repeated.items()))
        return tuple(Range(deal.epoch, deal.start, deal.stop) for deal in self.open)

    def dealt_to(self, ranks: Iterable[int]) -> list[int]:
        """Ids of the samples of the open step that were dealt to these workers of the present group."""
        wanted = set(ranks)
        return [
            int(sample)
            for deal in self.open
            for rank, (start, stop) in enumerate(shares(deal.stop - deal.start, deal.size))
            if rank in wanted
            for sample in self.order(deal.epoch)[deal.start + start : deal.start + stop]
        ]

    def repeat(self, ranges: Iterable[Range]) -> None:
        """Until the next commit, deal exactly these global batches, whatever the size of the group.

        For a step that is replayed although an update of it has been applied: the update covers them.
        """
        self._repeated = {Place(epoch, start): stop for epoch, start, stop in ranges}


class Watcher(Protocol):
    """Whoever tracks a stream of batches and commits its cursor: the state of a training."""

    def taking(self) -> None:
        """A batch is about to be fetched."""

    def taken(self, deal: Deal) -> None:
        """A batch is about to be trained on."""


class Untracked:
    """Nobody tracks the stream: a batch is used up once it is taken."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor

    def taking(self) -> None:
        """Nothing to do."""

    def taken(self, deal: Deal) -> None:
        self._cursor.commit()


def batches_of_an_epoch(cursor: Cursor, size: int) -> int:
    """Global batches of a whole epoch for a group of ``size`` workers."""
    samples, length = cursor.batch.of(size), cursor.order.length
    return length // samples if cursor.drop_last else -(-length // samples)


def warn_about_idle_workers(batch: BatchSize, size: int) -> None:
    """Say so when a constant global batch is smaller than the group: it works, but some workers compute in vain."""
    if batch.total is not None and batch.total < size:
        warnings.warn(
            f"global_batch_size={batch.total} is smaller than the {size} workers: in every step {size - batch.total} "
            "of them have no sample; they compute on a borrowed one whose gradient gets weight zero. The result is "
            "right, but their work is wasted: use a larger global batch or fewer workers",
            stacklevel=3,
        )
