"""What Keras's own callbacks remember, for a worker that joins a training: so that all stop at the same epoch."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from horovod_ft.parts import BasePart

#: They remember nothing that another worker needs: files and screens of their own, or where Keras is.
LEFT_OUT = (
    keras.callbacks.ProgbarLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.BackupAndRestore,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.LambdaCallback,
    keras.callbacks.CSVLogger,
)
#: Set by ``fit``, and right already.
SET_BY_FIT = frozenset({"params", "model", "_model", "validation_data"})
PLAIN = (int, float, complex, str, bytes, bool, type(None), np.generic, np.ndarray)


class CallbackStates(BasePart):
    """A ``committer.Part``: plain attributes of the callbacks that Keras has, and of classes made from them.

    A worker takes them over when it joins, and never after that: the others' are its own then.

    Attributes:
        open: it takes them over.
    """

    replicated = True

    def __init__(self, callbacks: Iterable[Any]) -> None:
        self.open = True
        self._callbacks = _named(callback for callback in callbacks if _remembers(callback))
        self._value: dict[str, dict[str, Any]] | None = None

    def changed(self) -> None:
        """An epoch has begun or ended. In between callbacks are taken for what they were."""
        self._value = None

    def export(self) -> dict[str, dict[str, Any]]:
        if self._value is None:
            self._value = {name: _plain_attributes(callback) for name, callback in self._callbacks.items()}
        return self._value

    def adopt(self, value: dict[str, dict[str, Any]]) -> None:
        if not self.open:
            return
        for one, callback in self._callbacks.items():  # a script that goes on from a checkpoint may have others
            for name, item in value.get(one, {}).items():
                setattr(callback, name, _copied(item))


def _named(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Callbacks by the name of their class, and a number among those of one class."""
    named: dict[str, Any] = {}
    seen: Counter[str] = Counter()
    for callback in callbacks:
        kind = type(callback).__name__
        named[f"{kind}.{seen[kind]}"] = callback
        seen[kind] += 1
    return named


def _remembers(callback: Any) -> bool:
    ours = (kind for kind in type(callback).__mro__ if kind not in (keras.callbacks.Callback, object))
    return not isinstance(callback, LEFT_OUT) and any(kind.__module__.startswith("keras.") for kind in ours)


def _plain_attributes(callback: Any) -> dict[str, Any]:
    """But for those that the script has given: they are right, and Keras turns the sign of some when it needs them."""
    made_by = [vars(kind)["__init__"] for kind in type(callback).__mro__ if "__init__" in vars(kind)]
    given = {name for function in made_by for name in inspect.signature(function).parameters}
    return {
        name: _copied(value)
        for name, value in vars(callback).items()
        if name not in given | SET_BY_FIT and is_plain(value)
    }


def is_plain(value: Any) -> bool:
    """Whether a value is made of numbers and texts alone."""
    if isinstance(value, dict):
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    return all(map(is_plain, value)) if isinstance(value, list | tuple) else isinstance(value, PLAIN)


def _copied(value: Any) -> Any:
    """Containers made anew, arrays as they are: callbacks put others in their place, and never change them."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return type(value)(_copied(item) for item in value) if type(value) in (list, tuple) else value
