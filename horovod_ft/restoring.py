"""Bring a group to the newest checkpoint in a store that can be used. Collectives, no framework.

All workers read: each its part of the shards, straight into the memory of its tensors, and sends that to the others.
Where all are on one host and the storage is a folder, each reads everything instead: the disk is read once for all of
them, and the page cache is faster than sockets. Whatever was in that memory is gone from the first byte on, and what
was read counts only once all checksums are right.
"""

from __future__ import annotations

import itertools
import logging
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_ft.checkpoint import CheckpointStore, Status
from horovod_ft.checkpoint.manifest import Manifest
from horovod_ft.checkpoint.tensors import Tensor, check_fits
from horovod_ft.committer import Committer
from horovod_ft.errors import (
    CheckpointError,
    DamagedCheckpointError,
    MismatchError,
    NoCheckpointError,
    StorageError,
)
from horovod_ft.events import EventBus
from horovod_ft.faults.inject import Injector
from horovod_ft.membership.base import Bytes, Membership
from horovod_ft.trainee import Durable, Trainee
from horovod_ft.transfer import send

log = logging.getLogger("horovod_ft")

#: What is no checkpoint at all: attempts that were cut off, and what others have put there.
NONE_OF_OURS = (Status.HALF_WRITTEN, Status.FOREIGN)


def here() -> str:
    """Name of this host."""
    return platform.node()


@dataclass(frozen=True)
class Restored:
    """What a group has restored.

    Attributes:
        step: committed steps.
        values: everything that is no tensor and equal on all workers.
    """

    step: int
    values: Any


class Restoring:
    """One worker's part in it."""

    def __init__(
        self,
        membership: Membership,
        trainee: Trainee,
        committer: Committer,
        bus: EventBus,
        injector: Injector,
        mono: Callable[[], float],
    ) -> None:
        self._membership = membership
        self._trainee = trainee
        self._committer = committer
        self._bus = bus
        self._injector = injector
        self._mono = mono

    def newest(self, store: CheckpointStore, generation: int, newer_than: int = -1) -> Restored | None:
        """Restore the newest valid checkpoint. Blocks; all workers of the group call it.

        Args:
            generation: of the group.
            newer_than: step of a copy in memory; -1 if there is none. Only newer checkpoints are of use then, and no
                error is raised.

        Returns:
            what was restored; None if the store holds no checkpoint, valid or not: nothing has changed then; or no
            valid one that is newer, while what was in memory may be gone.

        Raises:
            NoCheckpointError: there are checkpoints, or were when this began, and none of them can be used; lists all,
                and why.
            MismatchError: the newest is of another model.
            StorageError: the store cannot be listed.
            All of these on all workers.
        """
        comm, group = self._membership.comm, self._membership.group
        damaged: dict[str, str] = {}
        while True:
            began = self._mono()
            looked = _found(store, damaged, self._passed_over) if group.rank == 0 else None
            found = comm.broadcast_object(looked, 0, "checkpoint")
            if isinstance(found, CheckpointError) and newer_than < 0:
                raise found
            if not isinstance(found, Manifest) or found.step <= newer_than:
                return None
            values, problem = self._read(store, found, generation)
            if not problem:
                took = self._mono() - began
                self._bus.emit("restored", folder=found.folder, to=found.step, nbytes=found.nbytes, duration_s=took)
                if group.rank == 0:
                    log.warning("horovod_ft: restored step %d from %s/%s", found.step, store.url, found.folder)
                return Restored(found.step, values)
            damaged[found.folder] = problem
            self._passed_over(found.folder, problem)

    def _passed_over(self, folder: str, problem: str) -> None:
        """Put it on record; worker 0 says it."""
        self._bus.emit("warning", text=f"the checkpoint {folder} cannot be used: {problem}")
        if self._membership.group.rank == 0:
            log.warning("horovod_ft: the checkpoint %s cannot be used: %s", folder, problem)

    def _read(self, store: CheckpointStore, manifest: Manifest, generation: int) -> tuple[Any, str]:
        """Read one checkpoint. Returns its values, and why it cannot be used after all, if so: the same everywhere."""
        comm, group = self._membership.comm, self._membership.group
        read = _attempt(store.read_values, manifest) if group.rank == 0 else None
        values, error = comm.broadcast_object(read, 0, "values")
        if error is not None:
            return None, _why([error])
        durable = self._trainee.ft_durable()
        assert durable is not None
        tensors = _opened(durable, values, manifest)
        check_fits(manifest.tensors, [tensor.spec for tensor in tensors])
        self._committer.torn = True
        apart = not store.storage.cached or len(set(comm.allgather_object(here(), "hosts"))) > 1
        mine = store.plan_read(manifest, group.rank, group.size) if apart else list(range(manifest.size))
        local, error = _attempt(self._read_shards, store, manifest, mine, tensors)
        problem = _why(comm.allgather_object(error, "restored"))
        if problem:
            return None, problem
        if apart:
            self._exchange(store, manifest, tensors)
        durable.restored(values, local)
        if group.rank >= manifest.size:  # there was no such worker: it has the first one's state, and draws of its own
            self._trainee.joined(generation, group.rank)
        self._committer.went_back(manifest.step)
        return values, ""

    def _read_shards(
        self, store: CheckpointStore, manifest: Manifest, shards: Sequence[int], tensors: Sequence[Tensor]
    ) -> Any:
        """Read shards into the tensors. Returns the values of the worker that this one follows."""
        group = self._membership.group
        for number, index in enumerate(shards):
            if number == len(shards) // 2:
                self._injector.at("restore", manifest.step)
            store.read_shard(manifest, index, tensors)
        return store.read_worker(manifest, group.rank if group.rank < manifest.size else 0)

    def _exchange(self, store: CheckpointStore, manifest: Manifest, tensors: Sequence[Tensor]) -> None:
        """Send what this worker has read, and receive what the others have."""
        group = self._membership.group
        memory = {tensor.spec.name: np.frombuffer(tensor.data, np.uint8) for tensor in tensors if tensor.spec.nbytes}
        for reader in range(group.size):
            for index in store.plan_read(manifest, reader, group.size):
                pieces = manifest.shards[index].pieces
                blocks = [Run(memory[piece.tensor][piece.start : piece.stop]) for piece in pieces]
                taken = [group.rank != reader] * len(blocks)
                send(self._membership.comm, (reader,), group.rank, blocks, taken)


