"""What a PyTorch training hands to a durable checkpoint, and takes back: a ``trainee.Durable``.

Tensors that are equal on all workers go by their bytes, so that each worker writes a part of them; everything else goes
as plain values. Nothing is written or read here, and no collective is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import horovod
import torch

from horovod_ft.checkpoint import partition, tensors
from horovod_ft.checkpoint.partition import Piece
from horovod_ft.checkpoint.tensors import Tensor, TensorSpec
from horovod_ft.committer import Committer, Part
from horovod_ft.errors import MismatchError, UnsupportedStateError
from horovod_ft.parts import CursorPart, Own, at_commit
from horovod_ft.torch.arena import HostMemory
from horovod_ft.torch.parts import BUFFERS, RANDOM, VALUES, Buffers
from horovod_ft.torch.plain import from_plain, is_dense, to_plain
from horovod_ft.torch.replica import WORDS, Structure, TensorBlock, TorchReplica

#: As the safetensors format spells them.
DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.uint16: "U16", torch.int16: "I16", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.uint32: "U32", torch.int32: "I32", torch.float32: "F32",
    torch.uint64: "U64", torch.int64: "I64", torch.float64: "F64", torch.complex64: "C64",
}  # fmt: skip
#: Where ``shared`` says what it is of. A TorchState tracks no attribute with the name of a method of its own.
SCHEMA = "schema"
#: What ``local`` holds, and the parts that look after it.
OWN = {"random": RANDOM, "buffers": BUFFERS}
#: Attributes of these kinds have values in ``shared``.
HOLDING = ("optimizer", "scaler", "stateful", "loader", "value")


class TorchDurable:
    """A training state as a durable checkpoint sees it.

    Args:
        replica, committer: of the state.
        parts: all light state; replicated ones by the attribute that they look after, see ``parts_of``.
        kinds: of the tracked attributes, by name.
    """

    def __init__(
        self, replica: TorchReplica, committer: Committer, parts: Mapping[str, Part], kinds: Mapping[str, str]
    ) -> None:
        self._replica = replica
        self._committer = committer
        self._parts = parts
        self._kinds = kinds
        self._memory = HostMemory()
        self._filled: Callable[[], None] = _nothing
        self._opened: _Opened | None = None

    @property
    def versions(self) -> Mapping[str, str]:
        return {"torch": str(torch.__version__), "horovod": str(horovod.__version__)}

    # --- saving ----------------------------------------------------------------------------------------------------

    def tensors(self) -> list[TensorSpec]:
        """
        Raises:
            UnsupportedStateError: a tensor cannot be held by a checkpoint, or two have the same name.
        """
        specs = [spec_of(name, tensor) for name, tensor in self._replica.replicated()]
        tensors.check_names(specs)
        return specs

    def capture(self, pieces: Sequence[Piece]) -> tuple[list[partition.Part], Callable[[], None]]:
        self._filled()  # the copy before may have been given up
        live = dict(self._replica.replicated())
        pinned = any(live[piece.tensor].device.type == "cuda" for piece in pieces)
        room = self._memory.room([piece.nbytes for piece in pieces], pinned=pinned)
        views: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for piece, target in zip(pieces, room, strict=True):
            found = list(runs(live[piece.tensor], piece.start, piece.stop))
            views += _laid_out(target, found)
            sources += found
        self._filled = self._memory.copy(views, sources)
        self._memory.settle()  # nobody knows what changes a tensor next, nor where
        parts = [
            partition.Part(spec_of(piece.tensor, live[piece.tensor]), piece, target.numpy().data)
            for piece, target in zip(pieces, room, strict=True)
        ]
        return parts, self._filled

    def shared(self) -> Any:
        committed = self._committer.committed
        exported = iter(self._committer.export() if committed is None else committed)
        by_name = {name: next(exported) for name, part in self._parts.items() if part.replicated}
        values = by_name.pop(VALUES)
        for name, states in zip(self._replica.optimizers(), self._replica.structure(), strict=True):
            by_name[name] = {"options": by_name[name], "state": states}
        return to_plain({SCHEMA: self._schema(), **by_name, **values})

    def local(self) -> Any:
        return to_plain({name: at_commit(cast(Own, self._parts[part]), self._committer) for name, part in OWN.items()})

    # --- restoring -------------------------------------------------------------------------------------------------

    def open(self, shared: Any) -> list[Tensor]:
        """
        Raises:
            MismatchError: it is of a state with other attributes or optimizers. Nothing was changed.
        """
        self._check(shared)
        room = self._replica.room([from_plain(shared[name]["state"]) for name in self._replica.optimizers()])
        named = list(self._replica.replicated(room))
        blocks = [TensorBlock(tensor, local=False) for _, tensor in named]
        self._opened = _Opened(room, blocks)
        return [
            Tensor(spec_of(name, tensor), block.host(read=False).data)
            for (name, tensor), block in zip(named, blocks, strict=True)
        ]

    @torch.no_grad()
    def restored(self, shared: Any, local: Any | None) -> None:
        assert self._opened is not None, "open comes first"
        for block in self._opened.blocks:
            block.write_back()
        self._replica.install(self._opened.room)
        self._opened = None
        values = from_plain(shared)
        for name, part in self._parts.items():
            if part.replicated:
                part.adopt(self._of(name, values))
        if local is not None:
            for name, value in from_plain(local).items():
                self._parts[OWN[name]].adopt(value)
        self._committer.save()

    def _of(self, name: str, values: dict[str, Any]) -> Any:
        """What the part with this name has exported."""
        if name == VALUES:
            return {attribute: values[attribute] for attribute, kind in self._kinds.items() if kind == "value"}
        return values[name]["options"] if self._kinds[name] == "optimizer" else values[name]

    # --- what has to fit -------------------------------------------------------------------------------------------

    def _schema(self) -> dict[str, Any]:
        modules = self._buffers.modules()
        return {
            "attributes": {name: self._described(name, kind) for name, kind in self._kinds.items() if kind in HOLDING},
            "groups": self._replica.groups(),
            "buffers": {path: modules[path] for path in self._buffers.owners()},
            "shapes": {path: _shape(buffer) for path, buffer in self._buffers.lasting().items()},
        }

    def _described(self, name: str, kind: str) -> str:
        """A place in the data means something in the same order of the same samples only."""
        part = self._parts.get(name)
        return f"{kind} of {part.order()}" if isinstance(part, CursorPart) else kind

    def _check(self, shared: Any) -> None:
        if not isinstance(shared, dict) or SCHEMA not in shared:
            raise MismatchError("the checkpoint was not saved from a TorchState; use another one")
        there, here, modules = from_plain(shared[SCHEMA]), self._schema(), self._buffers.modules()
        told = [
            *_differences(_attributes(there), _attributes(here)),
            *_differences(_groups(there), _groups(here)),
            *_differences(there["buffers"], {path: modules[path] for path in there["buffers"] if path in modules}),
            *_differences(*_in_both(there["shapes"], here["shapes"])),
        ]
        if told:
            lines = "".join(f"\n  {line}" for line in told)
            raise MismatchError(
                f"the checkpoint is of another training than this one:{lines}\n"
                "Give the state what it had when the checkpoint was saved, or use another checkpoint"
            )

    @property
    def _buffers(self) -> Buffers:
        return cast(Buffers, self._parts[BUFFERS])


class _Opened(NamedTuple):
    """What ``open`` has made, until ``restored``.

    Attributes:
        room: state of the optimizers.
        blocks: memory of all tensors.
    """

    room: Structure
    blocks: list[TensorBlock]


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """A tensor as a checkpoint names it.

    Raises:
        UnsupportedStateError: a checkpoint cannot hold it.
    """
    if not is_dense(tensor) or tensor.is_conj() or tensor.is_neg():
        raise UnsupportedStateError(
            f"tensor {name!r} is {_described(tensor)}: a checkpoint holds tensors that are their numbers in memory"
        )
    if tensor.dtype is torch.complex128:
        spec = TensorSpec(name, "F64", (*tensor.shape, 2))
    else:
        spec = TensorSpec(name, DTYPES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
    spec.check()
    return spec


def _described(tensor: torch.Tensor) -> str:
    if tensor.layout is not torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    if tensor.is_meta:
        return "on the meta device"
    return "quantized" if tensor.is_quantized else "conjugated or negated when it is read"


def runs(tensor: torch.Tensor, start: int, stop: int) -> Iterator[torch.Tensor]:
    """Bytes ``start`` to ``stop`` of a tensor in row-major order: views of its memory, of whole numbers, end to end.

    One view if the tensor is contiguous, or wanted as a whole; else two for each of its dimensions at most. Both ends
    lie between two elements.
    """
    numbers = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    if numbers.is_contiguous():
        flat = numbers.view(-1).view(torch.uint8)
        yield flat if stop - start == len(flat) else flat[start:stop]
    else:
        itemsize = numbers.element_size()
        yield from _elements(numbers.view(WORDS[itemsize]), start // itemsize, stop // itemsize)


def _laid_out(memory: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Views of a run of bytes for these tensors, end to end."""
    at = 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        place = memory if nbytes == len(memory) else memory[at : at + nbytes]
        yield place if tensor.shape == place.shape else place.view(tensor.dtype).view(tensor.shape)
        at += nbytes


