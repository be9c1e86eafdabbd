"""Everything a user can get wrong in a script. ``python bad_input.py FOLDER`` tries all that raise, on each worker.

``python bad_input.py FOLDER mismatch`` trains another model on worker 1.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import horovod_ft.torch as hvd

FOLDER = Path(sys.argv[1])
RANK = int(os.environ["HOROVOD_RANK"])


class WithoutLength(torch.utils.data.Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


def model_of(width: int = 3) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, width)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def distributed(**options: Any) -> Any:
    model, optimizer = model_of()
    return hvd.DistributedOptimizer(optimizer, **{"named_parameters": model.named_parameters(), **options})


def loader(dataset: Any = None, **options: Any) -> Any:
    data = torch.utils.data.TensorDataset(torch.zeros(8, 2)) if dataset is None else dataset
    return hvd.elastic.ElasticDataLoader(data, **options)


def step_outside_run() -> None:
    model, _ = model_of()
    with hvd.elastic.TorchState(model=model).step():
        pass


def nested_steps() -> None:
    model, _ = model_of()
    state = hvd.elastic.TorchState(model=model)

    @hvd.elastic.run
    def train(state: Any) -> None:
        with state.step(), state.step():
            pass

    train(state)


CASES: dict[str, Callable[[], Any]] = {
    "duplicate names": lambda: distributed(named_parameters=[("a", p) for p in model_of()[0].parameters()]),
    "missing names": lambda: distributed(named_parameters=[]),
    "no length": lambda: loader(WithoutLength(), batch_size=2),
    "empty dataset": lambda: loader(torch.utils.data.TensorDataset(torch.zeros(0, 2)), batch_size=2),
    "batch of zero": lambda: loader(global_batch_size=0),
    "both batch sizes": lambda: loader(global_batch_size=4, batch_size=2),
    "unknown policy": lambda: hvd.elastic.run(policy="lossless"),
    "step outside run": step_outside_run,
    "nested steps": nested_steps,
    "adasum": lambda: distributed(op=hvd.Adasum),
    "process set": lambda: distributed(process_set=hvd.ProcessSet([0])),
    "no state": lambda: hvd.elastic.run(lambda state: None)(None),
}


def try_all() -> None:
    said = {}
    for name, case in CASES.items():
        try:
            case()
            said[name] = "nothing"
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    (FOLDER / f"said-{RANK}.json").write_text(json.dumps(said))


def train_mismatched() -> None:
    model, optimizer = model_of(width=3 + RANK)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.elastic.run(lambda state: None)(hvd.elastic.TorchState(model=model, optimizer=optimizer))


if __name__ == "__main__":
    hvd.init()
    train_mismatched() if "mismatch" in sys.argv else try_all()
