"""Tensors as the checkpoint sees them: a name, a dtype, a shape and a run of bytes. Knows no framework.

Dtypes are spelled as in the safetensors format. Adapters hand in views of their tensors' memory, in little-endian and
row-major order, and read back into such views.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from horovod_ft.errors import MismatchError, UnsupportedStateError

#: Bytes of one element. The format has elements of less than a byte as well: those are refused, because a tensor of
#: them cannot be cut anywhere.
ITEMSIZE = {
    "BOOL": 1, "U8": 1, "I8": 1,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
#: Means something else in the header of a safetensors file.
RESERVED = "__metadata__"
#: How many differences a message lists.
LISTED = 10


class TensorSpec(msgspec.Struct, frozen=True):
    """Everything about a tensor but its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.itemsize * math.prod(self.shape)

    def check(self) -> None:
        """
        Raises:
            UnsupportedStateError: a checkpoint cannot hold such a tensor.
        """
        if self.dtype not in ITEMSIZE:
            hint = "; view it as F64 with one more dimension, of size 2" if self.dtype == "C128" else ""
            raise UnsupportedStateError(
                f"tensor {self.name!r} is of dtype {self.dtype!r}: a checkpoint holds {', '.join(ITEMSIZE)}{hint}"
            )
        if any(length < 0 for length in self.shape):
            raise UnsupportedStateError(f"tensor {self.name!r} has the shape {self.shape}")
        if not self.name or self.name == RESERVED or not _encodes(self.name):
            raise UnsupportedStateError(f"{self.name!r} cannot be the name of a tensor: rename it")


class Tensor(NamedTuple):
    """A tensor and its memory.

    Attributes:
        spec: what it is.
        data: its bytes, of format ``B`` and one dimension; writable if it is to be read into.
    """

    spec: TensorSpec
    data: memoryview


def tensor(name: str, dtype: str, shape: Sequence[int], data: Any) -> Tensor:
    """Describe a tensor in memory; nothing is copied.

    Args:
        data: anything with a contiguous buffer of as many bytes as dtype and shape say: a NumPy array, a bytearray.

    Raises:
        UnsupportedStateError: a checkpoint cannot hold it, or the bytes do not fit to shape and dtype.
    """
    spec = TensorSpec(name, dtype, tuple(int(length) for length in shape))
    spec.check()
    view = memoryview(data)
    if not view.c_contiguous:
        raise UnsupportedStateError(f"tensor {name!r}: its memory is not contiguous. Hand in a contiguous view or copy")
    if view.nbytes != spec.nbytes:
        raise UnsupportedStateError(
            f"tensor {name!r}: {dtype} of shape {spec.shape} takes {spec.nbytes} bytes, its memory has {view.nbytes}"
        )
    return Tensor(spec, view.cast("B") if view.nbytes else memoryview(bytearray()))


def check_names(specs: Iterable[TensorSpec]) -> None:
    """
    Raises:
        UnsupportedStateError: two tensors have the same name.
    """
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise UnsupportedStateError(f"two tensors have the name {spec.name!r}")
        seen.add(spec.name)


def check_fits(stored: Iterable[TensorSpec], wanted: Iterable[TensorSpec]) -> None:
    """Check that the tensors of a checkpoint are those that are wanted; their order does not matter.

    Raises:
        MismatchError: names each tensor that is not, and how it differs.
    """
    there, here = ({spec.name: spec for spec in specs} for specs in (stored, wanted))
    told = [_difference(there.get(name), here.get(name)) for name in here | there]
    told = [line for line in told if line]
    if told:
        more = f"\n  and {len(told) - LISTED} more" if len(told) > LISTED else ""
        lines = "".join(f"\n  {line}" for line in told[:LISTED])
        raise MismatchError(
            f"the checkpoint is of another model than this one:{lines}{more}\n"
            "Build the model and the optimizer that it was saved from, or use another checkpoint"
        )


def _difference(stored: TensorSpec | None, wanted: TensorSpec | None) -> str:
    if stored is None:
        return f"{wanted.name!r} is not in the checkpoint" if wanted else ""
    if wanted is None:
        return f"{stored.name!r} is only in the checkpoint"
    told = [
        f"{what} {in_it} in the checkpoint, {in_memory} here"
        for what, in_it, in_memory in (("dtype", stored.dtype, wanted.dtype), ("shape", stored.shape, wanted.shape))
        if in_it != in_memory
    ]
    return f"{stored.name!r}: {'; '.join(told)}" if told else ""


def _encodes(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
