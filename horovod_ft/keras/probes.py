"""The moments of a training step at which a fault plan can strike, as operations of its graph.

Without a plan there is nothing in the graph. Faults of kind ``lose``, ``bitflip`` and ``nan`` are not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import tensorflow as tf

from horovod_ft.faults.inject import Injector
from horovod_ft.faults.plan import Phase


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


class FaultProbes:
    """The faults of a plan that are meant for this worker.

    With one in the reduction, this worker reduces its gradients one after the other.

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
        if not self._planned("optimizer"):
            return reduced
        with self._at("optimizer", reduced):
            return [tf.nest.map_structure(tf.identity, one, expand_composites=True) for one in reduced]

    def _planned(self, phase: Phase) -> bool:
        return any(fault.phase == phase for fault in self._injector.waiting)

    def _at(self, phase: Phase, after: Sequence[Any], through: int = 0) -> AbstractContextManager[Any]:
        """What is made inside runs after the phase, and the phase comes when ``after`` is there."""

        def strike() -> int:
            fault = self._injector.pending(phase, self._step())
            if fault is not None and (phase != "allreduce" or through >= fault.after):
                self._injector.fire(fault)
            return 0

        with tf.control_dependencies(tf.nest.flatten(list(after), expand_composites=True)):
            struck = tf.py_function(strike, [], tf.int32)
        return tf.control_dependencies([struck])  # type: ignore[no-any-return]