def _elements(tensor: torch.Tensor, start: int, stop: int) -> Iterator[torch.Tensor]:
    """Elements ``start`` to ``stop``, which is more: the end of a row, whole rows, the beginning of a row."""
    if stop - start == tensor.numel():
        yield tensor
        return
    row = tensor.numel() // len(tensor)
    first, last = -(-start // row), stop // row
    if first > last:
        yield from _elements(tensor[last], start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _elements(tensor[first - 1], start - (first - 1) * row, row)
    if first < last:
        yield tensor[first:last]
    if last * row < stop:
        yield from _elements(tensor[last], 0, stop - last * row)


def _attributes(schema: dict[str, Any]) -> dict[str, str]:
    return {f"state.{name}": kind for name, kind in schema["attributes"].items()}


def _groups(schema: dict[str, Any]) -> dict[str, str]:
    """``optimizer: group 0`` -> ``SGD with 2 parameters``."""
    return {name: what for name, _, what in (line.partition(" of ") for line in schema["groups"])}


def _shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _in_both(there: dict[str, str], here: dict[str, str]) -> Iterator[dict[str, str]]:
    """Both without what only one has: a buffer may be made by the first forward pass."""
    for one in (there, here):
        yield {name: what for name, what in one.items() if name in there and name in here}


def _differences(there: dict[str, str], here: dict[str, str]) -> Iterator[str]:
    for name in here | there:
        if name not in there:
            yield f"{name} is not in the checkpoint"
        elif name not in here:
            yield f"{name} is only in the checkpoint"
        elif there[name] != here[name]:
            yield f"{name} is {there[name]} in the checkpoint, {here[name]} here"


def _nothing() -> None:
    """Nothing to wait for."""
