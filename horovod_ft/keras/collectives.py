"""Horovod's collectives as its Keras module has them, for Keras 3: they take numbers, arrays and Keras's variables too.

The arguments are in the order of ``horovod.tensorflow.keras``; those of ``horovod.tensorflow`` can be given by name. In
eager mode a broken group raises ``HorovodInternalError``.
"""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from horovod_ft.keras.failures import failures


def _tensor(value: Any) -> Any:
    if isinstance(value, tf.IndexedSlices):
        return value
    return tf.convert_to_tensor(value.value if isinstance(value, keras.Variable) else value)


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = hvd.Compression.none,
    **more: Any,
) -> Any:
    """The average over all workers, or what ``op`` says. Blocks in eager mode; see Horovod for the arguments."""
    scales = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    with failures():
        return hvd.allreduce(
            _tensor(value), average=average, op=op, name=name, compression=compression, **scales, **more
        )


def allgather(value: Any, name: str | None = None, **more: Any) -> Any:
    """The values of all workers, one after the other along the first dimension. Blocks in eager mode."""
    with failures():
        return hvd.allgather(_tensor(value), name=name, **more)


def broadcast(value: Any, root_rank: int, name: str | None = None, **more: Any) -> Any:
    """The value of worker ``root_rank``. Blocks in eager mode."""
    with failures():
        return hvd.broadcast(_tensor(value), root_rank, name=name, **more)


def reducescatter(value: Any, name: str | None = None, op: Any = hvd.Average, **more: Any) -> Any:
    """This worker's part of the average over all workers, or of what ``op`` says. Blocks in eager mode."""
    with failures():
        return hvd.reducescatter(_tensor(value), name=name, op=op, **more)
