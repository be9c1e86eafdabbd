"""One worker of ``recovery_gap.py``: handwritten digits, a 1.3 M parameter network, and a SIGKILL in a backward pass.

``python -m benchmarks.workers.recovery stock|ours FOLDER KILL_RANK KILL_STEP`` writes a line (CLOCK_MONOTONIC, step,
size) for each completed step. Both sides train the same model on the same data as the documentation of each shows it;
stock Horovod commits in every step, which is the least that it can lose.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.workers.completed import Dies, Steps, take_part
from benchmarks.workers.models import Shape, backward, make_model

EPOCHS, WORKERS, BATCH = 2, 4, 16
SHAPE = Shape(128, 6, BATCH)


def digits() -> TensorDataset:
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))


def die_in_backward(model: Any, now: Callable[[], bool]) -> None:
    """SIGKILL when the last gradient of a backward pass is computed: all others are being reduced then."""

    def hook(_: torch.Tensor) -> None:
        if now():
            os.kill(os.getpid(), signal.SIGKILL)

    model[0].weight.register_hook(hook)


def stock(steps: Steps, dies: Dies) -> None:
    import horovod.torch as hvd  # noqa: PLC0415  each side imports what its users import

    hvd.init()
    data, model = digits(), make_model(64, SHAPE)
    sampler = hvd.elastic.ElasticSampler(data, shuffle=True, seed=1)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), named_parameters=model.named_parameters()
    )
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, batch=0)
    die_in_backward(model, lambda: dies(state.batch, hvd.size()))

    def train(state: Any) -> None:
        for epoch in range(state.epoch, EPOCHS):
            for index, (images, labels) in enumerate(loader):
                optimizer.zero_grad()
                backward(F.cross_entropy(model(images), labels))
                optimizer.step()
                sampler.record_batch(index, BATCH)
                state.batch += 1
                state.commit()
                steps.completed(state.batch, hvd.size())
            state.epoch = epoch + 1
            sampler.set_epoch(state.epoch)
            state.commit()

    hvd.elastic.run(train)(state)


def ours(steps: Steps, dies: Dies) -> None:
    import horovod_ft.torch as hvd  # noqa: PLC0415

    hvd.init()
    data, model = digits(), make_model(64, SHAPE)
    loader: Any = hvd.elastic.ElasticDataLoader(data, global_batch_size=WORKERS * BATCH, shuffle=True, seed=1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), named_parameters=model.named_parameters()
    )
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader)
    die_in_backward(model, lambda: dies(state.steps, hvd.size()))

    @hvd.elastic.run
    def train(state: Any) -> None:
        for _ in state.loader.epochs(EPOCHS):
            for images, labels in state.loader:
                before = state.steps, hvd.size()
                with state.step():
                    optimizer.zero_grad()
                    backward(F.cross_entropy(model(images), labels))
                    optimizer.step()
                if (state.steps, hvd.size()) == (before[0] + 1, before[1]):  # completed here, by no recovery
                    steps.completed(state.steps, hvd.size())

    train(state)


if __name__ == "__main__":
    take_part({"stock": stock, "ours": ours}, WORKERS, *sys.argv[1:])
