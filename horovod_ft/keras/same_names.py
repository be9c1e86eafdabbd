"""A check that all workers reduce the same gradients: where one has none, the others would wait for it forever.

A layer that is frozen or unused on one worker only has no gradient there. Workers compile their steps at different
times, so they cannot compare names then: one that joins would ask those who have nothing to compile. All of them run
their first step in a group together, though, whether they have compiled it before or not.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from horovod_ft.keras.operations import Operations

#: So many that a sum of squares over 2**15 workers is a whole number of 64 bits.
BITS = 23


@functools.cache
def formations() -> Any:
    """How often this process has joined a group: a variable, for graphs. One for all, as Horovod's group is."""
    with tf.init_scope(), tf.device("/CPU:0"):
        return ResourceVariable(0, trainable=False, dtype=tf.int64, name="formations")


class SameNames:
    """Compares, in the first reduction after each forming of the group. It costs one small collective then.

    A worker that reduces nothing at all takes no part in it, and the others wait.

    Args:
        operations: of the group.
        formed: how often the group has been formed, in a variable; as long as that is 0, nothing is compared.
    """

    def __init__(self, operations: Operations, formed: Any) -> None:
        self._operations = operations
        self._formed = formed
        with tf.init_scope(), tf.device("/CPU:0"):
            self._compared = ResourceVariable(0, trainable=False, dtype=tf.int64, name="compared")

    @contextmanager
    def checked(self, names: Sequence[str], prefix: str) -> Iterator[None]:
        """What is made inside, in a graph, runs after the check.

        When the graph runs it raises ``InvalidArgumentError``, on all workers, if their names differ.

        Args:
            names: of what is reduced, with what kind each is, in order.
            prefix: comes before the name of the operation.
        """
        formed = tf.convert_to_tensor(self._formed)
        done = tf.logical_or(tf.equal(formed, 0), tf.equal(formed, tf.convert_to_tensor(self._compared)))
        with tf.control_dependencies([tf.cond(done, lambda: formed, lambda: self._compare(names, prefix, formed))]):
            yield

    def _compare(self, names: Sequence[str], prefix: str, formed: Any) -> Any:
        number = number_of(names)
        mine = tf.constant([number, number * number], tf.int64)
        total = self._operations.allreduce(mine, f"{prefix}.names", hvd.Sum, 1.0, 1.0)
        # A sum and a sum of squares are both what they would be of equal numbers only if all are equal.
        equal = tf.reduce_all(tf.equal(total, mine * tf.cast(self._operations.size(), tf.int64)))
        said = (
            "the workers have gradients for different variables, so that they would wait for each other forever. Do "
            "all of them run the same model, with the same layers trainable and in use? "
            f"Of gradients this one has {len(names)}: {', '.join(names)}"
        )
        with tf.control_dependencies([tf.debugging.Assert(equal, [said], summarize=1)]):
            return self._compared.assign(formed, read_value=True)


def number_of(names: Sequence[str]) -> int:
    """The same number for the same names in the same order; else another one, but for one case in eight million."""
    return zlib.crc32("\n".join(names).encode()) & (1 << BITS) - 1
