"""The moments of a training step at which a fault plan can strike, as operations of its graph.

Without a plan there is nothing in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

from horovod_ft.faults.inject import Injector
from horovod_ft.faults.plan import Fault, Phase
from horovod_ft.keras.arrivals import Arrivals
from horovod_ft.keras.parts import read


class Probes(Protocol):
    """Where a step can be struck."""

    def forward(self) -> AbstractContextManager[Any]:
        """Around the forward pass."""

    def backward(self, gradients: list[Any]) -> list[Any]:
        """The first gradient is computed."""

    def before(self, reduced: Sequence[Any]) -> AbstractContextManager[Any]:
        """Around a reduction, or what follows the last one: so many are through before it."""

    def update(self, reduced: Sequence[Any]) -> Sequence[Any]:
        """All gradients are reduced, and no variable is touched."""

    def arrived(self, arrivals: Arrivals) -> None:
        """The same between two stages of a step.

        Raises:
            HorovodInternalError: by a fault of kind ``lose``; what it says is lost has not arrived.
        """


class NoProbes:
    """There is no fault plan."""

    def forward(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def backward(self, gradients: list[Any]) -> list[Any]:
        return gradients

    def before(self, reduced: Sequence[Any]) -> AbstractContextManager[Any]:
        return nullcontext()

    def update(self, reduced: Sequence[Any]) -> Sequence[Any]:
        return reduced

    def arrived(self, arrivals: Arrivals) -> None:
        pass


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
            return [tf.nest.map_structure(tf.identity, one, expand_composites=True) for one in gradients]

    def before(self, reduced: Sequence[Any]) -> AbstractContextManager[Any]:
        return self._at("allreduce", reduced, len(reduced)) if self._planned("allreduce") else nullcontext()

    def update(self, reduced: Sequence[Any]) -> Sequence[Any]:
        if not self._planned("optimizer") and not any(fault.kind == "lose" for fault in self._injector.waiting):
            return reduced
        with self._at("optimizer", reduced):
            return [tf.nest.map_structure(tf.identity, one, expand_composites=True) for one in reduced]

    def arrived(self, arrivals: Arrivals) -> None:
        fault = self._injector.pending("allreduce", self._step())
        if fault is not None and fault.kind == "lose":
            arrivals.lose(fault.after)
            self._lose(fault)

    def _lose(self, fault: Fault) -> None:
        self._injector.fire(fault)
        raise HorovodInternalError(f"Horovod has been shut down, says the fault plan: {fault}")

    def _planned(self, phase: Phase) -> bool:
        return any(fault.phase == phase and fault.kind != "lose" for fault in self._injector.waiting)

    def _at(self, phase: Phase, after: Sequence[Any], through: int = 0) -> AbstractContextManager[Any]:
        """What is made inside runs after the phase, and the phase comes when ``after`` is there."""

        def strike() -> int:
            lost = self._injector.pending("allreduce", self._step()) if phase == "optimizer" else None
            if lost is not None and lost.kind == "lose":
                self._lose(lost)
            fault = self._injector.pending(phase, self._step())
            if fault is not None and fault.kind != "lose" and (phase != "allreduce" or through >= fault.after):
                self._injector.fire(fault)
            return 0

        with tf.control_dependencies(tf.nest.flatten(list(after), expand_composites=True)):
            struck = tf.py_function(strike, [], tf.int32)
        return tf.control_dependencies([struck])  # type: ignore[no-any-return]


def corrupt(variables: Sequence[Any], kind: str) -> None:
    """Change one number in the middle of the largest variable: flip the lowest bit of its exponent, or make it NaN.

    Args:
        variables: of floating point numbers of 2, 4 or 8 bytes.
        kind: ``bitflip`` or ``nan``.
    """
    largest = max(variables, key=lambda variable: int(np.prod(variable.shape, dtype=np.int64)))
    value = read(largest).numpy().copy()
    middle = value.reshape(-1)[value.size // 2 :][:1]
    if kind == "nan":
        middle[:] = np.nan
    else:
        mantissa = {2: 10, 4: 23, 8: 52}[value.itemsize]
        words = middle.view(f"u{value.itemsize}")
        words ^= words.dtype.type(1 << mantissa)
    largest.assign(value)
