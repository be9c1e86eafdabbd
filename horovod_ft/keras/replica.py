"""Weights and the optimizer's variables as runs of bytes, for ``transfer.py``.

What a model changes outside of its update, such as the running statistics of BatchNorm, each worker has of its own. So
have random generators. Learning rates are no part of this: scripts change them between steps, see ``parts``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_ft.keras.names import names_of
from horovod_ft.keras.parts import rates_of, read
from horovod_ft.membership.base import Bytes


class VariableBlock:
    """A variable as a ``transfer.Block``. Its bytes are copied to the host, and back."""

    def __init__(self, variable: Any, *, local: bool) -> None:
        self.local = local
        self._variable = variable
        self._dtype = tf.as_dtype(variable.dtype).as_numpy_dtype
        self._shape = tuple(variable.shape)
        self.nbytes = int(np.prod(self._shape, dtype=np.int64)) * np.dtype(self._dtype).itemsize
        self._copy: np.ndarray[Any, Any] | None = None

    def host(self, *, read: bool) -> Bytes:
        if self._copy is None:
            self._copy = bytes_of(self._variable).copy() if read else np.empty(self.nbytes, dtype=np.uint8)
        return self._copy

    def write_back(self) -> None:
        if self._copy is not None:
            self._variable.assign(self._copy.view(self._dtype).reshape(self._shape))


def bytes_of(variable: Any) -> Bytes:
    """The present value in row-major order; to be read only."""
    value = read(variable).numpy()
    flat: Bytes = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return flat


class TensorFlowReplica:
    """The heavy state of models and optimizers.

    Args:
        models, optimizers: by attribute name; asked for anew each time, because a user may replace them.
    """

    def __init__(self, models: Callable[[], dict[str, Any]], optimizers: Callable[[], dict[str, Any]]) -> None:
        self._models = models
        self._optimizers = optimizers

    def named(self) -> Iterator[tuple[str, Any, bool]]:
        """Name, variable and whether each worker has its own, of all variables, each once."""
        seen: set[int] = set()
        for owner, variables in self._owners():
            fresh = [(variable, local) for variable, local in variables if id(variable) not in seen]
            seen.update(id(variable) for variable, _ in fresh)
            names = names_of(variable for variable, _ in fresh)
            yield from ((f"{owner}.{name}", *pair) for name, pair in zip(names, fresh, strict=True))

    def _owners(self) -> Iterator[tuple[str, list[tuple[Any, bool]]]]:
        for owner, model in self._models().items():
            weights = weights_of(model)
            yield owner, [(variable, id(variable) not in weights) for variable in model.variables]
        for owner, optimizer in self._optimizers().items():
            yield owner, [(variable, False) for variable in variables_of(optimizer)]

    def replicated(self) -> list[tuple[str, Any]]:
        """Names and variables of what is equal on all workers."""
        return [(name, variable) for name, variable, local in self.named() if not local]

    def local(self) -> list[Any]:
        """Variables of which each worker has its own."""
        found: dict[int, tuple[Any, bool]] = {}
        for _, variables in self._owners():  # not ``named``: names take time, and this is asked in each step
            for variable, local in variables:
                found.setdefault(id(variable), (variable, local))
        return [variable for variable, local in found.values() if local]

    def schema(self) -> list[str]:
        tensors = [f"{name} {tuple(variable.shape)} {variable.dtype}" for name, variable, _ in self.named()]
        return tensors + self.kinds()

    def kinds(self) -> list[str]:
        """One line an optimizer."""
        return [f"{owner}: {type(one).__name__}" for owner, one in self._optimizers().items()]

    def blocks(self) -> list[VariableBlock]:
        return [VariableBlock(variable, local=local) for _, variable, local in self.named()]

    def digest(self) -> int:
        """The bits of all replicated variables in one number of 64 bits: their sums as whole numbers, chained."""
        total = 0
        for _, variable in self.replicated():
            total = (total * 1_000_003 + int(bytes_of(variable).sum(dtype=np.int64))) % 2**64
            total = (total * 1_000_003 + _ordered(bytes_of(variable))) % 2**64
        return total

    def finite(self) -> bool:
        floating = [read(variable) for _, variable in self.replicated() if tf.as_dtype(variable.dtype).is_floating]
        return all(bool(tf.reduce_all(tf.math.is_finite(value))) for value in floating)


def _ordered(data: Bytes) -> int:
    """A sum of words of eight bytes, that sees where in its word a bit has changed."""
    padded = np.zeros(-(-len(data) // 8) * 8, dtype=np.uint8)
    padded[: len(data)] = data
    return int(padded.view(np.uint64).sum(dtype=np.uint64))


def weights_of(model: Any) -> set[int]:
    """Ids of the variables that an update changes, or could if their layer were not frozen."""
    return {id(variable) for layer in model._flatten_layers() for variable in layer._trainable_variables}


def variables_of(optimizer: Any) -> list[Any]:
    """An optimizer's variables, those of one inside of it included, but for learning rates."""
    inner = getattr(optimizer, "inner_optimizer", None)
    every = {id(one): one for owner in (optimizer, inner) if owner is not None for one in owner.variables}
    for rate in rates_of(optimizer):
        every.pop(id(rate), None)
    return list(every.values())
