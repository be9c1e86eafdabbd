"""Waits inside Horovod's C++ code, which cannot be interrupted from Python: explain them, bound them, end them.

While the main thread is inside ``hvd.init()`` no Python signal handler runs. A small thread watches instead: it says
after a while what is being waited for, ends the process with a clear message when the bound is reached, and does the
same when the launcher ends the job meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator

from horovod_ft.errors import TRY_AGAIN

EXPLAIN_AFTER_S = 5.0


def _quit(message: str) -> None:
    """End the process from a thread; nothing but ``_exit`` works while the main thread is in C++."""
    print(f"horovod_ft: {message}", file=sys.stderr, flush=True)
    os._exit(TRY_AGAIN)


@contextlib.contextmanager
def explained_wait(what: str, timeout_s: float) -> Iterator[None]:
    """Watch over the body, which blocks in C++.

    Args:
        what: ends the sentence "waited N s ...".
        timeout_s: after so many seconds the process is ended with status 75.
    """
    done_read, done_write = os.pipe()
    signals = _SignalPipe()
    watcher = threading.Thread(target=_watch, args=(done_read, signals.read_fd, what, timeout_s), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        os.write(done_write, b"x")
        watcher.join()
        signals.close()
        os.close(done_read)
        os.close(done_write)


def _watch(done: int, signals: int, what: str, timeout_s: float) -> None:
    began = time.monotonic()
    explained = False
    watched = [done] if signals < 0 else [done, signals]
    while True:
        waited = time.monotonic() - began
        if waited >= timeout_s:
            _quit(f"gave up: waited {waited:.0f} s {what}.")
        if waited >= EXPLAIN_AFTER_S and not explained:
            explained = True
            print(f"horovod_ft: has waited {waited:.0f} s {what}.", file=sys.stderr, flush=True)
        until = timeout_s if explained else min(EXPLAIN_AFTER_S, timeout_s)
        ready, _, _ = select.select(watched, [], [], until - waited)
        if signals in ready and signal.SIGTERM in os.read(signals, 64):
            _quit(f"the launcher ended the job while this worker waited {time.monotonic() - began:.1f} s {what}.")
        if done in ready:
            return


class _SignalPipe:
    """Lets another thread see SIGTERM while the main thread is in C++ (``signal.set_wakeup_fd``).

    A handler must be installed for the wakeup to be written; the user's own handler stays if there is one. Outside
    the main thread signals cannot be set up, and ``read_fd`` is -1.
    """

    def __init__(self) -> None:
        self.read_fd = -1
        if threading.current_thread() is not threading.main_thread():
            return
        self.read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._old_wakeup = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._old_handler = signal.getsignal(signal.SIGTERM)
        if self._old_handler in (signal.SIG_DFL, None):
            signal.signal(signal.SIGTERM, lambda number, frame: None)

    def close(self) -> None:
        if self.read_fd < 0:
            return
        if self._old_handler in (signal.SIG_DFL, None):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(self._old_wakeup)
        os.close(self.read_fd)
        os.close(self._write_fd)
