"""The checkpoint store: what a job calls to save and to restore. Calls no collectives and starts no threads.

To save, all workers agree on a step and an attempt, which name the folder. Each writes its shard and then the document
beside it, and one of them the other values. That one waits until nobody is ``unwritten``, reads what was ``written``,
and calls ``commit``. Until then there is no checkpoint. To restore, one worker picks ``newest_valid`` and tells the
others; each reads the shards that ``plan_read`` gives it.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from horovod_ft.checkpoint import inspection, layout, shard, values
from horovod_ft.checkpoint import manifest as manifests
from horovod_ft.checkpoint import worker as workers
from horovod_ft.checkpoint.checksum import Hasher, checksum
from horovod_ft.checkpoint.inspection import Candidate, Level
from horovod_ft.checkpoint.manifest import Manifest, ValuesRecord
from horovod_ft.checkpoint.partition import Part, Piece, deal
from horovod_ft.checkpoint.shard import ShardRecord
from horovod_ft.checkpoint.storage import Storage, explained, storage_for
from horovod_ft.checkpoint.tensors import Tensor, TensorSpec, check_fits
from horovod_ft.checkpoint.worker import WorkerDocument
from horovod_ft.errors import CheckpointError, DamagedCheckpointError, NoCheckpointError
from horovod_ft.version import __version__


class CheckpointStore:
    """Durable checkpoints in a local or shared folder, or at any URL of fsspec.

    Nothing is read or written before a method is called. All methods block.

    Args:
        url: a folder, or a URL such as ``s3://bucket/run``. All hosts must see the same there.
        allow_pickle: let values be pickled, and read such values. Whoever can write to the store can then run code in
            the job that reads it.
        storage: in place of that which the URL means.
        wall: clock, in seconds since the epoch.

    Raises:
        ConfigurationError: the URL cannot be used.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        allow_pickle: bool = False,
        storage: Storage | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.storage = storage_for(url) if storage is None else storage
        self._allow_pickle = allow_pickle
        self._wall = wall

    @property
    def url(self) -> str:
        return self.storage.url

    # --- saving ----------------------------------------------------------------------------------------------------

    def begin(self, step: int, attempt: str) -> str:
        """Make the folder of a new checkpoint, on one worker, to be sure that it is new. Whoever writes into a folder
        that is not there makes it too.

        Args:
            step: committed steps.
            attempt: new for each attempt, see ``layout.new_attempt``.

        Returns:
            the folder's name.

        Raises:
            StorageError: it cannot be made, or is there already.
        """
        folder = layout.folder_name(step, attempt)
        with explained("save a checkpoint in", self.url, folder):
            self.storage.create(folder)
        return folder

    def write_shard(
        self,
        folder: str,
        rank: int,
        size: int,
        parts: Sequence[Part],
        *,
        told: Callable[[int, int], None] = lambda done, total: None,
    ) -> ShardRecord:
        """Write the shard of worker ``rank`` of ``size``; on return it is on the disk.

        Args:
            parts: what this worker has to write, see ``partition.parts``. Their memory must not change meanwhile.
            told: called with the bytes of the file that the storage has taken, and with those that it has in all:
                before each chunk, and once after the last one, before it is brought to the disk. An error that it
                raises ends the writing, and is raised as it is or, by some storages, as a StorageError.

        Raises:
            StorageError: it cannot be written. Nothing is left that counts as a checkpoint.
        """
        file, hasher, parts = layout.shard_name(rank, size), Hasher(), shard.ordered(parts)
        self._write(folder, file, _telling(shard.stream(parts, hasher), told, shard.length(parts)))
        return ShardRecord(file, hasher.nbytes, hasher.text(), tuple(part.piece for part in parts))

    def write_worker(self, folder: str, rank: int, size: int, record: ShardRecord, value: Any) -> ValuesRecord:
        """Write the document of worker ``rank`` beside its shard, after that.

        Args:
            record: of its shard.
            value: what only this worker has; see ``values`` for what can be written.

        Raises:
            UnsupportedStateError: something in it cannot be saved; names its path.
            StorageError: it cannot be written.
        """
        text, pickled = values.dump(value, allow_pickle=self._allow_pickle)
        document = workers.encode(WorkerDocument(record, msgspec.Raw(text), pickled))
        file = layout.worker_name(rank, size)
        self._write(folder, file, [document])
        return ValuesRecord(file, len(document), checksum(document), pickled)

    def write_values(self, folder: str, value: Any) -> ValuesRecord:
        """Write everything else that is no tensor, on one worker; see ``values`` for what can be written.

        Raises:
            UnsupportedStateError: something in it cannot be saved; names its path.
            StorageError: it cannot be written.
        """
        document, pickled = values.dump(value, allow_pickle=self._allow_pickle)
        self._write(folder, layout.VALUES, [document])
        return ValuesRecord(layout.VALUES, len(document), checksum(document), pickled)

    def unwritten(self, folder: str, size: int) -> list[int]:
        """Ranks of the workers that have not written all of their part yet, as far as this worker sees.

        Raises:
            StorageError: the folder cannot be listed. That it is not there is no error.
        """
        with explained("look at", self.url, folder):
            sizes = self.storage.sizes(folder)
        return [rank for rank in range(size) if layout.worker_name(rank, size) not in sizes]

    def written(self, folder: str, rank: int, size: int) -> tuple[ShardRecord, ValuesRecord]:
        """What worker ``rank`` has written, by its own word: its shard, and the document beside it.

        Raises:
            DamagedCheckpointError: the document is not there, or is damaged.
            StorageError: it cannot be read.
        """
        file = layout.worker_name(rank, size)
        with inspection.opened(self.storage, folder, file) as opened:
            data = opened.read()
        document = workers.decode(data, f"{self.url}/{folder}: {file}")
        return document.shard, ValuesRecord(file, len(data), checksum(data), document.pickled)

    def commit(
        self,
        folder: str,
        tensors: Sequence[TensorSpec],
        shards: Sequence[ShardRecord],
        documents: Sequence[ValuesRecord],
        record: ValuesRecord,
        *,
        generation: int = 0,
        versions: Mapping[str, str] | None = None,
    ) -> Manifest:
        """Write the manifest, on one worker, after all have written: only that makes it a checkpoint.

        Args:
            tensors: all, as they were cut.
            shards, documents: of all workers, by rank.
            record: of the values.
            generation: of the group.
            versions: of frameworks, by name; those of horovod_ft and Python are added.

        Raises:
            CheckpointError: the shards are not the whole state, or a file is not where this worker looks for it.
            StorageError: the manifest cannot be written. There is no checkpoint.
        """
        place = layout.parse_folder(folder)
        if place is None:
            raise CheckpointError(f"{folder!r} is no name of a checkpoint: use that which layout.folder_name() makes")
        told = {"horovod_ft": __version__, "python": platform.python_version(), **(versions or {})}
        manifest = Manifest(
            place.step, place.attempt, generation, self._wall(), told, tuple(tensors), tuple(shards),
            tuple(documents), record,
        )  # fmt: skip
        data = manifests.encode(manifest)
        with explained("look at", self.url, folder):
            problem = inspection.missing(manifest, self.storage.sizes(folder))
        if problem:
            raise CheckpointError(
                f"cannot save {folder}: in {self.url}, as this worker sees it, {problem}. All hosts must see the same "
                "folder there: share it, or use an object store"
            )
        self._write(folder, layout.MANIFEST, [data])
        return manifest

    def _write(self, folder: str, file: str, chunks: Iterable[bytes | memoryview]) -> None:
        with explained("write", self.url, folder, file):
            self.storage.write(folder, file, chunks)

    # --- finding ---------------------------------------------------------------------------------------------------

    def candidates(self, level: Level = Level.QUICK) -> Iterator[Candidate]:
        """Everything in the store, newest first, each with the reason if it cannot be used. See ``inspection``.

        Raises:
            StorageError: the store cannot be listed.
        """
        return inspection.candidates(self.storage, level)

    def newest_valid(self, level: Level = Level.QUICK, *, damaged: Mapping[str, str] | None = None) -> Manifest:
        """The newest checkpoint that can be used.

        Args:
            damaged: folders that are passed over, with the reason: those that reading has found to be damaged.

        Raises:
            NoCheckpointError: there is none; lists all that are there, and why each cannot be used.
            StorageError: the store cannot be listed.
        """
        known = damaged or {}
        problems: list[tuple[str, str]] = []
        for candidate in self.candidates(level):
            if candidate.manifest is not None and candidate.usable and candidate.folder not in known:
                return candidate.manifest
            problems.append((candidate.folder, candidate.problem or known[candidate.folder]))
        listed = f"none of those in {self.url} can be used:{inspection.lines(problems)}"
        told = listed if problems else f"{self.url} holds none"
        raise NoCheckpointError(f"there is no checkpoint to restore: {told}", tuple(problems))

    def verify(self, folder: str, level: Level = Level.FULL) -> Candidate:
        """Look at one checkpoint; never raises for what is wrong with it."""
        return inspection.inspect(self.storage, folder, level)

    # --- restoring -------------------------------------------------------------------------------------------------

    @staticmethod
    def plan_read(manifest: Manifest, rank: int, size: int) -> list[int]:
        """Which shards worker ``rank`` of ``size`` reads, by index: all workers together read each once.

        Shards are read whole, because their checksums are those of whole files.
        """
        return deal([shard.nbytes for shard in manifest.shards], size)[rank]

    def read_shard(self, manifest: Manifest, index: int, into: Iterable[Tensor]) -> tuple[Piece, ...]:
        """Read a shard into the memory of tensors, and compare its checksum.

        Args:
            into: those tensors of which pieces are wanted; their other bytes stay as they are.

        Returns:
            the pieces that were read, those of other tensors included.

        Raises:
            MismatchError: a tensor is not as in the checkpoint. Nothing was read.
            DamagedCheckpointError: the shard is damaged. Memory holds parts of it.
            StorageError: it cannot be read; the same holds.
        """
        targets = {tensor.spec.name: tensor for tensor in into}
        check_fits(
            [spec for spec in manifest.tensors if spec.name in targets], [tensor.spec for tensor in targets.values()]
        )
        record = manifest.shards[index]
        with inspection.opened(self.storage, manifest.folder, record.file) as file:
            data = {name: tensor.data for name, tensor in targets.items()}
            shard.read(file, record, data, f"{self.url}/{manifest.folder}: {record.file}")
        return record.pieces

    def read(self, manifest: Manifest, into: Sequence[Tensor]) -> None:
        """Read all shards, as one worker that restores alone. ``into`` has to be all tensors of the checkpoint.

        Raises:
            MismatchError: it is not; names each tensor that differs. Nothing was read.
            DamagedCheckpointError, StorageError: as ``read_shard``.
        """
        check_fits(manifest.tensors, [tensor.spec for tensor in into])
        for index in range(manifest.size):
            self.read_shard(manifest, index, into)

    def read_values(self, manifest: Manifest) -> Any:
        """Everything that is no tensor, but for the values that are of one worker alone.

        Raises:
            DamagedCheckpointError: it is damaged.
            UnsupportedStateError: it holds pickled values, and ``allow_pickle`` is False.
            StorageError: it cannot be read.
        """
        return values.load(self._document(manifest, manifest.values), allow_pickle=self._allow_pickle)

    def read_worker(self, manifest: Manifest, rank: int) -> Any:
        """The values that only worker ``rank`` of those that saved had.

        Raises:
            DamagedCheckpointError, UnsupportedStateError, StorageError: as ``read_values``.
        """
        record = manifest.workers[rank]
        data = self._document(manifest, record)
        document = workers.decode(data, f"{self.url}/{manifest.folder}: {record.file}")
        return values.load(bytes(document.values), allow_pickle=self._allow_pickle)

    def _document(self, manifest: Manifest, record: ValuesRecord) -> bytes:
        with inspection.opened(self.storage, manifest.folder, record.file) as file:
            document = file.read(record.nbytes + 1)
        if len(document) != record.nbytes or checksum(document) != record.checksum:
            raise DamagedCheckpointError(f"{self.url}/{manifest.folder}: {record.file} has been altered")
        return document

    # --- clearing away ---------------------------------------------------------------------------------------------

    def modified(self, folder: str) -> float | None:
        """When anything in a folder was last written, in seconds since the epoch; None if that cannot be known."""
        with explained("look at", self.url, folder):
            return self.storage.modified(folder)

    def delete(self, folder: str) -> None:
        """Delete a checkpoint, or what is left of an attempt. It is none any more before its first byte is gone.

        Raises:
            CheckpointError: the folder is not named as a checkpoint.
            StorageError: it cannot be deleted.
        """
        if layout.parse_folder(folder) is None:
            raise CheckpointError(f"{folder!r} is not named as a checkpoint: delete it by hand if it is not needed")
        with explained("delete", self.url, folder):
            self.storage.delete(folder, layout.MANIFEST)


def _telling(
    chunks: Iterable[bytes | memoryview], told: Callable[[int, int], None], total: int
) -> Iterator[bytes | memoryview]:
    done = 0
    for chunk in chunks:
        told(done, total)
        yield chunk
        done += len(chunk)
    told(done, total)
