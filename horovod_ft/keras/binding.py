"""Horovod's TensorFlow binding behind ``membership.base.Binding``.

In eager mode Horovod does not see the name of an operation, only its kind. All workers call the blocking collectives in
the same order, one at a time. What runs beside the training has a name, and so is a function of TensorFlow.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import cloudpickle
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError
from horovod.tensorflow import mpi_ops

from horovod_ft.errors import RecoveryTimeoutError
from horovod_ft.keras.flight import Flight
from horovod_ft.keras.operations import HorovodOperations
from horovod_ft.keras.question import NAME, Question
from horovod_ft.keras.same_names import formations
from horovod_ft.membership.base import Bytes
from horovod_ft.membership.threads import ThreadWatch

HOST = "/CPU:0"


class TensorFlowBinding:
    """Collectives on host memory through ``horovod.tensorflow``.

    Args:
        timeout_s: bound of each blocking collective.
        arguments: what the user gave to ``hvd.init``, for the first call of ``init``.

    Attributes:
        riding: steps take questions along; else each has an operation of its own.
    """

    #: What TensorFlow raises for a broken group becomes this one, see ``failures``.
    failure_types: tuple[type[BaseException], ...] = (HorovodInternalError,)

    def __init__(self, timeout_s: float, *arguments: Any, **options: Any) -> None:
        self.riding = False
        self._timeout_s = timeout_s
        self._arguments = arguments, options
        self._threads = ThreadWatch()
        self._sum = tf.function(_sum_of_fields)
        self._totals = tf.function(_total, reduce_retracing=True)
        self._waiting: Question | None = None

    def init(self) -> None:
        arguments, options = self._arguments
        self._threads.forming()
        hvd.init(*arguments, **options)
        formations().assign_add(1)
        self._threads.formed()

    def stopped(self) -> bool:
        """Horovod has stopped by itself, because the group broke: what it has not answered it never will."""
        return self._threads.stopped()

    def shutdown(self) -> None:
        hvd.shutdown()

    def rank(self) -> int:
        return int(hvd.rank())

    def size(self) -> int:
        return int(hvd.size())

    def allgather_object(self, value: Any, name: str) -> list[Any]:
        data = np.frombuffer(cloudpickle.dumps(value), dtype=np.uint8)
        what = f"the {name} of all workers"
        lengths = self._allgather(np.array([len(data)], dtype=np.int64), what).tolist()
        gathered = self._allgather(data, what)
        stops = np.cumsum(lengths).tolist()
        return [
            cloudpickle.loads(gathered[stop - length : stop].tobytes())
            for stop, length in zip(stops, lengths, strict=True)
        ]

    def broadcast_object(self, value: Any, root: int, name: str) -> Any:
        mine = self.rank() == root
        data = np.frombuffer(cloudpickle.dumps(value), dtype=np.uint8).copy() if mine else None
        length = np.array([0 if data is None else len(data)], dtype=np.int64)
        self.broadcast_bytes(length.view(np.uint8), root, f"length of the {name}")
        if data is None:
            data = np.empty(int(length[0]), dtype=np.uint8)
        self.broadcast_bytes(data, root, name)
        return value if mine else cloudpickle.loads(data.tobytes())

    def broadcast_bytes(self, buffer: Bytes, root: int, name: str) -> None:
        received = self._run(lambda: mpi_ops.broadcast(tf.constant(buffer), root), f"{name} from worker {root}")
        if self.rank() != root:
            np.copyto(buffer, received)

    def total(self, array: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
        """The sum over all workers of an array of one dimension, of numbers that Horovod can add. Blocks."""
        summed: np.ndarray[Any, Any] = self._run(lambda: self._totals(tf.constant(array)), name)
        return summed

    def any_async(self, flags: int) -> Question:
        question = Question(flags, self._ask)
        if self.riding:
            self._waiting = question
        else:
            question.ask()
        return question

    def taken_along(self) -> Question | None:
        """The question that is to be part of the step that begins, if there is one. It is given away once."""
        question, self._waiting = self._waiting, None
        return question

    def _ask(self, fields: int) -> Flight:
        # Eight bytes, the size of Horovod's own control words: after a failure a worker can receive one for the other,
        # and Gloo ends a process that receives more than it waits for. See ``installation.stops_after_failure``.
        self._waiting = None
        return self._flight(lambda: self._sum(tf.constant([fields], dtype=tf.int64)).numpy())

    def _allgather(self, array: np.ndarray[Any, Any], what: str) -> np.ndarray[Any, Any]:
        gathered: np.ndarray[Any, Any] = self._run(lambda: mpi_ops.allgather(tf.constant(array)), what)
        return gathered

    def _run(self, operation: Callable[[], Any], what: str) -> Any:
        """Run an operation and wait for its result, as an array.

        Raises:
            RecoveryTimeoutError: nothing after ``timeout_s``.
        """
        flight = self._flight(lambda: operation().numpy())
        if not flight.wait(time.monotonic() + self._timeout_s):
            raise RecoveryTimeoutError(
                f"waited {self._timeout_s:.0f} s for {what}: a worker of the group is alive but does not take part. "
                "Does every worker run the same script, with no collective between hvd.init() and the training "
                "function? If one is only slow, raise HOROVOD_FT_TIMEOUT"
            )
        return flight.result()

    def _flight(self, operation: Callable[[], Any]) -> Flight:
        return Flight(lambda: _on_host(operation), self.stopped)


def _on_host(operation: Callable[[], Any]) -> Any:
    with tf.device(HOST):
        return operation()


def _sum_of_fields(fields: tf.Tensor) -> tf.Tensor:
    return HorovodOperations().allreduce(fields, NAME, mpi_ops.Sum, 1.0, 1.0)


def _total(array: tf.Tensor) -> tf.Tensor:
    return HorovodOperations().allreduce(array, "horovod_ft.total", mpi_ops.Sum, 1.0, 1.0)
