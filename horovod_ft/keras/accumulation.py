"""Gradients summed up locally over several backward passes, in variables: in eager mode and in the graph of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


class Accumulation:
    """The sums of one optimizer. They are no variables of the optimizer, so that a saved model does not hold them.

    Args:
        passes: gradients are summed over so many; at least 2.
        average: divide the sums by ``passes``.
    """

    def __init__(self, passes: int, *, average: bool) -> None:
        self.passes = passes
        self._average = average
        self._used: set[int] = set()
        self.count: Any = None
        self.sums: list[Any] = []

    @property
    def factor(self) -> float:
        """What the sums are multiplied by in the end."""
        return 1.0 / self.passes if self._average else 1.0

    def build(self, variables: Sequence[Any]) -> None:
        """Make the sums, of the shapes and dtypes of these variables. The second time it does nothing."""
        if self.count is None:
            with tf.init_scope():
                self.count = tf.Variable(0, trainable=False, dtype=tf.int64, name="passes")
                self.sums = [tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False, name="sum") for v in variables]

    def add(self, gradients: Sequence[Any], places: Sequence[int], update: Callable[[list[Any]], None]) -> None:
        """Add a pass. After the last one ``update`` gets the sums, dense, and they begin anew.

        A variable that had no gradient in any pass has None for a sum.

        Args:
            places: of the gradients' variables among those of ``build``.
        """
        for gradient, place in zip(gradients, places, strict=True):
            if gradient is not None:
                self._used.add(place)
                self.sums[place].assign_add(tf.cast(tf.convert_to_tensor(gradient), self.sums[place].dtype))
        used = [place in self._used for place in places]
        tf.cond(
            self.count.assign_add(1) >= self.passes,
            lambda: self._hand_over(used, places, update),
            lambda: False,
        )

    def _hand_over(self, used: Sequence[bool], places: Sequence[int], update: Callable[[list[Any]], None]) -> bool:
        update(
            [
                self.sums[p] * tf.cast(self.factor, self.sums[p].dtype) if u else None
                for p, u in zip(places, used, strict=True)
            ]
        )
        self.discard()
        return True

    def discard(self) -> None:
        """Forget the passes since the last update."""
        self.count.assign(0)
        for total in self.sums:
            total.assign(tf.zeros_like(total))

    def forget(self) -> None:
        """The same before there is anything to forget."""
        if self.count is not None:
            self.discard()
