"""One worker's file of a checkpoint, in the safetensors format (https://huggingface.co/docs/safetensors), as a stream.

The format is eight bytes with the length of the header, little-endian; the header, which is JSON; then the tensors, end
to end. It is written here and not by its library, because that takes a path and addresses of memory: it could neither
hash on the way, nor write to any other storage than a local file.

A tensor that is cut lies in each file as a vector of the elements that are in that file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO

import msgspec

from horovod_ft.checkpoint.checksum import CHUNK, Hasher
from horovod_ft.checkpoint.partition import Part, Piece
from horovod_ft.checkpoint.tensors import RESERVED
from horovod_ft.errors import DamagedCheckpointError

_LENGTH_BYTES = 8


class ShardRecord(msgspec.Struct, frozen=True):
    """What the manifest says of a shard.

    Attributes:
        file: its name.
        nbytes: of the whole file, header included.
        checksum: of the whole file.
        pieces: in the order in which they lie in the file.
    """

    file: str
    nbytes: int
    checksum: str
    pieces: tuple[Piece, ...]

    @property
    def payload(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


def ordered(parts: Sequence[Part]) -> list[Part]:
    """Wide elements first, so that every element lies at a multiple of its size: readers may map the file."""
    return sorted(parts, key=lambda part: -part.spec.itemsize)


def header(parts: Sequence[Part]) -> bytes:
    """Length and header of a file that holds these parts in this order."""
    entries: dict[str, object] = {RESERVED: {"format": "horovod_ft"}}
    at = 0
    for spec, piece, _ in parts:
        whole = piece.nbytes == spec.nbytes
        shape = list(spec.shape) if whole else [piece.nbytes // spec.itemsize]
        entries[spec.name] = {"dtype": spec.dtype, "shape": shape, "data_offsets": [at, at + piece.nbytes]}
        at += piece.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def length(parts: Sequence[Part]) -> int:
    """Bytes of a file that holds these parts."""
    return len(header(parts)) + sum(len(part.data) for part in parts)


def stream(parts: Sequence[Part], hasher: Hasher) -> Iterator[bytes | memoryview]:
    """The file's bytes, hashed as they are taken."""
    yield from hasher.through([header(parts), *(part.data for part in parts)])


def read(file: BinaryIO, shard: ShardRecord, into: Mapping[str, memoryview], why: str) -> None:
    """Read a whole shard once from beginning to end: pieces go to where they belong, and everything is hashed.

    Args:
        file: at its beginning.
        into: tensors by name, each with all of its bytes; pieces of others are hashed and dropped.
        why: begins the message of an error; names the file.

    Raises:
        DamagedCheckpointError: the file is not what the manifest says. ``into`` holds parts of it.
    """
    hasher = Hasher()
    scratch = memoryview(bytearray(CHUNK))
    head = shard.nbytes - shard.payload
    _take(file, scratch, head, hasher, why)
    for piece in shard.pieces:
        if piece.tensor in into:
            _fill(file, into[piece.tensor][piece.start : piece.stop], hasher, why)
        else:
            _take(file, scratch, piece.nbytes, hasher, why)
    if file.read(1):
        raise DamagedCheckpointError(f"{why} is longer than the {shard.nbytes} bytes that its manifest says")
    if hasher.text() != shard.checksum:
        raise DamagedCheckpointError(f"{why} has been altered: its checksum is {hasher.text()}, not {shard.checksum}")


def _take(file: BinaryIO, scratch: memoryview, nbytes: int, hasher: Hasher, why: str) -> None:
    for start in range(0, nbytes, len(scratch)):
        _fill(file, scratch[: min(len(scratch), nbytes - start)], hasher, why)


def _fill(file: BinaryIO, target: memoryview, hasher: Hasher, why: str) -> None:
    at = 0
    while at < len(target):
        count = file.readinto(target[at : at + CHUNK])  # type: ignore[attr-defined]  # every binary file has it
        if not count:
            raise DamagedCheckpointError(f"{why} is cut short: it ends after {hasher.nbytes} bytes")
        hasher.update(target[at : at + count])
        at += count
