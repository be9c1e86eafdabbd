"""The training of ``task.py`` as each worker of a job runs it: ``python -m tests.jobs.training CONFIG.json``."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
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

    if config.copy_every is not None:
        hvd.elastic.StateCommitter(state, config.copy_every, keep="copy")
    spoiler = Spoiler(config)

    @hvd.elastic.run(policy=policy_of(config), checkpoint=checkpoints_of(config))
    def train(state: Any) -> None:
        with spoiler.answered(state):
            steps(state)

    def steps(state: Any) -> None:
        for _epoch in state.loader.epochs(config.epochs):
            for inputs, labels in state.loader:
                if config.hold_before == state.steps + 1:
                    hold(Path(config.folder))
                with state.step():
                    spoiler.inside(state)
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
                spoiler.after(state)
                settle(config, state)
                if config.disagree_at == state.steps:
                    (Path(config.folder) / f"ahead-{START_RANK}").write_text(str(os.getpid()))
            if config.metric:
                hvd.allreduce(torch.ones(1), name="metric")
            state.epochs_seen += 1

    if config.commit_every:
        run = hvd.elastic.run(policy=config.policy, checkpoint=checkpoints_of(config))
        run(functools.partial(commit_by_hand, config))(state)
    else:
        train(state)
    leave_result(config, state)


def commit_by_hand(config: Config, state: Any) -> None:
    """As a script for stock Horovod trains, with our loader."""
    for _epoch in state.loader.epochs(config.epochs):
        for inputs, labels in state.loader:
            if START_RANK == 1 and state.batches == config.kill_before_batch and hvd.size() == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            state.optimizer.zero_grad()
            F.cross_entropy(state.model(inputs), labels).backward()
            state.optimizer.step()
            state.scheduler.step()
            state.batches += 1
            if state.batches % config.commit_every == 0:
                state.commit()
        state.epochs_seen += 1
    state.commit()


def helpers(config: Config) -> dict[str, Any]:
    """What else the state looks after."""
    rule = {} if config.lr_rule is None else {"lr_rule": hvd.elastic.LearningRateRule(config.lr_rule)}
    guard = {} if config.guard_every is None else {"replica_guard": hvd.elastic.ReplicaGuard(config.guard_every)}
    return {**rule, **guard}


def checkpoints_of(config: Config) -> Any:
    if config.checkpoint is None:
        return None
    return hvd.elastic.Checkpoints(config.checkpoint, every=config.every, end_on_error=config.end_on_error)


def settle(config: Config, state: Any) -> None:
    if 0 < state.steps <= config.settle_through:
        saver = state.engine._saving._saver
        wait_until(lambda: saver._writing is saver._running is None)
    lingers = config.linger is not None and tuple(config.linger) == (START_RANK, state.steps)
    if lingers and current().settings.attempt == 0:
        wait_until(lambda: False)


def policy_of(config: Config) -> Any:
    return config.policy if config.own_policy is None else OWN_POLICIES[config.own_policy]


def raises(failure: hvd.elastic.Failure) -> hvd.elastic.Decision:
    raise KeyError(failure.step)


def differs(failure: hvd.elastic.Failure) -> hvd.elastic.Decision:
    return hvd.elastic.Replay() if START_RANK == 0 else hvd.elastic.Abort("not here")


OWN_POLICIES: dict[str, Any] = {
    "restart": hvd.elastic.MiniBatchRollback() | (lambda failure: hvd.elastic.Restart()),
    "raises": raises,
    "restarts": hvd.elastic.CheckpointRestart(every=4),
    "nonsense": lambda failure: "replay",
    "differs": differs,
}


class Spoiler:
    """Spoils the parameters in one step, and lets the training go back to a copy."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def _due(self, state: Any, *, by: str, step: int) -> bool:
        here = START_RANK == 1 or by == "all"
        now = self._config.restore_at == step and current().group().generation == self._config.restore_in
        due = self._config.restore_by == by and here and now
        if due:
            with torch.no_grad():
                for parameter in state.model.parameters():
                    parameter.fill_(float("nan"))
        return due

    def inside(self, state: Any) -> None:
        if self._due(state, by="inside", step=state.steps + 1):
            state.restore()
        if self._due(state, by="one", step=state.steps + 1):
            raise ValueError("an error of the script's own")

    def after(self, state: Any) -> None:
        if self._due(state, by="all", step=state.steps):
            state.restore()

    @contextlib.contextmanager
    def answered(self, state: Any) -> Iterator[None]:
        """The script's own error is answered with a restore."""
        try:
            yield
        except ValueError:
            state.restore()


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
