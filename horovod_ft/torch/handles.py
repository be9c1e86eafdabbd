"""Waiting for Horovod's handles.

``hvd.synchronize`` takes a whole core while it waits, which the backward pass of another worker or Horovod's own thread
may need, and no signal gets through meanwhile. Here a wait looks a few times at once, and sleeps between looks then.
"""

from __future__ import annotations

import math
import time

import horovod.torch as hvd
from horovod.torch import mpi_ops

#: Looks without a sleep: some ten microseconds.
LOOKS = 20
SLEEP_S = 0.00005


def done(handle: int) -> bool:
    """Whether Horovod is through with a handle, well or not. With one that it does not know it is."""
    return handle not in mpi_ops._handle_map or hvd.poll(handle)


def wait(handle: int, deadline: float = math.inf) -> bool:
    """Wait until Horovod is through with a handle; False if it was not before the deadline (``time.monotonic()``)."""
    for _ in range(LOOKS):
        if done(handle):
            return True
    while not done(handle):
        if time.monotonic() > deadline:
            return False
        time.sleep(SLEEP_S)
    return True
