"""Tell all workers of a job that it is about to be ended, in a thread of its own: the driver waits for nobody here."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from horovod_ft.agent.notice import NO, YES
from horovod_ft.membership.notice import NO_TIME, PREEMPTED

#: A worker that has not answered by then counts as one that does not hear; a living one takes milliseconds.
REACH_S = 3.0


def answer(line: socket.socket, clients: Callable[[], Sequence[Any]], *, reach_s: float = REACH_S) -> threading.Thread:
    """Begin to answer on the line, until its other end is closed. Returns at once.

    Args:
        line: the end of a ``Notice`` that was handed over.
        clients: gives Horovod's ``WorkerNotificationClient`` of each worker that can be told.
        reach_s: bound of the wait for the first of them, in seconds.
    """
    thread = threading.Thread(target=_answer, args=(line, clients, reach_s), name="notices", daemon=True)
    thread.start()
    return thread


def _answer(line: socket.socket, clients: Callable[[], Sequence[Any]], reach_s: float) -> None:
    with line, contextlib.suppress(OSError):
        while line.recv(1):
            line.send(YES if tell(clients(), reach_s) else NO)


def tell(clients: Sequence[Any], reach_s: float) -> bool:
    """Tell all workers at once. Returns whether one has heard: as soon as one has, and after ``reach_s`` at the latest.

    The others are told meanwhile and afterwards, each in a thread that nobody waits for: Horovod's client has no bound,
    and a host that is gone without a word would hold it up for minutes.
    """
    heard: queue.SimpleQueue[bool] = queue.SimpleQueue()
    for client in clients:
        threading.Thread(target=_tell, args=(client, heard), name="notice", daemon=True).start()
    deadline = time.monotonic() + reach_s
    for _ in clients:
        try:
            if heard.get(timeout=max(0.0, deadline - time.monotonic())):
                return True
        except queue.Empty:
            return False
    return False


def _tell(client: Any, heard: queue.SimpleQueue[bool]) -> None:
    try:
        client.notify_hosts_updated(NO_TIME, PREEMPTED)
    except Exception:  # it has ended, or is about to: whatever a broken connection raises
        heard.put(False)
    else:
        heard.put(True)
