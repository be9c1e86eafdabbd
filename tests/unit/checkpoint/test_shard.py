"""A shard is a safetensors file: others read it, and what was altered in it is found."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from horovod_ft.checkpoint.checksum import CHUNK, Hasher, checksum
from horovod_ft.checkpoint.partition import Part, parts
from horovod_ft.checkpoint.shard import ShardRecord, header, ordered, read, stream
from horovod_ft.checkpoint.tensors import ITEMSIZE, Tensor, tensor
from horovod_ft.errors import DamagedCheckpointError

WEIGHT = np.arange(12, dtype=np.float32).reshape(3, 4)
MASK = np.array([True, False, True])
TENSORS = [tensor("mask", "BOOL", (3,), MASK), tensor("w", "F32", (3, 4), WEIGHT)]


def made(given: list[Part]) -> tuple[bytes, ShardRecord]:
    hasher, pieces = Hasher(), ordered(given)
    data = b"".join(bytes(chunk) for chunk in stream(pieces, hasher))
    return data, ShardRecord("s", hasher.nbytes, hasher.text(), tuple(part.piece for part in pieces))


def empty(tensors: list[Tensor]) -> dict[str, memoryview]:
    return {one.spec.name: memoryview(bytearray(one.spec.nbytes)) for one in tensors}


def test_the_library_of_the_format_reads_it() -> None:
    found = safetensors.numpy.load(made(parts(TENSORS, 0, 1))[0])
    assert np.array_equal(found["w"], WEIGHT)
    assert np.array_equal(found["mask"], MASK)


def test_a_tensor_that_is_cut_is_a_vector_in_each_file() -> None:
    first, second = (safetensors.numpy.load(made(parts(TENSORS, rank, 2))[0]) for rank in (0, 1))
    assert np.array_equal(np.concatenate([first["w"], second["w"]]), WEIGHT.ravel())
    assert "mask" not in second


@pytest.mark.parametrize("dtype", sorted(ITEMSIZE))
def test_the_library_knows_every_dtype(dtype: str) -> None:
    one = tensor("t", dtype, (5,), bytes(range(5 * ITEMSIZE[dtype])))
    ((name, found),) = safetensors.deserialize(made(parts([one], 0, 1))[0])
    assert (name, found["dtype"], bytes(found["data"])) == ("t", dtype, bytes(one.data))


def test_a_worker_with_nothing_writes_a_file_that_holds_nothing() -> None:
    data, record = made([])
    assert safetensors.deserialize(data) == []
    assert record.payload == 0


def test_every_element_lies_at_a_multiple_of_its_size() -> None:
    given = ordered(parts([*TENSORS, tensor("d", "F64", (1,), bytes(8))], 0, 1))
    assert [part.spec.itemsize for part in given] == [8, 4, 1]
    assert len(header(given)) % 8 == 0


def test_names_of_any_script_are_kept() -> None:
    data, _ = made(parts([tensor('größe "x"/层', "U8", (1,), b"a")], 0, 1))
    assert safetensors.deserialize(data)[0][0] == 'größe "x"/层'


def test_the_record_is_of_the_whole_file() -> None:
    data, record = made(parts(TENSORS, 0, 1))
    assert (record.nbytes, record.checksum) == (len(data), checksum(data))


def test_nothing_is_copied_on_the_way_out() -> None:
    big = tensor("b", "U8", (3 * CHUNK + 5,), bytearray(3 * CHUNK + 5))
    chunks = list(stream(parts([big], 0, 1), Hasher()))[1:]
    assert [len(chunk) for chunk in chunks] == [CHUNK, CHUNK, CHUNK, 5]
    assert all(isinstance(chunk, memoryview) and chunk.obj is big.data.obj for chunk in chunks)


# --- reading -------------------------------------------------------------------------------------------------------


@given(st.integers(1, 4), st.binary(min_size=24, max_size=24))
def test_what_was_written_by_any_number_is_read(size: int, content: bytes) -> None:
    tensors = [tensor("a", "U8", (8,), content[:8]), tensor("b", "F32", (2, 2), content[8:])]
    into = empty(tensors)
    for rank in range(size):
        data, record = made(parts(tensors, rank, size))
        read(io.BytesIO(data), record, into, "s")
    assert b"".join(bytes(into[name]) for name in "ab") == content


def test_what_is_not_wanted_is_passed_over() -> None:
    data, record = made(parts(TENSORS, 0, 1))
    into = empty(TENSORS[:1])
    read(io.BytesIO(data), record, into, "s")
    assert bytes(into["mask"]) == MASK.tobytes()


class Slow(io.BytesIO):
    """Gives less than it is asked for."""

    def readinto(self, target: memoryview) -> int:  # type: ignore[override]
        return super().readinto(target[:3])


def test_a_storage_may_give_less_than_it_is_asked_for() -> None:
    data, record = made(parts(TENSORS, 0, 1))
    into = empty(TENSORS)
    read(Slow(data), record, into, "s")
    assert bytes(into["w"]) == WEIGHT.tobytes()


def flip(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (flip(0), "altered"), (flip(20), "altered"), (flip(-1 + 2**7), "altered"),
        (lambda data: data[:-1], "cut short: it ends after"), (lambda data: data[:5], "cut short"),
        (lambda data: b"", "cut short: it ends after 0 bytes"), (lambda data: data + b"x", "longer than the"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("wanted", [True, False])
def test_whatever_was_altered_is_found_and_the_file_named(
    damage: Callable[[bytes], bytes], told: str, wanted: bool
) -> None:
    data, record = made(parts(TENSORS, 0, 1))
    with pytest.raises(DamagedCheckpointError, match=f"^folder/s .*{told}"):
        read(io.BytesIO(damage(data)), record, empty(TENSORS) if wanted else {}, "folder/s")


@given(st.data())
def test_any_flipped_bit_is_found(data: st.DataObject) -> None:
    good, record = made(parts(TENSORS, 0, 1))
    at, bit = data.draw(st.integers(0, len(good) - 1)), data.draw(st.integers(0, 7))
    bad = bytearray(good)
    bad[at] ^= 1 << bit
    with pytest.raises(DamagedCheckpointError):
        read(io.BytesIO(bytes(bad)), record, empty(TENSORS), "s")
