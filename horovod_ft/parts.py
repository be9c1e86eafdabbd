"""Pieces of light state that are the same in every framework: plain values, and the cursor in the data.

Each is a ``committer.Part``. ``begin`` runs in every step, so it copies nothing that cannot change.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from horovod_ft.committer import Committer, Part
from horovod_ft.data import Cursor, Place

#: Values of these types cannot change under a reference to them.
IMMUTABLE = (int, float, complex, str, bytes, bool, type(None))


class BasePart:
    """What most parts do not need."""

    replicated = False

    def begin(self) -> None:
        """Nothing to remember."""

    def commit(self) -> None:
        """Nothing to do: the present value is the committed one."""

    def rollback(self) -> None:
        """Nothing to restore."""

    def export(self) -> Any:
        return None

    def adopt(self, value: Any) -> None:
        """Nothing to take over."""


class Remembered(BasePart):
    """A part whose value at the beginning of a step is what it exports then."""

    def __init__(self) -> None:
        self._saved: Any = None

    def begin(self) -> None:
        self._saved = self.export()

    def rollback(self) -> None:
        if self._saved is not None:
            self.adopt(self._saved)

    def remembered(self) -> Any:
        """The value at the beginning of the step that is open; not to be changed."""
        return self._saved


class Own(Part, Protocol):
    """A part of which each worker has its own, and that can be asked for what it would go back to."""

    def remembered(self) -> Any:
        """The value of the last ``begin``, as ``export`` gives the present one."""


def at_commit(part: Own, committer: Committer) -> Any:
    """The value that goes with the last commit, as ``export`` gives it.

    With a step open, such as one that accumulates gradients when training ends, the present value is of later batches.
    """
    return part.remembered() if committer.open else part.export()


class Attributes(Remembered):
    """The plain values among the attributes of a training state: epoch, batch, whatever the user tracks."""

    replicated = True

    def __init__(self, owner: Any, names: Sequence[str]) -> None:
        super().__init__()
        self._owner = owner
        self._names = tuple(names)

    def export(self) -> dict[str, Any]:
        return {name: copied(getattr(self._owner, name)) for name in self._names}

    def adopt(self, value: dict[str, Any]) -> None:
        for name, item in value.items():
            setattr(self._owner, name, copied(item))


def copied(value: Any) -> Any:
    """A copy that changes of the original do not reach."""
    return value if isinstance(value, IMMUTABLE) else copy.deepcopy(value)


class CursorPart(BasePart):
    """The cursor of a loader. It remembers its last commit itself."""

    replicated = True

    def __init__(self, cursor: Callable[[], Cursor]) -> None:
        self._cursor = cursor

    def order(self) -> str:
        """What the cursor goes through: equal for equal orders of as many samples."""
        order = self._cursor().order
        return f"{order.length} samples" + (f", shuffled with seed {order.seed}" if order.shuffle else "")

    def commit(self) -> None:
        self._cursor().commit()

    def rollback(self) -> None:
        self._cursor().rollback()

    def export(self) -> tuple[int, int]:
        epoch, position = self._cursor().committed
        return epoch, position  # plain numbers, which pickle without this package

    def adopt(self, value: tuple[int, int]) -> None:
        self._cursor().go_to(Place(*value))
