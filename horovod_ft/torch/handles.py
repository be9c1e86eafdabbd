"""Waiting for Horovod's handles.

``hvd.synchronize`` takes a whole core while it waits, which the backward pass of another worker or Horovod's own thread
may need, and no signal gets through meanwhile. Here a wait looks a few times at once, and sleeps between looks then.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import horovod.torch as hvd
from horovod.torch import mpi_ops

#: Looks without a sleep: some ten microseconds.
LOOKS = 20
SLEEP_S = 0.00005
#: How often a wait asks whether Horovod still runs.
ASK_S = 0.1


def done(handle: int) -> bool:
    """Whether Horovod is through with a handle, well or not. With one that it does not know it is."""
    return handle not in mpi_ops._handle_map or hvd.poll(handle)


def unknown() -> bool:
    """In place of ``stopped``, where nobody can tell."""
    return False


def wait(handle: int, deadline: float = math.inf, stopped: Callable[[], bool] = unknown) -> bool:
    """Wait until Horovod is through with a handle.

    Args:
        handle: of an operation that was handed over to Horovod.
        deadline: by ``time.monotonic()``.
        stopped: says that Horovod has stopped by itself, see ``membership.threads``.

    Returns:
        False if it was not through before the deadline.

    Raises:
        HorovodInternalError: Horovod has stopped and will never be through with it.
    """
    for _ in range(LOOKS):
        if done(handle):
            return True
    asked = time.monotonic()
    while not done(handle):
        now = time.monotonic()
        if now > deadline:
            return False
        if now - asked > ASK_S:
            if stopped() and not done(handle):
                raise hvd.HorovodInternalError("Horovod has stopped, and with it an operation that had just begun")
            asked = now
        time.sleep(SLEEP_S)
    return True
