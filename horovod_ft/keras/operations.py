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
        hidden = self._hidden(tensor)
        with tf.name_scope(ROOT):
            reduced = mpi_ops._allreduce(
                hidden,
                name=f"HorovodAllreduce.{name}",
                op=op,
                prescale_factor=prescale,
                postscale_factor=postscale,
                ignore_name_scope=True,
            )
        return _shaped_as(tensor, reduced)

    def allgather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        rank = tensor.shape.rank
        rows = tf.slice(tensor, tf.fill([rank], self._zero()), [-1] * rank)
        with tf.name_scope(ROOT):
            gathered = mpi_ops.allgather(rows, name=f"HorovodAllgather.{name}", ignore_name_scope=True)
        return tf.ensure_shape(gathered, [None, *tensor.shape[1:]])

    def broadcast(self, tensor: tf.Tensor, root: int, name: str) -> tf.Tensor:
        """The tensor of worker ``root``."""
        hidden = self._hidden(tensor)
        with tf.name_scope(ROOT):
            received = mpi_ops.broadcast(hidden, root, name=f"HorovodBroadcast.{name}", ignore_name_scope=True)
        return _shaped_as(tensor, received)

    def size(self) -> tf.Tensor:
        return mpi_ops.size_op(process_set_id=0)

    def _hidden(self, tensor: tf.Tensor) -> tf.Tensor:
        """The same numbers in a shape that is known when the graph runs: end to end, a vector as a column.

        The number of dimensions is always another one: TensorFlow takes out what leaves a shape as it was.
        """
        return tf.reshape(tensor, self._any_length(1 if tensor.shape.rank == 1 else 0))

    def _any_length(self, ones: int) -> tf.Tensor:
        """A shape: -1, and so many ones. Made once in a graph: to make it for each tensor would take long."""
        dimensions = [1] * ones
        if tf.executing_eagerly():
            return tf.constant([-1, *dimensions])
        graph = tf.compat.v1.get_default_graph()
        kept = graph.get_collection_ref(f"horovod_ft.shape.{ones}")  # in a branch: begins with those around it
        if not kept or kept[-1].graph is not graph:
            with tf.control_dependencies(None), tf.device("/CPU:0"):
                kept.append(tf.stack([self._zero() - 1, *dimensions]))
        return kept[-1]

    def _zero(self) -> tf.Tensor:
        """It is computed when the graph runs."""
        return tf.minimum(self.size(), 0)


def _shaped_as(tensor: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    known = tensor.shape.is_fully_defined()
    return tf.reshape(values, tensor.shape if known else tf.shape(tensor))
