"""Parameters, buffers and optimizer state as runs of bytes, for ``transfer.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from horovod_ft.membership.base import Bytes
from horovod_ft.parts import copied

#: Whole numbers by their size in bytes.
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TensorBlock:
    """A tensor as a ``transfer.Block``."""

    def __init__(self, tensor: torch.Tensor, *, local: bool) -> None:
        self._tensor = tensor.detach()
        self.local = local
        self.nbytes = tensor.numel() * tensor.element_size()
        self._direct = self._tensor.device.type == "cpu" and self._tensor.is_contiguous()
        self._copy: torch.Tensor | None = None

    def host(self, *, read: bool) -> Bytes:
        if self._direct:
            return _bytes_of(self._tensor)
        if self._copy is None:
            source = self._tensor if read else torch.empty_like(self._tensor, device="cpu")
            self._copy = source.cpu().contiguous()
        return _bytes_of(self._copy)

    def write_back(self) -> None:
        if self._copy is not None:
            self._tensor.copy_(self._copy)


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    flat: Bytes = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.empty(0, dtype=np.uint8)
    return flat


class TensorSpec(NamedTuple):
    """What is needed to make a tensor of an optimizer's state; ``on_host`` even if the parameter is on a device."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool


#: For each optimizer: index of a parameter -> key -> value.
Structure = list[dict[int, dict[str, Any]]]


class TorchReplica:
    """The heavy state of models and optimizers.

    Args:
        models, optimizers: by attribute name; asked for anew each time, because a user may replace them.
    """

    def __init__(
        self,
        models: Callable[[], dict[str, torch.nn.Module]],
        optimizers: Callable[[], dict[str, torch.optim.Optimizer]],
    ) -> None:
        self._models = models
        self._optimizers = optimizers

    def named(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Name, tensor and whether each worker has its own, of all parameters and buffers, each once."""
        seen: set[int] = set()
        for owner, model in self._models().items():
            for name, tensor, local in _tensors(model):
                if id(tensor) not in seen:  # models may share some
                    seen.add(id(tensor))
                    yield f"{owner}.{name}", tensor, local
        for owner, optimizer in self._optimizers().items():
            for index, parameter in enumerate(_parameters(optimizer)):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f"{owner}.parameter{index}", parameter, False

    def schema(self) -> list[str]:
        return [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor, _ in self.named()] + self.groups()

    def groups(self) -> list[str]:
        """One line a param group of an optimizer."""
        return [
            f"{owner}: group {index} of {type(optimizer).__name__} with {len(group['params'])} parameters"
            for owner, optimizer in self._optimizers().items()
            for index, group in enumerate(optimizer.param_groups)
        ]

    def optimizers(self) -> list[str]:
        """Their attribute names, in the order of ``structure``."""
        return list(self._optimizers())

    def structure(self) -> Structure:
        """For each optimizer: index of the parameter -> key -> TensorSpec, or the value itself."""
        return [
            {index: {key: _described(value) for key, value in state.items()} for index, state in states.items()}
            for states in self._states()
        ]

    def prepare(self, structure: Structure) -> None:
        """Give each optimizer state of this structure; tensors that fit are kept, others are made, unfilled."""
        self.install(self.room(structure))

    def room(self, structure: Structure) -> Structure:
        """State of this structure for each optimizer, as for ``prepare``; the optimizers do not have it yet."""
        return [
            {index: _made(state, have.get(index, {}), parameters[index]) for index, state in states.items()}
            for states, have, parameters in zip(structure, self._states(), self._all_parameters(), strict=True)
        ]

    def install(self, room: Structure) -> None:
        """Let the optimizers have what ``room`` made for them."""
        for optimizer, states in zip(self._optimizers().values(), room, strict=True):
            for index, parameter in enumerate(_parameters(optimizer)):
                if index in states:
                    optimizer.state[parameter] = states[index]
                else:
                    optimizer.state.pop(parameter, None)

    def _states(self) -> Structure:
        """For each optimizer: index of the parameter -> its state, live."""
        return [
            {
                index: optimizer.state[parameter]
                for index, parameter in enumerate(_parameters(optimizer))
                if parameter in optimizer.state
            }
            for optimizer in self._optimizers().values()
        ]

    def _all_parameters(self) -> list[list[torch.Tensor]]:
        return [list(_parameters(optimizer)) for optimizer in self._optimizers().values()]

    def optimizer_tensors(self) -> list[torch.Tensor]:
        return [tensor for _, tensor in self._named_states(self._states())]

    def replicated_tensors(self) -> list[torch.Tensor]:
        return [tensor for _, tensor in self.replicated()]

    def replicated(self, room: Structure | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors of what is equal on all workers: parameters, then the optimizers' state.

        Args:
            room: the optimizers' state in place of what they have.
        """
        yield from ((name, tensor) for name, tensor, local in self.named() if not local)
        yield from self._named_states(self._states() if room is None else room)

    def _named_states(self, states: Structure) -> Iterator[tuple[str, torch.Tensor]]:
        for owner, of_parameters in zip(self._optimizers(), states, strict=True):
            for index, state in of_parameters.items():
                for key, value in state.items():
                    if isinstance(value, torch.Tensor):
                        yield f"{owner}.state.{index}.{key}", value

    def digest(self) -> int:
        """The bits of all replicated tensors in one number of 64 bits: their sums as whole numbers, chained."""
        sums = [_words(tensor).sum(dtype=torch.int64) for tensor in self.replicated_tensors() if tensor.numel()]
        total = 0
        for value in torch.stack([one.cpu() for one in sums]).tolist() if sums else ():
            total = (total * 1_000_003 + value) % 2**64
        return total

    def finite(self) -> bool:
        return all(bool(torch.isfinite(tensor).all()) for tensor in self.replicated_tensors())

    def blocks(self) -> list[TensorBlock]:
        named = [TensorBlock(tensor, local=local) for _, tensor, local in self.named()]
        return named + [TensorBlock(tensor, local=False) for tensor in self.optimizer_tensors()]


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's memory as whole numbers."""
    plain = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return plain.contiguous().view(WORDS[plain.element_size()])


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    for name, parameter in model.named_parameters():
        yield name, parameter, False
    for name, buffer in model.named_buffers():
        yield name, buffer, True


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return TensorSpec(tuple(value.shape), value.dtype, value.device.type == "cpu")
    return copied(value)


def _made(state: dict[str, Any], have: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    return {key: _made_one(value, have.get(key), parameter) for key, value in state.items()}


def _made_one(value: Any, have: Any, parameter: torch.Tensor) -> Any:
    if not isinstance(value, TensorSpec):
        return copied(value)
    device = torch.device("cpu") if value.on_host else parameter.device
    if (
        isinstance(have, torch.Tensor)
        and (tuple(have.shape), have.dtype, have.device) == (value.shape, value.dtype, device)
    ):
        return have
    if value.shape == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=value.dtype, device=device, requires_grad=False)
    return torch.empty(value.shape, dtype=value.dtype, device=device)
