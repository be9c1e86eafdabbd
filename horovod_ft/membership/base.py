"""The seams of membership: what a group is, what the engine needs of it, and what a framework's binding provides.

Horovod keeps one C++ state for each framework's binding, so all collectives of a job go through the binding of the
framework that trains. A Binding adapts that; a Membership forms groups with it; the engine sees only a Membership.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Group:
    """A formed group, as one of its workers sees it. Ranks are dense, ``0 <= rank < size``."""

    rank: int
    size: int
    generation: int = 0


#: Yes-or-no questions that ``any_async`` merges at once.
FLAGS = 5


class Pending(Protocol):
    """Yes-or-no questions that are being merged over all workers in the background."""

    def result(self) -> int:
        """Bit by bit, whether any worker said yes. Blocks until known; raises a failure type if the group broke."""


class Collectives(Protocol):
    """Collectives of the present group. All block, all have a bound, all raise a failure type if the group breaks."""

    def allgather_object(self, value: Any, name: str) -> list[Any]:
        """The values of all workers, by rank. Values are pickled."""

    def broadcast_object(self, value: Any, root: int, name: str) -> Any:
        """The value of ``root``. Others pass anything."""

    def broadcast_bytes(self, buffer: Bytes, root: int, name: str) -> None:
        """Fill ``buffer`` (uint8, one-dimensional, contiguous, the same length everywhere) with that of ``root``."""

    def any_async(self, flags: int) -> Pending:
        """Merge FLAGS bits over all workers, each by or: from now on, or with what is reduced next. Returns at once.

        At most one may be open.
        """


class Binding(Collectives, Protocol):
    """One framework's Horovod."""

    failure_types: tuple[type[BaseException], ...]

    def init(self) -> None:
        """``hvd.init()``: joins the group that the launcher formed. Blocks until all its members are there."""

    def shutdown(self) -> None:
        """``hvd.shutdown()``. May be called more than once."""

    def rank(self) -> int: ...

    def size(self) -> int: ...


class Membership(Protocol):
    """A way to form a group, and to form it anew. The engine does not know which one it has."""

    failure_types: tuple[type[BaseException], ...]

    @property
    def group(self) -> Group: ...

    @property
    def comm(self) -> Collectives: ...

    def start(self) -> Group:
        """Form the first group. Blocks until all its members are there."""

    def watch(self) -> None:
        """Begin to listen for changes that the launcher announces. Returns at once; may be called more than once."""

    def changed(self) -> bool:
        """Whether this worker heard that workers come or go since the group was formed. Never blocks."""

    def preempted(self) -> bool:
        """Whether this worker has heard that the job is about to be ended. Never blocks."""

    def abort(self) -> int:
        """Make every member of the broken group fail now instead of at its timeout. Returns the sockets cut.

        Again in the same group it does nothing, and returns 0.
        """

    def reform(self) -> Group:
        """Leave the present group and form the next one from whoever is left and whoever has come.

        Blocks until it stands. The generation stays that of the old group until ``adopt_generation``.

        Raises:
            RecoveryError: no group can be formed.
        """

    def adopt_generation(self, generation: int) -> None:
        """The members have agreed on the number of the group."""

    def stop(self) -> None:
        """Training is over: leave the group for good."""
