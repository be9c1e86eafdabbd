"""The models of the benchmarks of Keras: stacks of dense layers, of the shapes that those of PyTorch have."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras

CLASSES = 10


class Shape(NamedTuple):
    """A stack of ``depth`` layers of ``width`` x ``width``, and how many samples a worker takes a step."""

    width: int
    depth: int
    batch: int
    inputs: int | None = None


#: By parameters, as in ``models``, which imports PyTorch.
SHAPES = {"1.3M": Shape(256, 20, 256), "25M": Shape(1024, 24, 32)}


def layers_of(shape: Shape) -> list[Any]:
    """2 * depth + 2 variables."""
    stack = [keras.layers.Dense(shape.width, activation="relu") for _ in range(shape.depth)]
    return [keras.Input((shape.inputs or shape.width,)), *stack, keras.layers.Dense(CLASSES)]
