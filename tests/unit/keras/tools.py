"""Stand-ins for the other workers."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf


class TwoWorkers:
    """Operations of a group of two, of which the other one is made up: it has ``times`` what this one has.

    Attributes:
        asked: names, in order. In a graph they are noted when it is traced.
    """

    def __init__(self, times: float = 3.0) -> None:
        self.times = times
        self.asked: list[str] = []

    def allreduce(self, tensor: Any, name: str, op: Any, prescale: float, postscale: float) -> Any:
        self.asked.append(name)
        before = tf.cast(prescale, tensor.dtype)
        after = tf.cast(postscale / (2 if op == hvd.Average else 1), tensor.dtype)
        return (tensor * before + tensor * tf.cast(self.times, tensor.dtype) * before) * after

    def allgather(self, tensor: Any, name: str) -> Any:
        self.asked.append(name)
        other = tensor if tensor.dtype.is_integer else tensor * tf.cast(self.times, tensor.dtype)
        return tf.concat([tensor, other], axis=0)

    def size(self) -> Any:
        return tf.constant(2)


class Broken(TwoWorkers):
    """A group that breaks in the second reduction."""

    def allreduce(self, tensor: Any, name: str, op: Any, prescale: float, postscale: float) -> Any:
        reduced = super().allreduce(tensor, name, op, prescale, postscale)
        if len(self.asked) < 2:
            return reduced
        return tf.py_function(_break, [reduced], reduced.dtype, name="HorovodAllreduce.broken")


def _break(_: Any) -> Any:
    raise RuntimeError("Horovod has been shut down. This was caused by an exception on one of the ranks")
