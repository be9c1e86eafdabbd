"""One worker of ``policy_accuracy.py``: a small convolutional net on MNIST, one pass or a few over the data.

``python -m benchmarks.workers.accuracy DATA FOLDER SEED EPOCHS SAMPLES`` trains on the first SAMPLES images. Everything
is drawn from the seed. Whoever reaches the end tests the model on all test images and leaves ``survivor-RANK.json`` in
FOLDER: any worker may be killed, the first one too. The policy and the faults come from the environment.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import horovod_ft.torch as hvd
from benchmarks import mnist
from benchmarks.accuracy_runs import GLOBAL_BATCH, steps_of
from benchmarks.workers.models import backward

Batch = tuple[torch.Tensor, torch.Tensor]
MEAN, DEVIATION = 0.1307, 0.3081  # of the training images, as fractions of the brightest
HIGHEST_RATE = 0.1


class Digits(Dataset[Batch]):
    """Images stay bytes until they are asked for: four workers share the machine's memory."""

    def __init__(self, images: mnist.Bytes, labels: mnist.Bytes) -> None:
        self._images = torch.from_numpy(images.copy()).unsqueeze(1)
        self._labels = torch.from_numpy(labels.astype("int64"))

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> Batch:
        return (self._images[indices].float() / 255 - MEAN) / DEVIATION, self._labels[indices]


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.ReLU(),
        nn.Conv2d(16, 32, 5, stride=2, padding=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 49, 64), nn.ReLU(), nn.Linear(64, mnist.CLASSES),
    )  # fmt: skip


@torch.no_grad()
def right_answers(model: nn.Module, test: Digits) -> int:
    count = 0
    for indices in torch.arange(len(test)).split(1000):
        images, labels = test.__getitems__(indices.tolist())
        count += int((model(images).argmax(1) == labels).sum())
    return count


def main(data: str, folder: str, seed: str, epochs: str, samples: str) -> None:
    start_rank = os.environ["HOROVOD_RANK"]
    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(int(seed))
    images, labels = mnist.load(Path(data), mnist.TRAIN)
    train_set = Digits(images[: int(samples)], labels[: int(samples)])
    test_set = Digits(*mnist.load(Path(data), mnist.TEST))
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=HIGHEST_RATE, momentum=0.9), named_parameters=model.named_parameters()
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, HIGHEST_RATE, total_steps=steps_of(int(samples), int(epochs)), cycle_momentum=False
    )
    loader: Any = hvd.elastic.ElasticDataLoader(
        train_set, global_batch_size=GLOBAL_BATCH, shuffle=True, seed=int(seed), collate_fn=lambda batch: batch
    )
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)

    @hvd.elastic.run
    def train(state: Any) -> None:
        for _ in state.loader.epochs(int(epochs)):
            for images, labels in state.loader:
                with state.step():
                    optimizer.zero_grad()
                    backward(F.cross_entropy(model(images), labels))
                    optimizer.step()
                    scheduler.step()

    train(state)
    result = {
        "steps": state.steps, "correct": right_answers(model, test_set), "of": len(test_set), "weights": digest(model)
    }  # fmt: skip
    (Path(folder) / f"survivor-{start_rank}.json").write_text(json.dumps(result))


def digest(model: nn.Module) -> str:
    weights = hashlib.sha256()
    for value in model.state_dict().values():
        weights.update(value.numpy().tobytes())
    return weights.hexdigest()


if __name__ == "__main__":
    main(*sys.argv[1:])
