"""One worker's document beside its shard: what is in the shard, and the values of that worker alone. No storage here.

It is written after the shard, by the same worker. So it tells the one that commits what that worker has written, and
that all of it is on the disk, without a message between them. It stays as a part of the checkpoint.
"""

from __future__ import annotations

import msgspec

from horovod_ft.checkpoint.checksum import checksum
from horovod_ft.checkpoint.shard import ShardRecord
from horovod_ft.errors import DamagedCheckpointError


class WorkerDocument(msgspec.Struct, frozen=True):
    """
    Attributes:
        shard: what the worker has written beside it.
        values: of this worker alone, as ``values.dump`` makes them.
        pickled: paths of what is pickled in the values.
    """

    shard: ShardRecord
    values: msgspec.Raw
    pickled: tuple[str, ...] = ()


class _Sealed(msgspec.Struct, frozen=True):
    """Whoever commits reads it before any manifest has its checksum, so it has one of its own."""

    checksum: str
    worker: msgspec.Raw


def encode(document: WorkerDocument) -> bytes:
    """The file's bytes."""
    body = msgspec.json.encode(document)
    return msgspec.json.encode(_Sealed(checksum(body), msgspec.Raw(body)))


def decode(data: bytes, why: str) -> WorkerDocument:
    """
    Args:
        why: begins the message of an error; names the file.

    Raises:
        DamagedCheckpointError: it is no such document, or has been altered.
    """
    try:
        sealed = msgspec.json.decode(data, type=_Sealed)
        body = bytes(sealed.worker)
        if sealed.checksum != checksum(body):
            raise DamagedCheckpointError(f"{why} has been altered: its checksum is another one")
        return msgspec.json.decode(body, type=WorkerDocument)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedCheckpointError(f"{why} cannot be read, or is cut short: {error}") from error
