"""One blocking operation in a thread of its own, so that the wait for it has a bound and can be interrupted.

TensorFlow's operations block until Horovod is through with them, which may be never. A thread that nobody waits for any
more ends with its operation, at the latest with the process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
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
        threading.Thread(target=self._fly, name="horovod_ft.flight", daemon=True).start()

    def _fly(self) -> None:
        try:
            with failures():
                self._result = self._operation()
        except BaseException as error:
            self._error = error
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
