"""Bring the state from those who have it to those who lack it, sharded over all holders.

The tensors are laid end to end as one run of bytes. The run is cut into as many ranges as there are holders, each range
into chunks, and each chunk is broadcast by its holder. A holder receives the others' chunks into scratch memory: its
own state is never written, so a transfer that is cut off harms only those who lacked the state anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from horovod_ft.agreement import Agreement
from horovod_ft.committer import Committer
from horovod_ft.membership.base import Bytes, Collectives

CHUNK = 16 * 2**20


class Block(Protocol):
    """One tensor's bytes in host memory.

    For a tensor in host memory, ``host`` is the memory itself; for another device it is a copy, and ``write_back``
    brings it there. A ``local`` block is one that each worker has of its own: only newcomers take it over.
    """

    nbytes: int
    local: bool

    def host(self, *, read: bool) -> Bytes:
        """uint8, shape ``(nbytes,)``. With ``read`` it holds the tensor's present value."""

    def write_back(self) -> None:
        """``host`` was written: let the tensor have it."""


class Replica(Protocol):
    """The heavy replicated state of a worker: parameters, buffers, optimizer state."""

    def structure(self) -> Any:
        """Picklable description of everything that is not in a block: options, scalars, which tensors there are."""

    def prepare(self, structure: Any) -> None:
        """Make room for what a structure describes, so that ``blocks`` fits the holders'."""

    def blocks(self) -> list[Block]:
        """All tensors, in an order that follows from the structure alone."""

    def joined(self, generation: int, rank: int) -> None:
        """This process has just received the state of a running job: it needs random streams of its own."""


@dataclass(frozen=True)
class Chunk:
    root: int
    start: int
    stop: int


def plan_chunks(total: int, holders: Sequence[int], chunk: int = CHUNK) -> list[Chunk]:
    """Cut ``total`` bytes over the holders, and each range into chunks; interleaved, so that all holders send."""
    bounds = [total * i // len(holders) for i in range(len(holders) + 1)]
    ranges = [
        [Chunk(root, at, min(at + chunk, bounds[i + 1])) for at in range(bounds[i], bounds[i + 1], chunk)]
        for i, root in enumerate(holders)
    ]
    longest = max((len(chunks) for chunks in ranges), default=0)
    return [chunks[i] for i in range(longest) for chunks in ranges if i < len(chunks)]


@dataclass(frozen=True)
class Transferred:
    """How much was sent to whom."""

    nbytes: int
    receivers: int


def transfer(comm: Collectives, agreement: Agreement, rank: int, replica: Replica, committer: Committer) -> Transferred:
    """Give every worker that lacks the state the holders' state. Blocks; all workers of the group call it.

    A receiver is torn from the first byte until the last: if the group breaks meanwhile, it counts as having no state.
    """
    if not agreement.lacking:
        return Transferred(0, 0)
    mine = rank in agreement.lacking
    source = agreement.holders[0]
    payload = (replica.structure(), committer.export(), committer.committed) if rank == source else None
    structure, present, committed = comm.broadcast_object(payload, source, "structure")
    if mine:
        committer.torn = True
        replica.prepare(structure)
    newcomer = rank in agreement.newcomers
    sent = [block for block in replica.blocks() if agreement.newcomers or not block.local]
    taken = [mine and (newcomer or not block.local) for block in sent]
    total = send(comm, agreement.holders, rank, sent, taken)
    if mine:
        behind = committer.frontier.step < agreement.frontier.step
        light = present if newcomer else committed if behind else None
        committer.adopt(light, committed, agreement.frontier, agreement.computed_by)
        if newcomer and not agreement.start:
            replica.joined(agreement.generation, rank)
    return Transferred(total, len(agreement.lacking))


def send(
    comm: Collectives, holders: Sequence[int], rank: int, blocks: Sequence[Block], taken: Sequence[bool]
) -> int:
    """Broadcast blocks from those who have them, and write those that this worker takes. Blocks; all workers call it.

    Returns:
        the bytes that were sent.
    """
    run = _Run(blocks, taken)
    for index, chunk in enumerate(plan_chunks(run.total, holders)):
        scratch = np.empty(chunk.stop - chunk.start, dtype=np.uint8)
        if rank == chunk.root:
            run.read(chunk.start, scratch)
        comm.broadcast_bytes(scratch, chunk.root, f"transfer.{index}")
        run.write(chunk.start, scratch)
    run.finish()
    return run.total


class _Run:
    """Blocks laid end to end; only those that are taken are ever written."""

    def __init__(self, blocks: Sequence[Block], taken: Sequence[bool]) -> None:
        self._blocks = list(zip(blocks, taken, strict=True))
        self._starts = np.concatenate([[0], np.cumsum([block.nbytes for block in blocks])]).astype(int).tolist()
        self.total: int = self._starts[-1]

    def _pieces(self, start: int, length: int) -> Iterator[tuple[Block, bool, slice, slice]]:
        for (block, taken), at in zip(self._blocks, self._starts, strict=False):
            low, high = max(at, start), min(at + block.nbytes, start + length)
            if low < high:
                yield block, taken, slice(low - at, high - at), slice(low - start, high - start)

    def read(self, start: int, into: Bytes) -> None:
        for block, _, inside, outside in self._pieces(start, len(into)):
            into[outside] = block.host(read=True)[inside]

    def write(self, start: int, data: Bytes) -> None:
        for block, taken, inside, outside in self._pieces(start, len(data)):
            if taken:
                block.host(read=False)[inside] = data[outside]

    def finish(self) -> None:
        for block, taken in self._blocks:
            if taken:
                block.write_back()