class Run:
    """Bytes in host memory as a ``transfer.Block``."""

    local = False

    def __init__(self, data: Bytes) -> None:
        self._data = data
        self.nbytes = len(data)

    def host(self, *, read: bool) -> Bytes:
        return self._data

    def write_back(self) -> None:
        """``host`` is the memory itself."""


def _found(
    store: CheckpointStore, damaged: dict[str, str], tell: Callable[[str, str], None]
) -> Manifest | CheckpointError | None:
    """The newest checkpoint that can be used; None if there is none at all; or the error that all workers raise.

    Args:
        damaged: those that reading has found to be so; others that cannot be used are added.
        tell: told of those that are added, and why.
    """
    try:
        newest = store.newest_valid(damaged=damaged)
        for candidate in itertools.takewhile(lambda one: one.folder != newest.folder, store.candidates()):
            if candidate.status not in (Status.VALID, *NONE_OF_OURS) and candidate.folder not in damaged:
                damaged[candidate.folder] = candidate.problem
                tell(candidate.folder, candidate.problem)
        return newest
    except NoCheckpointError as error:
        return error if damaged else _none_at_all(store, error)  # what is damaged may be in memory in part
    except StorageError as error:
        return error


def _none_at_all(store: CheckpointStore, error: NoCheckpointError) -> CheckpointError | None:
    """None if what is there is no checkpoint; else the error, or one that comes when the store is looked at again."""
    try:
        others = [one.folder for one in store.candidates() if one.status not in NONE_OF_OURS]
    except StorageError as refused:
        return refused
    if others:
        return error
    if error.problems:
        log.warning("horovod_ft: training begins anew, there is no whole checkpoint: %s", error)
    return None


def _opened(durable: Durable, values: Any, manifest: Manifest) -> list[Tensor]:
    """The memory to read into.

    Raises:
        MismatchError: the checkpoint is of another training; names the tensors that differ, if it is those.
    """
    try:
        return durable.open(values)
    except MismatchError:
        here = durable.tensors()
        names = {spec.name for spec in here}
        check_fits([spec for spec in manifest.tensors if spec.name in names], here)
        raise


def _attempt(read: Callable[..., Any], *arguments: Any) -> tuple[Any, CheckpointError | None]:
    """What was read, or the error."""
    try:
        return read(*arguments), None
    except CheckpointError as error:
        return None, error


def _why(errors: Sequence[CheckpointError | None]) -> str:
    """Why a checkpoint cannot be used, by what all workers have met; empty if they have met nothing.

    Raises:
        CheckpointError: one that another checkpoint would meet as well.
    """
    met = [error for error in errors if error is not None]
    for error in met:
        if not isinstance(error, DamagedCheckpointError | StorageError):
            raise error
    return "; ".join(dict.fromkeys(map(str, met)))
