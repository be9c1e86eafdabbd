"""What a durable checkpoint holds of a PyTorch training state: a ``trainee.Durable``. Reads and writes no files.

Parameters and optimizer state are tensors, cut over all workers. Everything else is values: what is equal on all
workers, under the names of the state's attributes, and what each has of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

import torch

from horovod_ft.checkpoint import tensors as stored
from horovod_ft.checkpoint.partition import Part, Piece
from horovod_ft.checkpoint.tensors import Tensor, TensorSpec
from horovod_ft.committer import Committer
from horovod_ft.committer import Part as LightPart
from horovod_ft.errors import MismatchError, UnsupportedStateError
from horovod_ft.torch.arena import HostMemory
from horovod_ft.torch.parts import Attributes
from horovod_ft.torch.plain import from_plain, is_dense, to_plain
from horovod_ft.torch.replica import TorchReplica

#: Beside the names of attributes, which are identifiers.
STRUCTURE = "structure of the optimizers"
DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float32: "F32", torch.float64: "F64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.complex64: "C64",
}  # fmt: skip


class TorchDurable:
    """See the module.

    Args:
        replica: the tensors.
        committer: knows the replicated parts as of the last commit.
        parts: all parts by name, in the committer's order.
    """

    def __init__(self, replica: TorchReplica, committer: Committer, parts: Mapping[str, LightPart]) -> None:
        self.versions: Mapping[str, str] = {"torch": str(torch.__version__), "horovod": metadata.version("horovod")}
        self._replica = replica
        self._committer = committer
        self._parts = parts
        self._memory = HostMemory()
        self._opened: list[tuple[torch.Tensor, torch.Tensor]] = []

    # --- saving ------------------------------------------------------------------------------------------------------

    def tensors(self) -> list[TensorSpec]:
        """
        Raises:
            UnsupportedStateError: a checkpoint cannot hold one of them; names it.
        """
        return [_spec(name, tensor) for name, tensor in self._replica.replicated()]

    def capture(self, pieces: Sequence[Piece]) -> tuple[list[Part], Callable[[], None]]:
        live = dict(self._replica.replicated())
        sources = [_bytes(live[piece.tensor])[piece.start : piece.stop] for piece in pieces]
        pinned = any(source.device.type == "cuda" for source in sources)
        views = self._memory.room([piece.nbytes for piece in pieces], pinned=pinned)
        wait = self._memory.copy(views, sources)
        specs = {name: _spec(name, live[name]) for name in {piece.tensor for piece in pieces}}
        parts = [
            Part(specs[piece.tensor], piece, view.numpy().data)
            for piece, view in zip(pieces, views, strict=True)
        ]
        return parts, wait

    def settle(self) -> None:
        """Parameters are about to change: let that happen after the capture, if one is still under way."""
        self._memory.settle()

    def shared(self) -> dict[str, Any]:
        replicated = {name: part for name, part in self._parts.items() if part.replicated}
        values = self._committer.committed or self._committer.export()
        told: dict[str, Any] = {}
        for (name, part), value in zip(replicated.items(), values, strict=True):
            told.update(value if isinstance(part, Attributes) else {name: value})
        return {**{name: to_plain(value) for name, value in told.items()},
                STRUCTURE: to_plain(self._replica.structure())}  # fmt: skip

    def local(self) -> dict[str, Any]:
        own = {name: part.export() for name, part in self._parts.items() if not part.replicated}
        return {name: to_plain(value) for name, value in own.items() if value is not None}

    # --- restoring ---------------------------------------------------------------------------------------------------

    def open(self, shared: dict[str, Any]) -> list[Tensor]:
        self._check_names({name for name in shared if name.isidentifier()})
        self._replica.prepare(from_plain(shared[STRUCTURE]))
        self._opened = []
        return [self._memory_of(name, tensor) for name, tensor in self._replica.replicated()]

    def _memory_of(self, name: str, tensor: torch.Tensor) -> Tensor:
        """A tensor with memory to be read into: its own, or that of a copy that is written back."""
        spec = _spec(name, tensor)
        memory = tensor.detach()
        if memory.device.type != "cpu" or not memory.is_contiguous():
            memory = torch.empty(memory.shape, dtype=memory.dtype)
            self._opened.append((tensor, memory))
        return stored.tensor(name, spec.dtype, spec.shape, _bytes(memory).numpy())

    def _check_names(self, saved: set[str]) -> None:
        here = {name for name, part in self._parts.items() if part.replicated and not isinstance(part, Attributes)}
        for part in self._parts.values():
            if isinstance(part, Attributes):
                here.update(part.names)
        told = [f"state.{name} is not in the checkpoint" for name in sorted(here - saved)]
        told += [f"state.{name} is only in the checkpoint" for name in sorted(saved - here)]
        if told:
            raise MismatchError(
                f"the checkpoint is of another training than this one: {'; '.join(told)}. Track the same things in "
                "the state, or use another checkpoint"
            )

    @torch.no_grad()
    def restored(self, shared: dict[str, Any], local: Any) -> None:
        for tensor, memory in self._opened:
            tensor.copy_(memory)
        self._opened = []
        for name, part in self._parts.items():
            if isinstance(part, Attributes):
                part.adopt({attribute: from_plain(shared[attribute]) for attribute in part.names})
            elif part.replicated:
                part.adopt(from_plain(shared[name]))
            elif name in local:
                part.adopt(from_plain(local[name]))


def _spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    shape = tuple(tensor.shape)
    if not is_dense(tensor):
        raise UnsupportedStateError(f"tensor {name!r} is {tensor.layout}, and a checkpoint holds plain ones only")
    if tensor.dtype == torch.complex128:
        return TensorSpec(name, "F64", (*shape, 2))
    spec = TensorSpec(name, DTYPES.get(tensor.dtype, str(tensor.dtype)), shape)
    spec.check()
    return spec


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's numbers in row-major order, as bytes: its own memory if they lie there so."""
    plain = tensor.detach()
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    return plain.contiguous().reshape(-1).view(torch.uint8)
