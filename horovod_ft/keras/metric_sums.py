"""Metrics over all workers: what a step adds to the variables of a model's metrics is summed up over the group.

Metrics of Keras hold sums, of values and of counts, so that sums over workers are those of one process that has seen
all samples. Nothing is known of metrics that do not add up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

Array = np.ndarray[Any, Any]
#: What a step has added, by the name of the dtype: all variables of that dtype end to end.
Deltas = Mapping[str, Any]


class MetricSums:
    """The variables of some metrics.

    Args:
        variables: asked for anew each time; the same ones in the same order on all workers.
    """

    def __init__(self, variables: Callable[[], Sequence[Any]]) -> None:
        self.variables = variables
        self._set = True  # what the variable holds: to read that takes time in each step
        with tf.init_scope(), tf.device("/CPU:0"):
            self._counts = ResourceVariable(True, trainable=False, dtype=tf.bool, name="counts")

    def set_counts(self, counts: bool) -> None:
        """Whether this worker's share counts from now on; not if it computes on a borrowed sample."""
        if self._set != counts:
            self._set = counts
            self._counts.assign(counts)

    def set_aside(self) -> list[tf.Tensor]:
        """The values before a step; the variables are zero after that, and have what the step adds when it ends."""
        before = [tf.identity(variable) for variable in self.variables()]
        for variable in self.variables():
            variable.assign(tf.zeros_like(variable))
        return before

    def deltas(self) -> dict[str, tf.Tensor]:
        """What the step has added."""
        flat: dict[str, list[tf.Tensor]] = defaultdict(list)
        for variable in self.variables():
            value = tf.reshape(tf.convert_to_tensor(variable), [-1])
            flat[value.dtype.name].append(value)
        counts = tf.convert_to_tensor(self._counts)
        whole = {dtype: tf.concat(values, 0) for dtype, values in flat.items()}
        return {dtype: tf.where(counts, value, tf.zeros_like(value)) for dtype, value in whole.items()}

    def merge(self, before: Sequence[tf.Tensor], sums: Deltas) -> None:
        """Let the variables be what they were, and what all workers have added."""
        begins: dict[str, int] = defaultdict(int)
        for variable, value in zip(self.variables(), before, strict=True):
            dtype, length = value.dtype.name, int(value.shape.num_elements())
            begin = begins[dtype]
            begins[dtype] += length
            variable.assign(value + tf.reshape(sums[dtype][begin : begin + length], value.shape))


def totals(values: Sequence[Array], total: Callable[[Array, str], Array]) -> list[Array]:
    """The sums over all workers of values of metrics' variables. Blocks.

    Args:
        values: the same shapes and dtypes in the same order on all workers.
        total: adds up an array of one dimension, see ``binding``.
    """
    places: dict[Any, list[int]] = defaultdict(list)
    for index, value in enumerate(values):
        places[value.dtype].append(index)
    summed: dict[int, Array] = {}
    for dtype, indices in places.items():
        flat = total(np.concatenate([values[index].reshape(-1) for index in indices]), f"metrics of {dtype}")
        ends = np.cumsum([values[index].size for index in indices]).tolist()
        parts = np.split(flat, ends[:-1])
        summed |= {index: part.reshape(values[index].shape) for index, part in zip(indices, parts, strict=True)}
    return [summed[index] for index in range(len(values))]
