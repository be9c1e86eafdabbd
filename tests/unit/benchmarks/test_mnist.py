"""The IDX reader: it reads what MNIST's files hold, and says of anything else what is wrong with which file."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common import BenchmarkError
from benchmarks.mnist import Part, find, load, read_idx

SMALL = Part("some-images-idx3-ubyte", "some-labels-idx1-ubyte", 2)
IMAGES = np.arange(2 * 28 * 28).reshape(2, 28, 28).astype(np.uint8)
LABELS = np.array([7, 0], np.uint8)


def idx(*shape: int, values: bytes | None = None, code: int = 8) -> bytes:
    """The content of an IDX file; without ``values``, that of a sound one."""
    content = bytes(int(np.prod(shape))) if values is None else values
    return bytes([0, 0, code, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + content


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "some-labels-idx1-ubyte"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two images packed, and two labels as they are."""
    packed = gzip.compress(idx(2, 28, 28, values=IMAGES.tobytes()))
    (tmp_path / f"{SMALL.images}.gz").write_bytes(packed)
    (tmp_path / SMALL.labels).write_bytes(idx(2, values=LABELS.tobytes()))
    return tmp_path


def test_images_and_labels_are_read_packed_or_not(folder: Path) -> None:
    images, labels = load(folder, SMALL)
    np.testing.assert_array_equal(images, IMAGES)
    np.testing.assert_array_equal(labels, LABELS)


def test_dimensions_are_big_endian_and_the_last_is_fastest(file: Path) -> None:
    file.write_bytes(bytes.fromhex("00000802 00000002 00000003 010203040506"))
    assert read_idx(file, (2, 3)).tolist() == [[1, 2, 3], [4, 5, 6]]


def test_a_file_that_was_unpacked_and_kept_its_name(tmp_path: Path) -> None:
    (tmp_path / "x.gz").write_bytes(idx(3, values=b"abc"))
    assert bytes(read_idx(find(tmp_path, "x"), (3,))) == b"abc"


def test_a_missing_file_is_named_with_what_to_do(folder: Path) -> None:
    (folder / SMALL.labels).unlink()
    with pytest.raises(BenchmarkError, match=r"neither some-labels-idx1-ubyte.gz nor some-labels.* --data is a folder"):
        load(folder, SMALL)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"<html>not found</html>", "no IDX file: it begins with b'<htm'"),
        (b"", "no IDX file: it begins with b''"),
        (b"\0\0\x08", "no IDX file"),
        (idx(2, code=0x0D), r"of type 0x0d, not unsigned bytes \(0x08\)"),
        (b"\0\0\x08\x03\0\0\0\x02", "ends within its header, after 8 of 16 bytes"),
        (idx(3), "holds 3 values, not 2"),
        (idx(2, 28, 28), "holds 2 x 28 x 28 values, not 2"),
        (idx(2, values=b"\1"), "1 bytes follow its header, which announces 2"),
        (idx(2, values=b"\1\2\3"), "3 bytes follow its header, which announces 2"),
        (gzip.compress(idx(2))[:-5], "cannot be read: .*end"),
        (gzip.compress(idx(2))[:12] + b"\xff" * 20, "cannot be read"),
        (idx(2, values=b"\1\x0a"), "holds the label 10, and labels go from 0 to 9"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(folder: Path, content: bytes, problem: str) -> None:
    (folder / SMALL.labels).write_bytes(content)
    with pytest.raises(BenchmarkError, match=rf"{SMALL.labels}: .*{problem}.*\. Replace it") as raised:
        load(folder, SMALL)
    assert str(folder) in str(raised.value)
