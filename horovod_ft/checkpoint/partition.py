"""Who writes which bytes, and who reads which files. Pure arithmetic that all workers do alike; no input or output.

The tensors are laid end to end as one run of bytes, which is cut into as many contiguous ranges of equal length as
there are workers. A cut within a tensor falls between two of its elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from horovod_ft.checkpoint.tensors import Tensor, TensorSpec
from horovod_ft.errors import UsageError


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Bytes ``start`` to ``stop`` of the tensor with this name. Never empty."""

    tensor: str
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class Part(NamedTuple):
    """A piece with its bytes, ready to be written.

    Attributes:
        spec: of the whole tensor.
        piece: which bytes of it.
        data: these bytes, and only these.
    """

    spec: TensorSpec
    piece: Piece
    data: memoryview


def plan(specs: Sequence[TensorSpec], size: int) -> list[list[Piece]]:
    """The pieces of each of ``size`` workers, by rank. All together are every byte of every tensor, once.

    Nobody has more than an element above the mean. With more workers than elements some get nothing.

    Raises:
        UsageError: there is no worker.
    """
    if size < 1:
        raise UsageError(f"{size} workers cannot save a checkpoint")
    total = sum(spec.nbytes for spec in specs)
    pieces: list[list[Piece]] = [[] for _ in range(size)]
    rank, base = 0, 0
    for spec in specs:
        start = 0
        while start < spec.nbytes:
            end = total * (rank + 1) // size - base
            stop = min(spec.nbytes, end // spec.itemsize * spec.itemsize)
            if stop > start:
                pieces[rank].append(Piece(spec.name, start, stop))
                start = stop
            if start < spec.nbytes:
                rank += 1
        base += spec.nbytes
    return pieces


def parts(tensors: Sequence[Tensor], rank: int, size: int) -> list[Part]:
    """What worker ``rank`` of ``size`` has to write, as views into the tensors; nothing is copied."""
    by_name = {tensor.spec.name: tensor for tensor in tensors}
    mine = plan([tensor.spec for tensor in tensors], size)[rank]
    return [Part(by_name[one.tensor].spec, one, by_name[one.tensor].data[one.start : one.stop]) for one in mine]


def uncovered(specs: Sequence[TensorSpec], pieces: Sequence[Piece]) -> str:
    """Why the pieces are not every byte of every tensor, once; empty if they are."""
    found: dict[str, list[Piece]] = {spec.name: [] for spec in specs}
    for piece in pieces:
        if piece.tensor not in found:
            return f"there is a piece of {piece.tensor!r}, which is no tensor of it"
        found[piece.tensor].append(piece)
    for spec in specs:
        at = 0
        for piece in sorted(found[spec.name], key=lambda piece: piece.start):
            if piece.start != at or piece.stop <= piece.start or piece.stop % spec.itemsize:
                return f"after byte {at} of {spec.name!r} comes a piece from {piece.start} to {piece.stop}"
            at = piece.stop
        if at != spec.nbytes:
            return f"the pieces of {spec.name!r} have {at} of its {spec.nbytes} bytes"
    return ""


def deal(loads: Sequence[int], size: int) -> list[list[int]]:
    """Deal out files of these many bytes to ``size`` readers: the largest first, to whoever has the least so far.

    Returns:
        for each reader the indices of its files, in ascending order.
    """
    dealt: list[list[int]] = [[] for _ in range(size)]
    held = [0] * size
    for index in sorted(range(len(loads)), key=lambda index: (-loads[index], index)):
        reader = min(range(size), key=lambda reader: (held[reader], len(dealt[reader]), reader))
        dealt[reader].append(index)
        held[reader] += loads[index]
    return [sorted(indices) for indices in dealt]
