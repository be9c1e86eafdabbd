"""Torch's objects inside nested plain values, as what ``checkpoint.values`` can write, and back, bit for bit.

Each becomes a dict with one key that begins with ``torch.``, such as ``{"torch.Size": [2, 3]}``. What is not known here
goes through as it is: ``checkpoint.values`` judges it, and knows its path. Nothing is read, written or moved here.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch

from horovod_ft.errors import DamagedCheckpointError
from horovod_ft.torch.replica import TensorSpec

_PREFIX = "torch."
_MAPPINGS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_KINDS = {kind: name for name, kind in _MAPPINGS.items()}
#: ``checkpoint.values`` refuses what is nested deeper, and names it.
_DEEPEST = 200


def to_plain(value: Any) -> Any:
    """A value in which tensors, dtypes, devices, sizes and TensorSpecs have a plain form.

    Tensors are copied to the host. Lists, tuples and dicts are made anew, everything else is the object itself; so are
    tensors that are not just a run of numbers: sparse, quantized, or without memory.
    """
    return _Encoder().encode(value)


def from_plain(value: Any) -> Any:
    """The value that ``to_plain`` was given. Tensors lie in host memory of their own, and require no gradient.

    Raises:
        DamagedCheckpointError: it is nothing that ``to_plain`` makes.
    """
    try:
        return _decoded(value)
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        raise DamagedCheckpointError(f"values of torch cannot be read: {error}") from error


class _Encoder:
    def __init__(self) -> None:
        self._inside: list[int] = []

    def encode(self, value: Any) -> Any:
        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            return {"torch.Tensor": _fields(value)} if is_dense(value) else value
        if kind is torch.dtype:
            return {"torch.dtype": _name(value)}
        if kind is torch.device:
            return {"torch.device": str(value)}
        if kind is torch.Size:
            return {"torch.Size": list(value)}
        if kind is TensorSpec:
            return {"torch.TensorSpec": [list(value.shape), _name(value.dtype), value.on_host]}
        if (kind is list or kind is tuple or kind in _KINDS) and not self._endless(value):
            self._inside.append(id(value))
            form = self._mapping(value) if kind in _KINDS else kind(self.encode(item) for item in value)
            self._inside.pop()
            return form
        return value

    def _endless(self, value: Any) -> bool:
        return len(self._inside) > _DEEPEST or id(value) in self._inside

    def _mapping(self, value: dict[Any, Any]) -> Any:
        keys = [self.encode(key) for key in value]
        items = [self.encode(item) for item in value.values()]
        if _hashable(keys) and not (type(value) is dict and _tagged(value)):
            return type(value)(dict(zip(keys, items, strict=True)))
        pairs = [[key, item] for key, item in zip(keys, items, strict=True)]
        return {f"{_PREFIX}{_KINDS[type(value)]}": pairs}


def _decoded(value: Any) -> Any:
    kind = type(value)
    if kind is list or kind is tuple:
        return kind(_decoded(item) for item in value)
    if kind not in _KINDS:
        return value
    if kind is not dict or not _tagged(value):
        return kind({_decoded(key): _decoded(item) for key, item in value.items()})
    ((tag, form),) = value.items()
    name = tag.removeprefix(_PREFIX)
    if name in _MAPPINGS:
        return _MAPPINGS[name]({_decoded(key): _decoded(item) for key, item in form})
    return _FORMS[tag](form)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor is its numbers in memory, and nothing besides."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta


def _fields(tensor: torch.Tensor) -> list[Any]:
    host = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return [_name(tensor.dtype), list(tensor.shape), host.reshape(-1).view(torch.uint8).numpy().copy()]


def _tensor(dtype: str, shape: list[int], data: Any) -> torch.Tensor:
    memory = torch.tensor(data, dtype=torch.uint8)  # a copy, which begins where numbers of every dtype may begin
    return memory.view(_dtype(dtype)).reshape(shape)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix(_PREFIX)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype


def _tagged(value: dict[Any, Any]) -> bool:
    return len(value) == 1 and all(type(key) is str and key.startswith(_PREFIX) for key in value)


def _hashable(keys: Iterable[Any]) -> bool:
    """Whether no key has become something else, or holds what has: every form is a dict."""
    return all(_hashable(key) if type(key) is tuple else isinstance(key, Hashable) for key in keys)


_FORMS: dict[str, Callable[[Any], Any]] = {
    "torch.Tensor": lambda fields: _tensor(*fields),
    "torch.dtype": _dtype,
    "torch.device": torch.device,
    "torch.Size": torch.Size,
    "torch.TensorSpec": lambda fields: TensorSpec(tuple(fields[0]), _dtype(fields[1]), bool(fields[2])),
}
