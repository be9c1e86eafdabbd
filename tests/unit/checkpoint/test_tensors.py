"""Tensors as runs of bytes: what is accepted, what is refused, how two sets of them differ."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_ft.checkpoint.tensors import ITEMSIZE, Tensor, TensorSpec, check_fits, check_names, tensor
from horovod_ft.errors import MismatchError, UnsupportedStateError

WEIGHT = TensorSpec("net.weight", "F32", (2, 3))
BIAS = TensorSpec("net.bias", "F32", (3,))


def test_a_tensor_is_a_view_of_the_memory_it_was_made_from() -> None:
    memory = np.zeros((2, 3), np.float32)
    made = tensor("w", "F32", (2, 3), memory)
    made.data[:4] = np.float32(1.5).tobytes()
    assert memory[0, 0] == 1.5
    assert (made.spec, made.data.ndim, made.data.format) == (TensorSpec("w", "F32", (2, 3)), 1, "B")


def test_a_scalar_has_one_element_and_an_empty_tensor_none() -> None:
    assert tensor("s", "F64", (), np.float64(2.0)).spec.nbytes == 8
    assert len(tensor("e", "F64", (3, 0), np.empty((3, 0))).data) == 0


@pytest.mark.parametrize("dtype", sorted(ITEMSIZE))
def test_every_dtype_has_its_size(dtype: str) -> None:
    digits = int("".join(filter(str.isdigit, dtype.partition("_")[0])) or 8)
    assert ITEMSIZE[dtype] == digits // 8


def refused(name: str = "w", dtype: str = "F32", shape: tuple[int, ...] = (2,), data: object = bytes(8)) -> str:
    with pytest.raises(UnsupportedStateError) as error:
        tensor(name, dtype, shape, data)
    return str(error.value)


def test_a_dtype_that_the_format_does_not_have_is_refused_with_the_tensor_and_those_it_has() -> None:
    told = refused(dtype="F4")
    assert "'w'" in told
    assert "BF16" in told


def test_complex_numbers_of_16_bytes_are_refused_with_a_way_out() -> None:
    assert "F64 with one more dimension" in refused(dtype="C128")


def test_memory_of_another_size_is_refused() -> None:
    assert "takes 8 bytes, its memory has 12" in refused(data=bytes(12))


def test_memory_that_is_not_contiguous_is_refused() -> None:
    assert "not contiguous" in refused(data=np.zeros(4, np.float32)[::2])


def test_a_negative_length_is_refused() -> None:
    assert "(-1, -2)" in refused(shape=(-1, -2))


@pytest.mark.parametrize("name", ["", "__metadata__", "\ud800"])
def test_names_that_the_file_cannot_hold_are_refused(name: str) -> None:
    assert "rename it" in refused(name=name)


def test_two_tensors_of_one_name_are_refused() -> None:
    check_names([WEIGHT, BIAS])
    with pytest.raises(UnsupportedStateError, match=r"'net\.weight'"):
        check_names([WEIGHT, BIAS, WEIGHT])


# --- does a checkpoint fit -----------------------------------------------------------------------------------------


def misfit(stored: list[TensorSpec], wanted: list[TensorSpec]) -> list[str]:
    with pytest.raises(MismatchError) as error:
        check_fits(stored, wanted)
    return str(error.value).splitlines()[1:-1]


def test_the_same_tensors_in_another_order_fit() -> None:
    check_fits([WEIGHT, BIAS], [BIAS, WEIGHT])


def test_another_shape_names_the_tensor_and_both_shapes() -> None:
    assert misfit([WEIGHT], [TensorSpec("net.weight", "F32", (2, 4))]) == [
        "  'net.weight': shape (2, 3) in the checkpoint, (2, 4) here"
    ]


def test_another_dtype_names_the_tensor_and_both_dtypes() -> None:
    assert misfit([WEIGHT], [TensorSpec("net.weight", "BF16", (2, 3))]) == [
        "  'net.weight': dtype F32 in the checkpoint, BF16 here"
    ]


def test_both_at_once_are_told() -> None:
    (line,) = misfit([WEIGHT], [TensorSpec("net.weight", "BF16", (6,))])
    assert "dtype F32 in the checkpoint, BF16 here; shape (2, 3) in the checkpoint, (6,) here" in line


def test_names_on_one_side_only_are_told_with_the_side() -> None:
    assert misfit([WEIGHT], [BIAS]) == [
        "  'net.bias' is not in the checkpoint", "  'net.weight' is only in the checkpoint",
    ]  # fmt: skip


def test_a_long_list_is_cut() -> None:
    lines = misfit([TensorSpec(f"t{index}", "U8", (1,)) for index in range(25)], [])
    assert len(lines) == 11
    assert lines[-1] == "  and 15 more"


def test_a_tensor_is_what_adapters_may_also_make_themselves() -> None:
    assert Tensor(BIAS, memoryview(bytes(12))).spec.nbytes == 12
