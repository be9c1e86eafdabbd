"""Train a small convolutional net on scikit-learn's handwritten digits, and go on when workers die or join.

This is the script that scripts/demo runs, and an example to copy from: an ordinary PyTorch training, plus the lines
with ``hvd``. By hand:

    horovodrun -np 4 --min-np 1 --host-discovery-script ./hosts.sh python scripts/train_digits.py
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import TensorDataset

import horovod_ft.torch as hvd


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,437 images to train on and 360 to test with: 1 x 8 x 8 floats in 0..1, and the digit."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    parts = train_test_split(images, torch.tensor(labels), test_size=360, random_state=0, stratify=labels)
    return TensorDataset(parts[0], parts[2]), TensorDataset(parts[1], parts[3])


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1), nn.ReLU(),
        nn.Conv2d(24, 48, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(48 * 16, 96), nn.ReLU(), nn.Linear(96, 10),
    )  # fmt: skip


@torch.no_grad()
def accuracy(model: nn.Module, test: TensorDataset) -> float:
    images, labels = test.tensors
    return (model(images).argmax(1) == labels).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--result", type=Path, help="folder for a JSON file a worker about the end of the training")
    arguments = parser.parse_args()

    hvd.init()
    torch.manual_seed(arguments.seed)
    train_set, test_set = digits()
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), named_parameters=model.named_parameters()
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=arguments.epochs * 23)
    loader: Any = hvd.elastic.ElasticDataLoader(train_set, global_batch_size=64, shuffle=True, seed=arguments.seed)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)

    @hvd.elastic.run
    def train(state: Any) -> float:
        for epoch in state.loader.epochs(arguments.epochs):
            loss = torch.tensor(0.0)
            for images, labels in state.loader:
                with state.step():
                    optimizer.zero_grad()
                    loss = F.cross_entropy(model(images), labels)
                    loss.backward()
                    optimizer.step()
                    scheduler.step()
            if hvd.rank() == 0:
                test = accuracy(model, test_set)
                print(f"epoch {epoch + 1:2d}  step {state.steps:4d}  workers {hvd.size()}  loss {loss.item():.3f}  "
                      f"test accuracy {test:.1%}", flush=True)  # fmt: skip
        return accuracy(model, test_set)

    final = train(state)
    if arguments.result is not None:
        leave_result(arguments.result, state, final)


def leave_result(folder: Path, state: Any, test_accuracy: float) -> None:
    """What scripts/demo compares between the workers."""
    weights = hashlib.sha256()
    for value in state.model.state_dict().values():
        weights.update(value.numpy().tobytes())
    for parameter in state.model.parameters():
        weights.update(state.optimizer.state[parameter]["momentum_buffer"].numpy().tobytes())
    folder.mkdir(parents=True, exist_ok=True)
    result = {"rank": hvd.rank(), "steps": state.steps, "weights": weights.hexdigest(), "test_accuracy": test_accuracy}
    (folder / f"worker-{os.getpid()}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
