"""The training of ``task.py`` as each worker of a job runs it: ``python -m tests.jobs.training CONFIG.json``."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import horovod_ft.torch as hvd
from horovod_ft.torch.runtime import current
from tests.jobs.task import GROWTH_INTERVAL, Config, build, dataset, scheduler_of

START_RANK = int(os.environ["HOROVOD_RANK"])


def main(config: Config) -> None:
    hvd.init()
    model, plain = build(config)
    optimizer = hvd.DistributedOptimizer(
        plain,
        named_parameters=model.named_parameters(),
        backward_passes_per_step=config.passes,
        groups=config.groups,
        compression=hvd.Compression.fp16 if config.fp16 else hvd.Compression.none,
    )
    torch.manual_seed(100 + START_RANK)
    scheduler = scheduler_of(optimizer)
    scaler = torch.amp.GradScaler("cpu", enabled=config.scaler, growth_interval=GROWTH_INTERVAL)
    loader: Any = hvd.elastic.ElasticDataLoader(
        dataset(config), config.batch, True, global_batch_size=config.global_batch, seed=5,
        num_workers=config.num_workers,
    )  # fmt: skip
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader, scheduler=scheduler, scaler=scaler,
                                   epochs_seen=0, batches=0, **helpers(config))  # fmt: skip

    @hvd.elastic.run(policy=config.policy)
    def train(state: Any) -> None:
        for _epoch in state.loader.epochs(config.epochs):
            for inputs, labels in state.loader:
                if config.hold_before == state.steps + 1:
                    hold(Path(config.folder))
                with state.step():
                    if state.batches % config.passes == 0:
                        optimizer.zero_grad()
                    try:
                        loss = F.cross_entropy(model(inputs), labels) / config.passes
                        scaler.scale(loss).backward()
                    except RuntimeError:
                        if not config.swallow:
                            raise
                    state.batches += 1
                    if config.disagree_at == state.steps + 1:
                        fall_behind(Path(config.folder))
                    if state.batches % config.passes == 0:
                        with contextlib.suppress(RuntimeError) if config.swallow else contextlib.nullcontext():
                            scaler.step(optimizer)
                        scaler.update()
                        scheduler.step()
                if config.disagree_at == state.steps:
                    (Path(config.folder) / f"ahead-{START_RANK}").write_text(str(os.getpid()))
            if config.metric:
                hvd.allreduce(torch.ones(1), name="metric")
            state.epochs_seen += 1

    @hvd.elastic.run(policy=config.policy)
    def train_with_commits(state: Any) -> None:
        """As a script for stock Horovod does it, with our loader."""
        for _epoch in state.loader.epochs(config.epochs):
            for inputs, labels in state.loader:
                if START_RANK == 1 and state.batches == config.kill_before_batch and hvd.size() == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
                scheduler.step()
                state.batches += 1
                if state.batches % config.commit_every == 0:
                    state.commit()
            state.epochs_seen += 1
        state.commit()

    (train_with_commits if config.commit_every else train)(state)
    leave_result(config, state)


def helpers(config: Config) -> dict[str, Any]:
    """What else the state looks after."""
    rule = {} if config.lr_rule is None else {"lr_rule": hvd.elastic.LearningRateRule(config.lr_rule)}
    guard = {} if config.guard_every is None else {"replica_guard": hvd.elastic.ReplicaGuard(config.guard_every)}
    return {**rule, **guard}


def fall_behind(folder: Path) -> None:
    """On start rank 2: let the others commit this step and worker 1 die, then find the own reduction failed."""
    if START_RANK == 2 and hvd.size() == 3:
        wait_until((folder / "ahead-0").exists)
        wait_until(lambda: gone(folder / "ahead-1"))
        raise hvd.HorovodInternalError("this worker's reduction failed, and that of the others did not")


def gone(file: Path) -> bool:
    """Whether the process that left its id in a file has ended."""
    pid = file.read_text() if file.exists() else ""
    return pid != "" and not Path("/proc", pid).exists()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("nobody let go")
        time.sleep(0.01)


def hold(folder: Path) -> None:
    """Wait at a step until the test lets go; so that all workers learn of a change of hosts in the same step."""
    def let_go() -> bool:
        if current().membership.changed():
            (folder / "heard").touch()
        return (folder / "release").exists()

    (folder / f"holding-{os.getpid()}").touch()
    wait_until(let_go)


def leave_result(config: Config, state: Any) -> None:
    """Everything that must be equal, in one file a worker."""
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
        "batches": state.batches,
        "cursor": list(state.loader.cursor.committed),
        "lr": state.optimizer.param_groups[0]["lr"],
        "scheduler": state.scheduler.last_epoch,
        "scale": state.scaler.get_scale(),
    }
    name = runtime.bus.worker.replace(":", "-")
    np.savez(Path(config.folder) / f"result-{name}.npz", scalars=json.dumps(scalars), **arrays)


if __name__ == "__main__":
    main(Config.read(sys.argv[1]))
