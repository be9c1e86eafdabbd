"""The training that the job tests run: as a real elastic job, or in one plain process for comparison.

``python training.py CONFIG.json`` is what each worker runs. Double precision, so that "equal up to rounding" is strict.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from horovod_ft.data import EpochOrder


@dataclass(frozen=True)
class Config:
    """What is trained, and how. ``folder`` is where each worker leaves its result."""

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
    accumulate_over: str = "steps"
    hold_before: int | None = None
    policy: str | None = None
    swallow: bool = False

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


def build(config: Config) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    extra: dict[str, list[nn.Module]] = {"mlp": [], "batchnorm": [nn.BatchNorm1d(16)], "dropout": [nn.Dropout(0.3)]}
    model = nn.Sequential(nn.Linear(6, 16), *extra[config.model], nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 2))
    model.double()
    make: dict[str, Any] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
        "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=1e-3),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    }
    return model, make[config.optimizer](model.parameters())


def scheduler_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)


def reference(config: Config) -> dict[str, np.ndarray[Any, Any]]:
    """Final parameters of the same training in one process, without Horovod and without failures."""
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
        optimizer.step()
        scheduler.step()
    return {name: value.numpy() for name, value in model.state_dict().items()}


def _global_batches(order: np.ndarray[Any, Any], config: Config) -> Iterator[np.ndarray[Any, Any]]:
    assert config.global_batch is not None
    for start in range(0, len(order), config.global_batch):
        yield order[start : start + config.global_batch]


def main(config: Config) -> None:
    import horovod_ft.torch as hvd

    hvd.init()
    model, plain = build(config)
    optimizer = hvd.DistributedOptimizer(
        plain,
        named_parameters=model.named_parameters(),
        backward_passes_per_step=config.passes,
        groups=config.groups,
        compression=hvd.Compression.fp16 if config.fp16 else hvd.Compression.none,
    )
    torch.manual_seed(100 + int(os.environ["HOROVOD_RANK"]))
    scheduler = scheduler_of(optimizer)
    loader: Any = hvd.elastic.ElasticDataLoader(
        dataset(config), config.batch, True, global_batch_size=config.global_batch, seed=5,
        num_workers=config.num_workers,
    )  # fmt: skip
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader, scheduler=scheduler, epochs_seen=0)

    @hvd.elastic.run(policy=config.policy)
    def train(state: Any) -> None:
        passed = 0
        for _epoch in state.loader.epochs(config.epochs):
            for inputs, labels in state.loader:
                if config.hold_before == state.steps + 1:
                    hold(Path(config.folder))
                with state.step():
                    if passed % config.passes == 0:
                        optimizer.zero_grad()
                    try:
                        (F.cross_entropy(model(inputs), labels) / config.passes).backward()
                    except RuntimeError:
                        if not config.swallow:
                            raise
                    passed += 1
                    if passed % config.passes == 0:
                        optimizer.step()
                        scheduler.step()
            if config.metric:
                hvd.allreduce(torch.ones(1), name="metric")
            state.epochs_seen += 1

    train(state)
    leave_result(config, state)


def hold(folder: Path) -> None:
    """Wait at a step until the test lets go; see ``test_graceful`` for why."""
    from horovod_ft.torch.runtime import current

    (folder / f"holding-{os.getpid()}").touch()
    deadline = time.monotonic() + 30
    while not (folder / "release").exists():
        if current().membership.changed():
            (folder / "heard").touch()
        if time.monotonic() > deadline:
            raise TimeoutError("nobody let go")
        time.sleep(0.01)


def leave_result(config: Config, state: Any) -> None:
    """Everything that must be equal, in one file a worker."""
    from horovod_ft.torch.runtime import current

    runtime = current()
    arrays = {f"model.{name}": value.numpy() for name, value in state.model.state_dict().items()}
    for index, parameter in enumerate(state.model.parameters()):
        for key, value in state.optimizer.state[parameter].items():
            if value is not None:
                arrays[f"optimizer.{index}.{key}"] = torch.as_tensor(value).numpy()
    scalars = {
        "rank": runtime.group().rank,
        "size": runtime.group().size,
        "steps": state.steps,
        "epochs_seen": state.epochs_seen,
        "cursor": list(state.loader.cursor.committed),
        "lr": state.optimizer.param_groups[0]["lr"],
        "scheduler": state.scheduler.last_epoch,
    }
    name = runtime.bus.worker.replace(":", "-")
    np.savez(Path(config.folder) / f"result-{name}.npz", scalars=json.dumps(scalars), **arrays)


if __name__ == "__main__":
    main(Config.read(sys.argv[1]))
