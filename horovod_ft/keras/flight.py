"""One blocking operation in another thread, so that the wait for it has a bound and can be interrupted.

TensorFlow's operations block until Horovod is through with them, which may be never. A thread whose operation has ended
takes the next one: what TensorFlow keeps for a thread, such as the primitives of its kernels, is made once. A thread
that nobody waits for any more is free when its operation ends, if ever, and does not keep the process from ending.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from horovod.common.exceptions import HorovodInternalError

from horovod_ft.keras.failures import failures

#: How often a wait asks whether Horovod still runs.
ASK_S = 0.1


class Flight:
    """An operation that has begun.

    Args:
        operation: blocks, and returns the result.
        stopped: says that Horovod has stopped by itself, see ``membership.threads``.
    """

    def __init__(self, operation: Callable[[], Any], stopped: Callable[[], bool]) -> None:
        self._operation = operation
        self._stopped = stopped
        self._ended = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None
        _free().flights.put(self)

    def fly(self) -> None:
        """Run the operation, in this thread."""
        try:
            with failures():
                self._result = self._operation()
        except BaseException as error:
            self._error = error

    def land(self) -> None:
        """The operation has ended, and its thread is free again."""
        self._ended.set()

    def wait(self, deadline: float, mono: Callable[[], float] = time.monotonic) -> bool:
        """Wait until the operation has ended. Returns False if it has not before the deadline, by ``mono``.

        Raises:
            HorovodInternalError: Horovod has stopped, and the operation will never end.
        """
        while not self._ended.wait(min(ASK_S, max(0.0, deadline - mono()))):
            if self._stopped() and not self._ended.is_set():
                raise HorovodInternalError("Horovod has stopped, and with it an operation that had just begun")
            if mono() >= deadline:
                return self._ended.is_set()
        return True

    def result(self) -> Any:
        """What the operation returned, or raises what it raised. It must have ended."""
        if self._error is not None:
            raise self._error
        return self._result


class Pilot(threading.Thread):
    """A thread that runs one operation after the other.

    Attributes:
        flights: that it is to run; one at a time.
    """

    def __init__(self) -> None:
        super().__init__(name="horovod_ft.flight", daemon=True)
        self.flights: SimpleQueue[Flight] = SimpleQueue()
        self.start()

    def run(self) -> None:
        while True:
            self._take(self.flights.get())

    def _take(self, flight: Flight) -> None:
        """Nothing of a flight is kept when this returns."""
        flight.fly()
        _idle.append(self)  # first, so that who has waited for this flight finds this thread
        flight.land()


#: Threads without an operation. A deque's append and pop need no lock.
_idle: deque[Pilot] = deque()
os.register_at_fork(after_in_child=_idle.clear)  # a child has none of its parent's threads


def _free() -> Pilot:
    try:
        return _idle.pop()
    except IndexError:
        return Pilot()
