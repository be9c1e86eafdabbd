"""Where reduced gradients lie when they have arrived one by one: in variables, which outlive a graph that fails.

Each has a mark beside it that says in which step it has arrived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable


class Place:
    """Room for one tensor, dense or as rows of a sparse one.

    Attributes:
        kind: see ``kind_of``.
        sparse: it has rows of a sparse tensor.
        lossy: what has arrived lacks somebody's share.
    """

    def __init__(self, like: Any) -> None:
        self.kind = kind_of(like)
        self.sparse = self._rows = isinstance(like, tf.IndexedSlices)
        self.lossy = False
        parts = (like.values, like.indices) if self._rows else (like,)
        self._dense_shape = like.dense_shape if self._rows else None
        self._parts = [_variable(part, any_length=self._rows) for part in parts]
        self._mark = ResourceVariable(0, trainable=False, dtype=tf.int64)

    def keep(self, value: Any, step: tf.Tensor) -> None:
        parts = (value.values, value.indices) if self._rows else (value,)
        stored = [variable.assign(part) for variable, part in zip(self._parts, parts, strict=True)]
        with tf.control_dependencies([tf.convert_to_tensor(one) for one in stored]):
            self._mark.assign(step)

    def has(self, step: int) -> bool:
        return int(self._mark) == step

    def empty(self) -> None:
        """Nothing has arrived in any step."""
        self._mark.assign(0)

    def value(self) -> Any:
        parts = [tf.convert_to_tensor(variable) for variable in self._parts]
        return tf.IndexedSlices(*parts, self._dense_shape) if self._rows else parts[0]

    def zeros(self) -> Any:
        """What a gradient is that changes nothing."""
        if self.sparse:
            values, indices = self._parts
            return self.slices(
                np.zeros((0, *values.shape[1:]), values.dtype.as_numpy_dtype), np.zeros(0, indices.dtype.as_numpy_dtype)
            )
        return tf.zeros(*self.kind[:2])

    @property
    def elements(self) -> int:
        """How many numbers the dense tensor has."""
        return int(np.prod(self.kind[0], dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Of the dense tensor."""
        return self.elements * int(self.kind[1].size)

    def tensor(self, data: Any) -> tf.Tensor:
        """A dense tensor for this place, from its bytes in row-major order."""
        return tf.constant(data.view(self.kind[1].as_numpy_dtype).reshape(self.kind[0]))

    def slices(self, values: Any, indices: Any) -> tf.IndexedSlices:
        """Rows for this place."""
        return tf.IndexedSlices(tf.constant(values), tf.constant(indices), self._dense_shape)


def kind_of(value: Any) -> tuple[Any, ...]:
    """Two tensors of equal kind fit into the same place."""
    shape = tf.get_static_value(value.dense_shape) if isinstance(value, tf.IndexedSlices) else value.shape
    return tuple(int(length) for length in shape), value.dtype, isinstance(value, tf.IndexedSlices)


def _variable(part: Any, *, any_length: bool) -> Any:
    shape = tf.TensorShape([None, *part.shape[1:]]) if any_length else part.shape
    with tf.init_scope():
        initial = tf.zeros([0, *part.shape[1:]] if any_length else part.shape, part.dtype)
        return ResourceVariable(initial, trainable=False, shape=shape, validate_shape=not any_length)


class Arrivals:
    """The reductions of one step: gradients, then metrics.

    Attributes:
        gradients: places of those of this step, in order.
        metrics: the places of metrics, by dtype.
    """

    def __init__(self) -> None:
        self.gradients: list[Place] = []
        self.metrics: dict[str, Place] = {}
        self._known: list[Place] = []
        self._step = 0
        with tf.init_scope(), tf.device("/CPU:0"):
            self._present = ResourceVariable(0, trainable=False, dtype=tf.int64)

    def begin(self, gradients: Sequence[Any], deltas: Mapping[str, Any]) -> None:
        """A step begins, in which these are reduced: nothing of it has arrived."""
        if gradients and [kind_of(gradient) for gradient in gradients] != [place.kind for place in self._known]:
            self._known = [Place(gradient) for gradient in gradients]
        if {dtype: kind_of(delta) for dtype, delta in deltas.items()} != {d: p.kind for d, p in self.metrics.items()}:
            self.metrics = {dtype: Place(delta) for dtype, delta in deltas.items()}
        self.gradients = self._known if gradients else []
        for place in self.places:
            place.lossy = False
        self._step += 1
        self._present.assign(self._step)

    def keep(self, gradients: Sequence[Any], sums: Mapping[str, Any]) -> tf.Tensor:
        """In the graph: put each away as soon as it has arrived."""
        step = tf.convert_to_tensor(self._present)
        for place, value in zip(self.places, (*gradients, *sums.values()), strict=True):
            place.keep(value, step)
        return step

    @property
    def places(self) -> list[Place]:
        return [*self.gradients, *self.metrics.values()]

    def done(self) -> tuple[bool, ...]:
        """For each of ``places``, whether it has arrived in this step."""
        return tuple(place.has(self._step) for place in self.places)

    def lose(self, after: int) -> None:
        """Let nothing have arrived in this step but so many of the first."""
        for place in self.places[after:]:
            place.empty()

    def put(self, place: Place, value: Any) -> None:
        """It has arrived in another way."""
        place.keep(value, tf.constant(self._step, tf.int64))

    def values(self) -> tuple[list[Any], dict[str, Any]]:
        """Gradients and sums of metrics, all of which have arrived."""
        return (
            [place.value() for place in self.gradients],
            {dtype: place.value() for dtype, place in self.metrics.items()},
        )
