"""What the job tests train, and the same training in one plain process for comparison. No Horovod.

Double precision, so that "equal up to rounding" is strict.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from horovod_ft.data import EpochOrder

#: Steps after which the gradient scaler doubles its scale.
GROWTH_INTERVAL = 3


@dataclass(frozen=True)
class Config:
    """What is trained, and how.

    Attributes:
        folder: where each worker leaves its result.
        restore_at: in this step of generation ``restore_in`` the training is spoilt and restored: by start rank 1 after
            an error in the body (``restore_by="one"``), by all after it (``all``), or by start rank 1 in the body
            (``inside``).
        own_policy: in place of ``policy``, one of those in ``training.OWN_POLICIES``.
        checkpoint: where durable checkpoints are saved, after each ``every`` steps.
        settle_through: after each step up to this one all workers wait until the checkpoint that is being saved is
            whole.
        linger: in the first attempt this worker (start rank) waits after this step, for its death.
    """

    folder: str
    model: str = "mlp"
    optimizer: str = "momentum"
    samples: int = 100
    global_batch: int | None = 12
    batch: int | None = None
    epochs: int = 2
    num_workers: int = 0
    passes: int = 1
    groups: int = 0
    fp16: bool = False
    metric: bool = False
    hold_before: int | None = None
    policy: str | None = None
    swallow: bool = False
    scaler: bool = False
    disagree_at: int | None = None
    commit_every: int = 0
    kill_before_batch: int | None = None
    lr_rule: str | None = None
    guard_every: int | None = None
    copy_every: int | None = None
    restore_at: int | None = None
    restore_by: str = "one"
    restore_in: int = 0
    own_policy: str | None = None
    checkpoint: str | None = None
    every: int | None = None
    end_on_error: bool = False
    settle_through: int = 0
    linger: tuple[int, int] | None = None

    def write(self) -> str:
        path = Path(self.folder) / "config.json"
        path.write_text(json.dumps(dataclasses.asdict(self)))
        return str(path)

    @classmethod
    def read(cls, path: str) -> Config:
        return cls(**json.loads(Path(path).read_text()))


def dataset(config: Config) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(config.samples, 6, generator=generator, dtype=torch.float64)
    labels = (inputs[:, 0] * inputs[:, 1] > 0).long()
    return torch.utils.data.TensorDataset(inputs, labels)


class Embedding(nn.Module):
    """Sparse gradients: a vector for each of eight kinds of input, told by the signs of three numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.Embedding(8, 16, sparse=True)
        self.last = nn.Linear(16, 2)

    def forward(self, inputs: torch.Tensor) -> Any:
        kinds = (inputs[:, :3] > 0).long() @ torch.tensor([1, 2, 4])
        return self.last(self.vectors(kinds))


def build(config: Config) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    extra: dict[str, list[nn.Module]] = {"mlp": [], "batchnorm": [nn.BatchNorm1d(16)], "dropout": [nn.Dropout(0.3)]}
    first, second, third = nn.Linear(6, 16), nn.Linear(16, 8), nn.Linear(8, 2)
    model: nn.Module
    if config.model == "embedding":
        model = Embedding().double()
    else:
        model = nn.Sequential(first, *extra[config.model], nn.Tanh(), second, nn.Tanh(), third).double()
    make: dict[str, Any] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
        "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=1e-3),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    }
    return model, make[config.optimizer](model.parameters())


def scheduler_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)


class Carried(NamedTuple):
    """What is known of a step that was carried forward.

    Attributes:
        lossy: names of the parameters whose gradients lack a part.
        counted: ids of the samples that count in those; empty if there is no such gradient at all.
        of: how many samples their sum is divided by.
    """

    lossy: tuple[str, ...]
    counted: tuple[int, ...]
    of: int


NOTHING: Mapping[int, Carried] = {}


def reference(config: Config, carried: Mapping[int, Carried] = NOTHING) -> dict[str, np.ndarray[Any, Any]]:
    """Final parameters of the same training in one process, without Horovod and without failures.

    Args:
        carried: step -> what its update was made of, other than its whole global batch.
    """
    model, optimizer = build(config)
    scheduler = scheduler_of(optimizer)
    data = dataset(config)
    order = EpochOrder(config.samples, shuffle=True, seed=5)
    batches = [ids for epoch in range(config.epochs) for ids in _global_batches(order(epoch), config)]
    for update in range(0, len(batches), config.passes):
        optimizer.zero_grad()
        for ids in batches[update : update + config.passes]:
            inputs, labels = data[torch.from_numpy(ids.copy())]
            (F.cross_entropy(model(inputs), labels) / config.passes).backward()
        if update // config.passes + 1 in carried:
            _lose(model, data, carried[update // config.passes + 1])
        optimizer.step()
        scheduler.step()
    return {name: value.numpy() for name, value in model.state_dict().items()}


def _lose(model: nn.Module, data: torch.utils.data.TensorDataset, carried: Carried) -> None:
    """Make the lossy gradients anew, from the samples that count."""
    gradients: dict[str, Any] = dict.fromkeys(carried.lossy)
    if carried.counted:
        inputs, labels = data[torch.tensor(carried.counted)]
        named = dict(model.named_parameters())
        loss = F.cross_entropy(model(inputs), labels, reduction="sum") / carried.of
        made = torch.autograd.grad(loss, [named[name] for name in carried.lossy])
        gradients = dict(zip(carried.lossy, made, strict=True))
    for name, parameter in model.named_parameters():
        if name in gradients:
            parameter.grad = gradients[name]


def _global_batches(order: np.ndarray[Any, Any], config: Config) -> Iterator[np.ndarray[Any, Any]]:
    assert config.global_batch is not None
    for start in range(0, len(order), config.global_batch):
        yield order[start : start + config.global_batch]


