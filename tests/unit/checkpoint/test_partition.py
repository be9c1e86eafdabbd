"""Who writes which bytes: every byte once, no element cut, everybody about the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_ft.checkpoint.partition import Piece, deal, parts, plan, uncovered
from horovod_ft.checkpoint.tensors import ITEMSIZE, TensorSpec, tensor
from horovod_ft.errors import UsageError

SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)
SPECS = st.lists(st.tuples(st.sampled_from(sorted(ITEMSIZE)), SHAPES), max_size=8).map(
    lambda kinds: [TensorSpec(f"t{index}", dtype, shape) for index, (dtype, shape) in enumerate(kinds)]
)
SIZES = st.integers(1, 9)


@given(SPECS, SIZES)
def test_every_byte_belongs_to_exactly_one_worker(specs: list[TensorSpec], size: int) -> None:
    owners = {spec.name: [0] * spec.nbytes for spec in specs}
    for pieces in plan(specs, size):
        for piece in pieces:
            for at in range(piece.start, piece.stop):
                owners[piece.tensor][at] += 1
    assert all(count == 1 for counts in owners.values() for count in counts)


@given(SPECS, SIZES)
def test_no_element_is_cut_and_no_piece_is_empty(specs: list[TensorSpec], size: int) -> None:
    itemsize = {spec.name: spec.itemsize for spec in specs}
    for piece in (piece for pieces in plan(specs, size) for piece in pieces):
        assert piece.nbytes > 0
        assert piece.start % itemsize[piece.tensor] == piece.stop % itemsize[piece.tensor] == 0


@given(SPECS, SIZES)
def test_nobody_has_more_than_an_element_above_the_mean(specs: list[TensorSpec], size: int) -> None:
    total = sum(spec.nbytes for spec in specs)
    widest = max((spec.itemsize for spec in specs), default=0)
    loads = [sum(piece.nbytes for piece in pieces) for pieces in plan(specs, size)]
    assert len(loads) == size
    assert max(loads) <= total / size + widest


@given(SPECS, SIZES)
def test_a_worker_has_one_contiguous_range(specs: list[TensorSpec], size: int) -> None:
    flat = [piece for pieces in plan(specs, size) for piece in pieces]
    order = {spec.name: index for index, spec in enumerate(specs)}
    assert flat == sorted(flat, key=lambda piece: (order[piece.tensor], piece.start))
    for pieces in plan(specs, size):
        assert len({piece.tensor for piece in pieces}) == len(pieces)


@given(SPECS, SIZES)
def test_a_plan_covers_what_it_was_made_for(specs: list[TensorSpec], size: int) -> None:
    assert uncovered(specs, [piece for pieces in plan(specs, size) for piece in pieces]) == ""


def test_a_large_tensor_is_cut() -> None:
    assert plan([TensorSpec("w", "F32", (10,))], 4) == [
        [Piece("w", 0, 8)], [Piece("w", 8, 20)], [Piece("w", 20, 28)], [Piece("w", 28, 40)],
    ]  # fmt: skip


def test_with_more_workers_than_elements_some_have_nothing() -> None:
    assert [len(pieces) for pieces in plan([TensorSpec("w", "F64", (2,))], 4)] == [0, 1, 0, 1]


def test_no_worker_cannot_save() -> None:
    with pytest.raises(UsageError, match="0 workers"):
        plan([], 0)


def test_parts_are_views_of_the_tensors() -> None:
    memory = bytearray(range(8))
    (part,) = parts([tensor("w", "U16", (4,), memory)], 1, 2)
    assert (part.piece, bytes(part.data)) == (Piece("w", 4, 8), bytes([4, 5, 6, 7]))
    memory[4] = 99
    assert part.data[0] == 99


# --- what does not cover -------------------------------------------------------------------------------------------

W = TensorSpec("w", "F32", (4,))


@pytest.mark.parametrize(
    ("pieces", "told"),
    [
        ([], "have 0 of its 16 bytes"),
        ([(0, 8)], "have 8 of its 16 bytes"),
        ([(0, 8), (12, 16)], "after byte 8 of 'w' comes a piece from 12 to 16"),
        ([(0, 12), (8, 16)], "after byte 12 of 'w' comes a piece from 8 to 16"),
        ([(0, 16), (0, 16)], "after byte 16 of 'w' comes a piece from 0 to 16"),
        ([(0, 20)], "have 20 of its 16 bytes"),
        ([(0, 6), (6, 16)], "after byte 0 of 'w' comes a piece from 0 to 6"),
        ([(0, 16), (16, 16)], "comes a piece from 16 to 16"),
        ([(0, 16), (16, 8), (8, 16)], "comes a piece"),
    ],
)
def test_what_is_missing_or_double_is_told(pieces: list[tuple[int, int]], told: str) -> None:
    assert told in uncovered([W], [Piece("w", start, stop) for start, stop in pieces])


def test_a_piece_of_an_unknown_tensor_is_told() -> None:
    assert "'v', which is no tensor" in uncovered([W], [Piece("v", 0, 16)])


# --- who reads -----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 100), max_size=12), SIZES)
def test_every_file_is_read_by_exactly_one_worker(loads: list[int], size: int) -> None:
    dealt = deal(loads, size)
    assert len(dealt) == size
    assert sorted(index for indices in dealt for index in indices) == list(range(len(loads)))


@given(st.lists(st.integers(0, 100), min_size=1, max_size=12), SIZES)
def test_readers_differ_by_no_more_than_the_largest_file(loads: list[int], size: int) -> None:
    held = [sum(loads[index] for index in indices) for indices in deal(loads, size)]
    assert max(held) - min(held) <= max(loads)


def test_as_many_readers_as_files_read_one_each() -> None:
    assert sorted(deal([5, 5, 5], 3)) == [[0], [1], [2]]
    assert sorted(deal([0, 0, 0], 3)) == [[0], [1], [2]]
