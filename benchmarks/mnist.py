"""MNIST from its four files as they are distributed: a reader of the IDX format that trusts nothing.

IDX: two zero bytes, a code for the type of the values, the number of dimensions, each dimension as a big-endian 32 bit
number, then the values, the last dimension fastest. Nothing here imports a framework, or fetches anything.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from benchmarks.common import BenchmarkError

Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"

UNSIGNED_BYTE = 0x08
SIDE, CLASSES = 28, 10
GZIP = b"\x1f\x8b"


class Part(NamedTuple):
    """One half of the data: names of its files without ``.gz``, and how many images there are."""

    images: str
    labels: str
    size: int


TRAIN = Part("train-images-idx3-ubyte", "train-labels-idx1-ubyte", 60_000)
TEST = Part("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte", 10_000)


def load(folder: Path, part: Part) -> tuple[Bytes, Bytes]:
    """Images (size x 28 x 28, 0 is background) and labels (size, 0 to 9).

    Raises:
        BenchmarkError: a file is missing or is not what it should be; says which, what is wrong and what to do.
    """
    images = read_idx(find(folder, part.images), (part.size, SIDE, SIDE))
    where = find(folder, part.labels)
    labels = read_idx(where, (part.size,))
    if labels.max() >= CLASSES:
        raise _wrong(where, f"it holds the label {labels.max()}, and labels go from 0 to {CLASSES - 1}")
    return images, labels


def find(folder: Path, name: str) -> Path:
    """The file with this name, packed or not."""
    found = [path for path in (folder / f"{name}.gz", folder / name) if path.is_file()]
    if not found:
        raise BenchmarkError(
            f"{folder} has neither {name}.gz nor {name}: --data is a folder with the four files of MNIST as they are "
            "distributed, packed or unpacked"
        )
    return found[0]


def read_idx(path: Path, shape: tuple[int, ...]) -> Bytes:
    """The unsigned bytes of an IDX file that must have this shape.

    Raises:
        BenchmarkError: it cannot be read, is no IDX file, or holds something else.
    """
    content = _unpacked(path)
    if content[:2] != b"\0\0" or len(content) < 4:
        raise _wrong(path, f"it is no IDX file: it begins with {content[:4]!r}, not with two zero bytes")
    if content[2] != UNSIGNED_BYTE:
        raise _wrong(path, f"its values are of type 0x{content[2]:02x}, not unsigned bytes (0x{UNSIGNED_BYTE:02x})")
    header = 4 + 4 * content[3]
    if len(content) < header:
        raise _wrong(path, f"it ends within its header, after {len(content)} of {header} bytes")
    found = struct.unpack(f">{content[3]}I", content[4:header])
    if found != shape:
        raise _wrong(path, f"it holds {_told(found)} values, not {_told(shape)}")
    if len(content) - header != math.prod(shape):
        raise _wrong(path, f"{len(content) - header} bytes follow its header, which announces {math.prod(shape)}")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def _unpacked(path: Path) -> bytes:
    """By what is in the file: some download tools unpack on the way, and keep the name."""
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content.startswith(GZIP) else content
    except (OSError, EOFError, zlib.error) as error:  # gzip has an OSError of its own
        raise _wrong(path, f"it cannot be read: {error}") from error


def _told(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _wrong(path: Path, what: str) -> BenchmarkError:
    return BenchmarkError(f"{path}: {what}. Replace it by MNIST's file of this name as it is distributed")
