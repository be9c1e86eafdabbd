"""Is the thread still there in which Horovod does its work?

It ends when the group breaks, and completes everything that was handed over to it with an error. What is handed over in
that very moment can be missed: Horovod looks whether the thread is ending before it puts the operation into the queue,
not after. Such an operation never ends, and who waits for it would wait for ever. Linux only; no Horovod import.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

TASKS = Path("/proc/self/task")


def native_threads() -> set[int]:
    """Ids of this process's threads that Python has not started. Empty where there is no /proc."""
    try:
        every = {int(name) for name in os.listdir(TASKS)}
    except OSError:
        return set()
    return every - {thread.native_id for thread in threading.enumerate() if thread.native_id is not None}


class ThreadWatch:
    """Remembers which threads appeared while a group was formed."""

    def __init__(self) -> None:
        self._before: set[int] = set()
        self._group: set[int] = set()

    def forming(self) -> None:
        """Call just before the group is formed."""
        self._group = set()
        self._before = native_threads()

    def formed(self) -> None:
        """Call just after."""
        self._group = native_threads() - self._before

    def stopped(self) -> bool:
        """Whether one of the group's threads has ended; False where threads cannot be seen."""
        return any(not (TASKS / str(thread)).exists() for thread in self._group)
