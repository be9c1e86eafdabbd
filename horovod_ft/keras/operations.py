"""Horovod's operations as a step's graph has them: named, and run each time the graph is run.

TensorFlow takes Horovod's operations for functions of their inputs. So it computes one whose inputs are constants once,
while it optimizes the graph, and never again: then a worker that joins waits for others that do not come. Here no
input is known before the graph runs. Nothing is copied for it.
"""

from __future__ import annotations

from typing import Any, Protocol

import tensorflow as tf
from horovod.tensorflow import mpi_ops

#: Horovod sees no scopes. Outside of them TensorFlow gives the second of two equal names in one graph another one.
ROOT = ""


class Operations(Protocol):
    """What a reduction needs of the group. Tensors in and out, in eager mode and in a graph."""

    def allreduce(self, tensor: tf.Tensor, name: str, op: Any, prescale: float, postscale: float) -> tf.Tensor:
        """The reduced tensor, in memory of its own."""

    def allgather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """The tensors of all workers, one after the other along the first dimension, by rank."""

    def size(self) -> tf.Tensor:
        """Workers of the group that stands when the graph runs: an int32 scalar."""


class HorovodOperations:
    """Operations of the global group of ``horovod.tensorflow``."""

    def allreduce(self, tensor: tf.Tensor, name: str, op: Any, prescale: float, postscale: float) -> tf.Tensor:
        shaped = self._at_run_time(tensor)
        with tf.name_scope(ROOT):
            reduced = mpi_ops._allreduce(
                shaped,
                name=f"HorovodAllreduce.{name}",
                op=op,
                prescale_factor=prescale,
                postscale_factor=postscale,
                ignore_name_scope=True,
            )
        return self._shaped_as(tensor, reduced)

    def allgather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        shaped = self._at_run_time(tensor)
        with tf.name_scope(ROOT):
            gathered = mpi_ops.allgather(shaped, name=f"HorovodAllgather.{name}", ignore_name_scope=True)
        return tf.ensure_shape(gathered, [None, *tensor.shape[1:]])

    def broadcast(self, tensor: tf.Tensor, root: int, name: str) -> tf.Tensor:
        """The tensor of worker ``root``."""
        shaped = self._at_run_time(tensor)
        with tf.name_scope(ROOT):
            received = mpi_ops.broadcast(shaped, root, name=f"HorovodBroadcast.{name}", ignore_name_scope=True)
        return self._shaped_as(tensor, received)

    def size(self) -> tf.Tensor:
        return mpi_ops.size_op(process_set_id=0)

    def _at_run_time(self, tensor: tf.Tensor) -> tf.Tensor:
        """The whole tensor, by a slice of which TensorFlow does not know where it begins. A scalar is a vector then."""
        if tensor.shape.rank == 0:
            tensor = tf.reshape(tensor, [1])
        rank = tensor.shape.rank
        return tf.slice(tensor, tf.fill([rank], tf.minimum(self.size(), 0)), [-1] * rank)

    def _shaped_as(self, tensor: tf.Tensor, result: tf.Tensor) -> tf.Tensor:
        return tf.reshape(result, []) if tensor.shape.rank == 0 else tf.ensure_shape(result, tensor.shape)
