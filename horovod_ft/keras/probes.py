"""The moments of a training step at which a fault plan can strike, as operations of its graph.

Without a plan there is nothing in the graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

from horovod_ft.faults.inject import Injector
from horovod_ft.faults.plan import STRIKES, Phase
from horovod_ft.keras.arrivals import Arrivals
from horovod_ft.keras.parts import read

#: Bits below the exponent.
MANTISSA = {"bfloat16": 7, "float16": 10, "float32": 23, "float64": 52}


class Probes(Protocol):
    """Where a step can be struck."""

    def forward(self) -> AbstractContextManager[Any]:
        """Around the forward pass."""

    def backward(self, gradients: list[Any]) -> list[Any]:
        """The first gradient is computed."""

    def before(self, reduced: Sequence[Any]) -> AbstractContextManager[Any]:
        """Around a reduction, or what follows the last one: so many are through before it."""

    def lost(self, reduced: Sequence[Any]) -> Sequence[Any]:
        """In a graph of the whole step: all gradients are reduced, unless a fault of kind ``lose`` says otherwise.

        Then running the graph raises what ``failures`` takes for a broken group.
        """

    def arrived(self, arrivals: Arrivals) -> None:
        """The same between two stages of a step.

        Raises:
            HorovodInternalError: what the fault says has not arrived.
        """

    def update(self, reduced: Sequence[Any]) -> Sequence[Any]:
        """All gradients are reduced, and no variable is touched."""


class NoProbes:
    """There is no fault plan."""

    def forward(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def backward(self, gradients: list[Any]) -> list[Any]:
        return gradients

    def before(self, reduced: Sequence[Any]) -> AbstractContextManager[Any]:
        return nullcontext()

    def lost(self, reduced: Sequence[Any]) -> Sequence[Any]:
        return reduced

    def arrived(self, arrivals: Arrivals) -> None:
        pass

    def update(self, reduced: Sequence[Any]) -> Sequence[Any]:
        return reduced


class FaultProbes:
    """The faults of a plan that are meant for this worker.

    With one in the reduction, this worker reduces its gradients one after the other, but for one of kind ``lose``: that
    comes when all are reduced.

    Args:
        step: number of the step that is open.
    """

    def __init__(self, injector: Injector, step: Callable[[], int]) -> None:
        self._injector = injector
        self._step = step

    def forward(self) -> AbstractContextManager[Any]:
        return self._at("forward", ()) if self._planned("forward") else nullcontext()

    def backward(self, gradients: list[Any]) -> list[Any]:
        if not self._planned("backward") or not gradients:
            return gradients
        with self._at("backward", gradients[:1]):
            return _again(gradients)

    def before(self, reduced: Sequence[Any]) -> AbstractContextManager[Any]:
        return self._at("allreduce", reduced) if self._planned("allreduce") else nullcontext()

    def lost(self, reduced: Sequence[Any]) -> Sequence[Any]:
        if not self._planned("allreduce", ("lose",)):
            return reduced
        with _after(reduced, self._lose):
            return _again(reduced)

    def arrived(self, arrivals: Arrivals) -> None:
        self._lose(arrivals)

    def update(self, reduced: Sequence[Any]) -> Sequence[Any]:
        if not self._planned("optimizer"):
            return reduced
        with self._at("optimizer", reduced):
            return _again(reduced)

    def _planned(self, phase: Phase, kinds: Container[str] = STRIKES) -> bool:
        return any(fault.phase == phase and fault.kind in kinds for fault in self._injector.waiting)

    def _at(self, phase: Phase, after: Sequence[Any]) -> AbstractContextManager[Any]:
        """What is made inside runs after the phase, and the phase comes when ``after`` is there."""
        reduced = len(after) if phase == "allreduce" else math.inf

        def strike() -> None:
            fault = self._injector.pending(phase, self._step(), kinds=STRIKES, reduced=reduced)
            if fault is not None:
                self._injector.fire(fault)

        return _after(after, strike)

    def _lose(self, arrivals: Arrivals | None = None) -> None:
        fault = self._injector.pending("allreduce", self._step(), kinds=("lose",))
        if fault is None:
            return
        self._injector.fire(fault)
        if arrivals is not None:
            arrivals.lose(fault.after)
        raise HorovodInternalError(f"Horovod has been shut down, says the fault plan: {fault}")


def _after(tensors: Sequence[Any], strike: Callable[[], None]) -> AbstractContextManager[Any]:
    """What is made inside runs after ``strike``, which runs when these tensors are there."""

    def struck() -> int:
        strike()
        return 0

    with tf.control_dependencies(tf.nest.flatten(list(tensors), expand_composites=True)):
        done = tf.py_function(struck, [], tf.int32)
    return tf.control_dependencies([done])  # type: ignore[no-any-return]


def _again(tensors: Sequence[Any]) -> list[Any]:
    return [tf.nest.map_structure(tf.identity, one, expand_composites=True) for one in tensors]


def corrupt(variables: Sequence[Any], kind: str) -> None:
    """Change one number in the middle of the largest variable: flip the lowest bit of its exponent, or make it NaN.

    Args:
        variables: of floating point numbers, see MANTISSA.
        kind: ``bitflip`` or ``nan``.
    """
    largest = max(variables, key=lambda variable: int(np.prod(variable.shape, dtype=np.int64)))
    value = np.array(read(largest).numpy())
    middle = value.reshape(-1)[value.size // 2 :][:1]
    if kind == "nan":
        middle[:] = np.nan
    else:
        words = middle.view(f"u{value.itemsize}")
        words ^= words.dtype.type(1 << MANTISSA[value.dtype.name])
    largest.assign(value)
