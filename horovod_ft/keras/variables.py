"""Broadcast of variables, Keras's own and TensorFlow's: Horovod's function knows the latter only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from horovod_ft.keras.arguments import check_process_set
from horovod_ft.keras.failures import failures
from horovod_ft.keras.names import names_of
from horovod_ft.keras.operations import HorovodOperations

#: What Horovod can broadcast; all else goes as bytes.
KNOWN = frozenset(
    {tf.uint8, tf.int8, tf.uint16, tf.int16, tf.int32, tf.int64, tf.float16, tf.float32, tf.float64, tf.bool}
)


def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: Any = hvd.global_process_set, inplace: bool = False
) -> None:
    """Give variables the values that they have on one worker. All workers call it with the same variables. Blocks.

    No variable is written before all values have arrived.

    Args:
        variables: of Keras or of TensorFlow.
        root_rank: the worker whose values count.
        process_set: the global one.
        inplace: of no effect.

    Raises:
        HorovodInternalError: the group broke; no variable was touched.
        ConfigurationError: another process set.
    """
    check_process_set(process_set)
    known = list(variables)
    if not known:
        return
    plain = [variable.value if isinstance(variable, keras.Variable) else variable for variable in known]
    names = names_of(known)
    operations = HorovodOperations()

    def receive(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return [
            _received(operations, value, root_rank, f"variable.{name}")
            for value, name in zip(values, names, strict=True)
        ]

    with failures():
        received = tf.function(receive, autograph=False)([tf.convert_to_tensor(variable) for variable in plain])
    for variable, value in zip(plain, received, strict=True):
        variable.assign(value)


def _received(operations: HorovodOperations, value: tf.Tensor, root: int, name: str) -> tf.Tensor:
    if value.dtype in KNOWN:
        return operations.broadcast(value, root, name)
    return tf.bitcast(operations.broadcast(tf.bitcast(value, tf.uint8), root, name), value.dtype)
