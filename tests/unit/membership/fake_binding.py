"""A binding that does nothing but keep account of what it is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from horovod_ft.membership.base import Bytes, Pending


class LostError(RuntimeError):
    """The failure type of this binding."""


class FakeBinding:
    """A framework's Horovod whose next group is said beforehand; ``during_init`` runs while it forms."""

    failure_types: tuple[type[BaseException], ...] = (LostError,)

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.place = (rank, size)
        self.calls: list[str] = []
        self.during_init: Callable[[], None] = lambda: None

    def init(self) -> None:
        self.calls.append("init")
        self.during_init()

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def rank(self) -> int:
        return self.place[0]

    def size(self) -> int:
        return self.place[1]

    def allgather_object(self, value: Any, name: str) -> list[Any]:
        raise NotImplementedError

    def broadcast_object(self, value: Any, root: int, name: str) -> Any:
        raise NotImplementedError

    def broadcast_bytes(self, buffer: Bytes, root: int, name: str) -> None:
        raise NotImplementedError

    def any_async(self, flags: int) -> Pending:
        raise NotImplementedError
