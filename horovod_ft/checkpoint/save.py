"""One save, step by step, as one worker does it. Starts no thread and calls no collectives; ``saver`` runs it.

The workers of a save find each other through the store. Each writes its shard and the document beside it; rank 0 waits
until it sees the documents of all, and puts the manifest in place; the others wait until they see that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from horovod_ft.checkpoint import layout
from horovod_ft.checkpoint.inspection import Level
from horovod_ft.checkpoint.partition import Part
from horovod_ft.checkpoint.retention import Retention, prune
from horovod_ft.checkpoint.store import CheckpointStore
from horovod_ft.checkpoint.tensors import TensorSpec
from horovod_ft.errors import CheckpointError, HorovodFtError
from horovod_ft.faults.plan import Phase

#: Seconds until the second look at what others have written; each further look comes after twice as long.
FIRST_NAP_S = 0.02
LONGEST_NAP_S = 1.0
log = logging.getLogger("horovod_ft")


@dataclass(frozen=True)
class Captured:
    """One worker's part of a save, as it was at the end of the step.

    Nothing of it may change until the part is written, which is when the saver is no longer busy.

    Attributes:
        step: committed steps.
        attempt: equal on all workers of the save, and new for each save; see ``layout.new_attempt``.
        generation: of the group.
        rank, size: of this worker in it.
        specs: all tensors, as they were cut.
        parts: this worker's.
        ready: blocks until the memory of ``parts`` is filled, for copies that are still on their way.
        local: values of this worker alone.
        shared: all other values; those of rank 0 count.
        versions: of frameworks, by name.
    """

    step: int
    attempt: str
    generation: int
    rank: int
    size: int
    specs: Sequence[TensorSpec]
    parts: Sequence[Part]
    ready: Callable[[], None]
    local: Any
    shared: Any
    versions: Mapping[str, str]

    @property
    def folder(self) -> str:
        """
        Raises:
            UsageError: step and attempt name none.
        """
        return layout.folder_name(self.step, self.attempt)


@dataclass(frozen=True)
class SaveEnded:
    """How a save ended, as far as this worker knows.

    Attributes:
        seconds: since it was submitted.
        nbytes: written by this worker.
        committed: the manifest is in place. If not, and there is no error, this worker stopped looking for it, because
            a newer save began or the saver was closed; or the save was dropped.
        error: what went wrong. A save that is committed may have one too: older ones could not be cleared away.
        written: this worker's part is, so that the others need not wait in vain.
    """

    step: int
    folder: str
    seconds: float
    nbytes: int
    committed: bool
    error: BaseException | None
    written: bool = True


@dataclass(frozen=True)
class Means:
    """What all saves of a worker have in common.

    Attributes:
        retention: what rank 0 keeps after a save; None to delete nothing.
        at: told the phase and the step when a save comes to a phase; what it raises ends the save.
        mono, wall: clocks, in seconds.
        wait_s: bound of a wait for other workers.
        grace_s: that bound after the group broke: those who live have their part written soon, or never.
    """

    store: CheckpointStore
    retention: Retention | None
    at: Callable[[Phase, int], None]
    mono: Callable[[], float]
    wall: Callable[[], float]
    wait_s: float
    grace_s: float


@dataclass(frozen=True)
class Links:
    """What a save hears from whoever runs it, and tells.

    Attributes:
        pause: waits for so many seconds, or less when there is something to hear.
        broke: when, by ``mono``, the group of the save broke; None if it did not.
        leave: nobody waits for the outcome any more.
        dropped: the save is not wanted any more.
        placing: held while the manifest is put in place: a save is dropped before that, or durable.
        free: told once this worker's part is written, and on rank 0 the manifest; its memory is not needed any more.
        durable: told when the manifest is seen to be in place.
    """

    pause: Callable[[float], None]
    broke: Callable[[], float | None]
    leave: Callable[[], bool]
    dropped: Callable[[], bool]
    placing: AbstractContextManager[Any]
    free: Callable[[], None]
    durable: Callable[[], None]


class Dropped(Exception):  # noqa: N818  a signal, no error
    """Training has gone back to before what is being saved."""


class Save:
    """One worker's side of one save."""

    def __init__(self, captured: Captured, began: float, means: Means, links: Links) -> None:
        self._captured = captured
        self._began = began
        self._means = means
        self._links = links
        self._store = means.store
        self._folder = captured.folder
        self._nbytes = 0
        self._half = False
        self._written = False
        self._watching = False
        self._committed = False

    def run(self) -> SaveEnded:
        """Do all of it. Never raises. Blocks as long as the storage does, and waits for others within the bounds."""
        error: BaseException | None = None
        try:
            self._write()
            self._written = True
            if self._captured.rank == 0:
                self._commit()
                self._clear_up()
            else:
                self._links.free()
                self._watch()
        except Dropped:
            self._delete()
        except BaseException as caught:
            self._failed(caught)
            error = without_frames(caught)
        seconds = self._means.mono() - self._began
        step = self._captured.step
        return SaveEnded(step, self._folder, seconds, self._nbytes, self._committed, error, self._written)

    # --- what this worker has to write -----------------------------------------------------------------------------

    def _write(self) -> None:
        mine, store = self._captured, self._store
        mine.ready()
        shard = store.write_shard(self._folder, mine.rank, mine.size, mine.parts, told=self._told)
        self._nbytes += shard.nbytes
        self._nbytes += store.write_worker(self._folder, mine.rank, mine.size, shard, mine.local).nbytes

    def _told(self, done: int, total: int) -> None:
        if not self._half and 2 * done >= total:
            self._half = True
            self._at("save_write")
        if done == total:
            self._at("save_sync")

    # --- rank 0 ----------------------------------------------------------------------------------------------------

    def _commit(self) -> None:
        all_of_it, store = self._captured, self._store
        values = store.write_values(self._folder, all_of_it.shared)
        self._nbytes += values.nbytes
        if not self._until(self._missing_parts, leave=self._links.dropped):
            raise Dropped
        told = [store.written(self._folder, rank, all_of_it.size) for rank in range(all_of_it.size)]
        self._at("save_manifest")
        with self._links.placing:
            if self._links.dropped():
                raise Dropped
            store.commit(
                self._folder, all_of_it.specs, [shard for shard, _ in told], [document for _, document in told], values,
                generation=all_of_it.generation, versions=all_of_it.versions,
            )  # fmt: skip
            self._durable()
        self._links.free()

    def _clear_up(self) -> None:
        self._at("save_done")
        if self._means.retention is not None:
            now = self._means.wall()
            prune(self._store, self._means.retention, now=now, running={self._folder}, level=Level.QUICK)

    def _missing_parts(self) -> str:
        ranks = self._store.unwritten(self._folder, self._captured.size)
        return f"what {_listed(ranks)} should have written" if ranks else ""

    # --- the others ------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        self._watching = True
        if self._until(self._missing_manifest, leave=self._links.leave):
            self._durable()

    def _missing_manifest(self) -> str:
        if self._store.verify(self._folder, Level.QUICK).usable:
            return ""
        ranks = self._store.unwritten(self._folder, self._captured.size)
        if self._captured.rank in ranks:
            raise CheckpointError("rank 0 has given it up: what this worker wrote has been deleted")
        return f"what {_listed(ranks)} should have written" if ranks else "the manifest of rank 0"

    # --- both ------------------------------------------------------------------------------------------------------

    def _until(self, missing: Callable[[], str], leave: Callable[[], bool]) -> bool:
        """Look until nothing is missing; False if nobody waits for that any more.

        Raises:
            CheckpointError: a bound was reached; it says for what and how long.
        """
        began, nap = self._means.mono(), FIRST_NAP_S
        while what := missing():
            if leave():
                return False
            now, broke = self._means.mono(), self._links.broke()
            end = began + self._means.wait_s
            if broke is not None:
                end = min(end, max(began, broke) + self._means.grace_s)
            if now >= end:
                why = " after the group broke" if broke is not None else ""
                hint = "" if broke is not None else ". All hosts have to share the place of checkpoints"
                raise CheckpointError(
                    f"waited {now - began:.1f} s{why} for {what} in {self._store.url}/{self._folder}{hint}"
                )
            self._links.pause(min(nap, end - now))
            nap = min(2 * nap, LONGEST_NAP_S)
        return True

    def _durable(self) -> None:
        self._committed = True
        self._links.durable()

    def _failed(self, error: BaseException) -> None:
        told = "is not saved"
        if self._committed:
            told = "is saved, but what came after that failed"
        elif self._watching:
            told = "may be saved or not"
        if isinstance(error, HorovodFtError):  # whoever asks for the ending tells the reader
            log.info("step %d %s: %s", self._captured.step, told, error)
        else:
            log.warning("horovod_ft: step %d %s: %s", self._captured.step, told, error, exc_info=error)
        if self._captured.rank == 0 and not self._committed:
            self._delete()

    def _delete(self) -> None:
        try:
            self._store.delete(self._folder)
        except Exception as left:
            log.info("what is left of %s stays until it is pruned: %s", self._folder, left)

    def _at(self, phase: Phase) -> None:
        self._means.at(phase, self._captured.step)


def without_frames(error: BaseException) -> BaseException:
    """The same error. Its tracebacks, which hold on to all memory of the frames that it came through, are dropped."""
    seen: list[BaseException] = []
    ahead: list[BaseException | None] = [error]
    while ahead:
        one = ahead.pop()
        if one is not None and one not in seen:
            one.__traceback__ = None
            seen.append(one)
            ahead += [one.__cause__, one.__context__]
    return error


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
