"""Saves beside the training: one thread a worker that does one ``Save`` after the other. Calls no collectives.

Nothing that goes wrong here reaches the training thread as an exception: it asks for ``endings`` when it likes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from horovod_ft.checkpoint.retention import Retention
from horovod_ft.checkpoint.save import Captured, Links, Means, Save, SaveEnded
from horovod_ft.checkpoint.store import CheckpointStore
from horovod_ft.errors import CheckpointError, UsageError
from horovod_ft.faults.plan import Phase

__all__ = ["Captured", "SaveEnded", "Saver"]

WAIT_S = 600.0
GRACE_S = 5.0
#: Endings that are kept for whoever never asks.
REMEMBERED = 100
#: Of the saving thread: the training thread goes first where both want a core.
NICENESS = 10


def start_thread(run: Callable[[], None]) -> None:
    threading.Thread(target=run, name="horovod_ft saver", daemon=True).start()


class Saver:
    """One worker's saves. All methods are called by the training thread; none but ``wait`` and ``drop`` blocks.

    Args:
        retention: what stays after each save, cleared up by rank 0; None to delete nothing.
        at: the fault plan's hook, told phase and step on the saving thread.
        mono, wall: clocks, in seconds.
        wait_s: bound of each wait for other workers, in seconds.
        grace_s: that bound once the group broke.
        pause: in place of a pause that ends early when there is something to hear.
        start: starts the thread, at the first save.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        retention: Retention | None = None,
        at: Callable[[Phase, int], None] = lambda phase, step: None,
        mono: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        wait_s: float = WAIT_S,
        grace_s: float = GRACE_S,
        pause: Callable[[float], None] | None = None,
        start: Callable[[Callable[[], None]], None] = start_thread,
    ) -> None:
        self._means = Means(store, retention, at, mono, wall, wait_s, grace_s)
        self._pause = pause or self._wait_for_news
        self._start = start
        self._started = False
        self._closed = False
        self._changed = threading.Condition()
        self._news = threading.Event()
        self._next: tuple[Captured, float] | None = None
        self._writing: Captured | None = None
        self._running: Captured | None = None
        self._dropped: Captured | None = None
        self._placing = threading.Lock()
        self._broke: float | None = None
        self._newest: tuple[int, float] | None = None
        self._ended: deque[SaveEnded] = deque(maxlen=REMEMBERED)

    @property
    def busy(self) -> bool:
        """Whether a part is being written here; on rank 0 also while the manifest is yet to come."""
        with self._changed:
            return self._writing is not None

    @property
    def newest(self) -> tuple[int, float] | None:
        """Step of the newest save that this worker knows to be committed, and when, by ``mono``, it was submitted."""
        with self._changed:
            return self._newest

    def submit(self, captured: Captured) -> None:
        """Save a worker's part, beside the training. It must not change while the saver is busy.

        Raises:
            UsageError: the save before is still being written, or the saver is closed, or step and attempt name no
                folder. Nothing was begun.
        """
        folder = captured.folder
        with self._changed:
            if self._closed:
                raise UsageError(f"step {captured.step} cannot be saved: the saver is closed")
            if self._writing is not None:
                still = self._writing.step
                raise UsageError(f"step {captured.step} cannot be saved: step {still} is still being saved")
            now = self._means.mono()
            try:
                self._start_once()
            except RuntimeError as error:  # no more threads can be had: no reason to end the training
                self._ended.append(SaveEnded(captured.step, folder, 0.0, 0, False, error, written=False))
                return
            self._next, self._writing, self._broke = (captured, now), captured, None
            self._tell()

    def endings(self) -> list[SaveEnded]:
        """How saves have ended since the last call, oldest first; the last hundred if nobody asked for long."""
        with self._changed:
            ended = list(self._ended)
            self._ended.clear()
            return ended

    def broken(self) -> None:
        """The group broke or changed, and some of its workers may never write their part. The save that is being done
        goes on only if the others have theirs written soon.
        """
        with self._changed:
            if self._broke is None:
                self._broke = self._means.mono()
            self._tell()

    def drop(self, timeout_s: float) -> None:
        """Training goes back to an earlier state: what is being saved does not become durable any more.

        Blocks while a manifest is being put in place, for that time at most; that save is durable then.

        Raises:
            CheckpointError: it takes longer.
        """
        if not self._placing.acquire(timeout=timeout_s):
            raise CheckpointError(f"waited {timeout_s:g} s for the manifest of a checkpoint to be put in place")
        try:
            with self._changed:
                self._dropped = self._writing or self._running
                self._tell()
        finally:
            self._placing.release()

    def wait(self, timeout_s: float) -> bool:
        """Block until nothing is being written here, and on rank 0 nothing cleared up any more.

        Returns:
            whether it has come to that within the time.
        """
        with self._changed:
            return self._changed.wait_for(self._at_rest, timeout_s)

    def close(self) -> None:
        """Take no more saves. The thread ends when that which is being written is done; ``wait`` for it if need be."""
        with self._changed:
            self._closed = True
            self._tell()

    # --- under the lock --------------------------------------------------------------------------------------------

    def _at_rest(self) -> bool:
        return self._writing is None and (self._running is None or self._running.rank != 0)

    def _start_once(self) -> None:
        if not self._started:
            self._start(self._run)
            self._started = True

    def _tell(self) -> None:
        self._news.set()
        self._changed.notify_all()

    # --- on the saving thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        be_nice()
        while self._save_next():
            pass

    def _save_next(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._next is not None or self._closed)
            if self._next is None:
                return False
            (captured, began), self._next = self._next, None
            self._running = captured
        links = Links(
            self._pause, lambda: self._broke, self._left, lambda: self._dropped is captured, self._placing,
            lambda: self._free(captured), lambda: self._durable(captured.step, began),
        )  # fmt: skip
        ended = Save(captured, began, self._means, links).run()
        with self._changed:
            self._ended.append(ended)
            self._running = None
        self._free(captured)
        return True

    def _left(self) -> bool:
        return self._next is not None or self._closed

    def _free(self, captured: Captured) -> None:
        with self._changed:
            if self._writing is captured:
                self._writing = None
            self._changed.notify_all()

    def _durable(self, step: int, began: float) -> None:
        with self._changed:
            self._newest = (step, began)

    def _wait_for_news(self, seconds: float) -> None:
        self._news.wait(seconds)
        self._news.clear()


def be_nice() -> None:
    """Lower the priority of this thread. Linux alone has priorities of threads; elsewhere, or if it cannot be, not."""
    if sys.platform == "linux":
        me = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, me, max(NICENESS, os.getpriority(os.PRIO_PROCESS, me)))
