"""Two models, two optimizers, two updates a step, the second from the first one's new weights: as a GAN is trained.

``python -m tests.jobs.two_models FOLDER`` is one worker of a job. Without Horovod it is the same training in one
process, in which some samples do not count in some gradients.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from horovod_ft.data import EpochOrder

SAMPLES, BATCH, EPOCHS = 60, 12, 2
#: Gradients of the first.
FIRST = 2


def build() -> tuple[nn.Module, nn.Module, list[torch.optim.Optimizer]]:
    torch.manual_seed(3)
    first = nn.Linear(6, 4).double()
    second = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    return first, second, [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (first, second)]


def dataset() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(inputs, (inputs[:, 0] > 0).long())


def losses(first: nn.Module, second: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Iterable[torch.Tensor]:
    """One after the other; what is done between them counts in the second."""
    yield F.cross_entropy(first(x), y + 1)
    yield F.cross_entropy(second(first(x).detach()), y)


def arrays(first: nn.Module, second: nn.Module) -> dict[str, np.ndarray[Any, Any]]:
    both = {"first": first, "second": second}
    return {f"{name}.{key}": value.numpy() for name, model in both.items() for key, value in model.state_dict().items()}


def reference(counted: Mapping[int, Mapping[str, Sequence[int]]]) -> dict[str, np.ndarray[Any, Any]]:
    """The final parameters.

    Args:
        counted: step -> name of a parameter -> ids of the samples that count in its gradient, if not all do.
    """
    first, second, optimizers = build()
    data, order, step = dataset(), EpochOrder(SAMPLES, shuffle=True, seed=5), 0
    for epoch in range(EPOCHS):
        for start in range(0, SAMPLES, BATCH):
            step += 1
            whole = [int(sample) for sample in order(epoch)[start : start + BATCH]]
            for which, (prefix, model) in enumerate((("opt_first", first), ("opt_second", second))):
                gradients = {}
                for name, parameter in model.named_parameters():
                    ids = counted.get(step, {}).get(f"{prefix}.{name}", whole)
                    loss = list(losses(first, second, *data[torch.tensor(ids)]))[which]
                    (gradients[name],) = torch.autograd.grad(loss, [parameter])
                for name, parameter in model.named_parameters():
                    parameter.grad = gradients[name]
                optimizers[which].step()
    return arrays(first, second)


def main(folder: Path) -> None:
    import horovod_ft.torch as hvd  # noqa: PLC0415  the tests import the rest without it

    hvd.init()
    first, second, plain = build()
    optimizers = [
        hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        for optimizer, model in zip(plain, (first, second), strict=True)
    ]
    loader: Any = hvd.elastic.ElasticDataLoader(dataset(), None, True, global_batch_size=BATCH, seed=5)
    state = hvd.elastic.TorchState(
        first=first, second=second, opt_first=optimizers[0], opt_second=optimizers[1], loader=loader
    )

    @hvd.elastic.run
    def train(state: Any) -> None:
        for _epoch in state.loader.epochs(EPOCHS):
            for x, y in state.loader:
                with state.step():
                    for optimizer, loss in zip(optimizers, losses(first, second, x, y), strict=True):
                        optimizer.zero_grad()
                        loss.backward()
                        optimizer.step()

    train(state)
    result: Any = arrays(first, second)
    np.savez(folder / f"two-{os.environ['HOROVOD_RANK']}-{os.getpid()}.npz", **result)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
