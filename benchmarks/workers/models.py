"""The models of the benchmarks, and one training step with them.

Deep stacks of linear layers: they have as many tensors as real networks of their size, and cost per tensor shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

CLASSES = 10


class Shape(NamedTuple):
    """A stack of ``depth`` layers of ``width`` x ``width``, and how many samples a worker takes a step."""

    width: int
    depth: int
    batch: int


#: By parameters. With these batches the forward and backward pass dominate a step.
SHAPES = {"1.3M": Shape(256, 20, 256), "25M": Shape(1024, 24, 32)}


def make_model(inputs: int, shape: Shape) -> nn.Module:
    """The same parameters on every worker; 2 * depth + 2 tensors."""
    torch.manual_seed(1)
    widths = [inputs, *[shape.width] * shape.depth]
    layers = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(shape.width, CLASSES))


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


class Training:
    """A model, its distributed optimizer, and batches that were made before: reading data costs nothing.

    Args:
        distributed: ``DistributedOptimizer`` of Horovod or of horovod_ft.
        prefix: of the names under which gradients are reduced; two trainings in one job need different ones.
    """

    def __init__(self, distributed: Callable[..., Any], shape: Shape, prefix: str, seed: int) -> None:
        self.model = make_model(shape.width, shape)
        named = [(f"{prefix}.{name}", parameter) for name, parameter in self.model.named_parameters()]
        self.optimizer = distributed(momentum(self.model), named_parameters=named)
        generator = torch.Generator().manual_seed(seed)
        self._batches = itertools.cycle([_batch(shape, generator) for _ in range(4)])

    def step(self) -> None:
        """Forward, backward, update."""
        inputs, labels = next(self._batches)
        self.optimizer.zero_grad()
        backward(F.cross_entropy(self.model(inputs), labels))
        self.optimizer.step()


def backward(loss: Any) -> None:
    """``loss.backward()``; torch declares no types for it."""
    loss.backward()


def _batch(shape: Shape, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(shape.batch, shape.width, generator=generator)
    return inputs, torch.randint(CLASSES, (shape.batch,), generator=generator)
