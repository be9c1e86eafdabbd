"""The manifest: what a checkpoint consists of. It is written last, and its presence makes the folder a checkpoint.

The file is an envelope with the format, its version and a checksum of that version and the body, so that a reader can
tell a damaged manifest from a newer one before it looks into the body. Nothing in it is trusted: names are checked
here, before anybody joins them to a path.
"""

from __future__ import annotations

import re

import msgspec

from horovod_ft.checkpoint import layout
from horovod_ft.checkpoint.checksum import checksum
from horovod_ft.checkpoint.partition import uncovered
from horovod_ft.checkpoint.shard import ShardRecord
from horovod_ft.checkpoint.tensors import TensorSpec, check_names
from horovod_ft.errors import (
    CheckpointError,
    DamagedCheckpointError,
    ForeignCheckpointError,
    NewerCheckpointError,
    UnsupportedStateError,
)

FORMAT = "horovod_ft checkpoint"
#: Raise it when an older reader would misunderstand what is written.
VERSION = 1

_CHECKSUM = re.compile(r"xxh3_128:[0-9a-f]{32}", re.ASCII)
#: A header of a shard: its length, and at least ``{}``.
_LEAST_HEADER = 10


class ValuesRecord(msgspec.Struct, frozen=True):
    """What the manifest says of a document with values: those of one worker alone, or all others.

    Attributes:
        pickled: paths of the values that are pickled in it; reading those runs code.
    """

    file: str
    nbytes: int
    checksum: str
    pickled: tuple[str, ...] = ()


class Manifest(msgspec.Struct, frozen=True):
    """A checkpoint.

    Attributes:
        step: committed steps.
        attempt: see ``layout.Place``.
        generation: of the group that saved it.
        created: seconds since the epoch.
        versions: of horovod_ft, python and what else the writer names.
        tensors: all of them, in the order in which they were cut into shards.
        shards: by the rank of the worker that wrote them.
        workers: the document beside each shard, in the same order.
        values: the document with everything that is no tensor and not of one worker alone.
    """

    step: int
    attempt: str
    generation: int
    created: float
    versions: dict[str, str]
    tensors: tuple[TensorSpec, ...]
    shards: tuple[ShardRecord, ...]
    workers: tuple[ValuesRecord, ...]
    values: ValuesRecord

    @property
    def folder(self) -> str:
        return layout.folder_name(self.step, self.attempt)

    @property
    def size(self) -> int:
        """Workers that saved it."""
        return len(self.shards)

    @property
    def nbytes(self) -> int:
        """Of all files but the manifest."""
        return sum(nbytes for nbytes, _ in self.files.values())

    @property
    def pickled(self) -> tuple[str, ...]:
        """Paths of what is pickled in any of the documents, each once."""
        documents = [self.values, *self.workers]
        return tuple(dict.fromkeys(path for document in documents for path in document.pickled))

    @property
    def files(self) -> dict[str, tuple[int, str]]:
        """Bytes and checksum of every file but the manifest, by name."""
        shards = {shard.file: (shard.nbytes, shard.checksum) for shard in self.shards}
        return {**shards, **{one.file: (one.nbytes, one.checksum) for one in (*self.workers, self.values)}}


class _Envelope(msgspec.Struct, frozen=True):
    format: str
    version: int
    checksum: str = ""
    manifest: msgspec.Raw = msgspec.Raw()


def encode(manifest: Manifest) -> bytes:
    """The file's bytes.

    Raises:
        CheckpointError: the manifest does not describe a whole checkpoint; the message says what is missing.
    """
    problem = _problem(manifest)
    if problem:
        raise CheckpointError(f"cannot save step {manifest.step}: {problem}")
    body = msgspec.json.encode(manifest)
    return msgspec.json.encode(_Envelope(FORMAT, VERSION, _seal(VERSION, body), msgspec.Raw(body)))


def decode(data: bytes, folder: str) -> Manifest:
    """Read the manifest of the checkpoint in a folder of this name.

    Raises:
        DamagedCheckpointError: it cannot be used, and why; of a subclass if it is newer or foreign.
    """
    envelope = _open(data)
    if envelope.version > VERSION:
        raise NewerCheckpointError(
            f"its format has version {envelope.version}, and this horovod_ft reads versions up to {VERSION}: use a "
            "newer horovod_ft"
        )
    body = bytes(envelope.manifest)
    if envelope.checksum != _seal(envelope.version, body):
        raise DamagedCheckpointError("its manifest has been altered: its checksum is another one")
    try:
        manifest = msgspec.json.decode(body, type=Manifest)
        problem = _problem(manifest)
    except (msgspec.DecodeError, UnsupportedStateError) as error:
        raise DamagedCheckpointError(f"its manifest cannot be read: {error}") from error
    if problem:
        raise DamagedCheckpointError(f"its manifest is wrong: {problem}")
    if manifest.folder != folder:
        raise DamagedCheckpointError(f"its manifest is that of {manifest.folder}")
    return manifest


def _seal(version: int, body: bytes) -> str:
    """The checksum of a body, and of the version by which it is to be read."""
    return checksum(b"%d %b" % (version, body))


def _open(data: bytes) -> _Envelope:
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
    except msgspec.ValidationError as error:
        raise ForeignCheckpointError(f"its manifest is not one of horovod_ft: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedCheckpointError(f"its manifest cannot be read, or is cut short: {error}") from error
    if envelope.format != FORMAT:
        raise ForeignCheckpointError(f"its manifest is of the format {envelope.format!r}, not {FORMAT!r}")
    return envelope


def _problem(manifest: Manifest) -> str:
    """Why a manifest does not describe a whole checkpoint with names that can be used; empty if it does."""
    place = layout.Place(manifest.step, manifest.attempt)
    if manifest.step < 0 or layout.parse_folder(f"step-{manifest.step:010d}-{manifest.attempt}") != place:
        return f"step {manifest.step} and attempt {manifest.attempt!r} name no folder"
    for spec in manifest.tensors:
        spec.check()
    check_names(manifest.tensors)
    for rank, shard in enumerate(manifest.shards):
        if layout.parse_shard(shard.file) != (rank, manifest.size):
            return f"{shard.file!r} is not the name of shard {rank + 1} of {manifest.size}"
        if shard.nbytes - shard.payload < _LEAST_HEADER:
            return f"{shard.file} has {shard.nbytes} bytes, and its pieces {shard.payload}"
    if len(manifest.workers) != manifest.size:
        return f"it has {len(manifest.workers)} files of workers for {manifest.size} shards"
    for rank, worker in enumerate(manifest.workers):
        if layout.parse_worker(worker.file) != (rank, manifest.size):
            return f"{worker.file!r} is not the name of worker {rank + 1} of {manifest.size}"
    if manifest.values.file != layout.VALUES:
        return f"{manifest.values.file!r} is not the name of the values"
    for file, (_, text) in manifest.files.items():
        if _CHECKSUM.fullmatch(text) is None:
            return f"{text!r} is no checksum of {file}"
    return uncovered(manifest.tensors, [piece for shard in manifest.shards for piece in shard.pieces])
