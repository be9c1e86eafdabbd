"""Many a ``model.fit`` in one job, in each of which workers die: ``python -m tests.jobs.keras_fit FOLDER JOB``.

Each worker that is left leaves what it ended with, for each case. One of them also trains alone on whole batches, and
leaves how far that is apart.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import math
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np

import horovod_ft.keras as hvd
from horovod_ft.data import EpochOrder
from horovod_ft.faults.plan import Fault
from horovod_ft.keras.runtime import current
from horovod_ft.ledger import Ledger

START_RANK = int(os.environ.get("HOROVOD_RANK", "0"))
ROWS, GLOBAL, EPOCHS, WORDS, SEED = 100, 12, 2, 11, 5
#: After so many seconds a worker says where it is.
STUCK_S = 150.0
Array = np.ndarray[Any, Any]


def dense() -> Any:
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)])


def own_state() -> Any:
    """With running statistics and dropout, which each worker has of its own."""
    layers = [keras.layers.Dense(16), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)]
    return keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(1)])


def embedding() -> Any:
    layers = [keras.layers.Embedding(WORDS, 4), keras.layers.Flatten(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((3,), dtype="int32"), *layers])


def mixed(policy: str) -> Any:
    layers = [keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    for one in (*layers, model):
        one.dtype_policy = keras.DTypePolicy(policy)
    return model


def half() -> Any:
    """In float16 with float32 variables, and a loss scale."""
    return mixed("mixed_float16")


def brain() -> Any:
    """In bfloat16 with float32 variables."""
    return mixed("mixed_bfloat16")


def momentum() -> Any:
    return keras.optimizers.SGD(0.05, momentum=0.9)


def adam() -> Any:
    return keras.optimizers.Adam(0.01)


def adamw() -> Any:
    return keras.optimizers.AdamW(0.01, weight_decay=0.01, clipnorm=0.5)


@dataclass(frozen=True)
class Case:
    """A training, and what goes wrong in it.

    Attributes:
        faults: entries of a fault plan.
        killed_in: worker and epoch in whose validation it dies.
        plain: train on arrays, all workers on the same ones.
        like_one_process: it ends where one process ends that computes on whole batches.
        hold: epoch and batch before which workers wait for another one to be announced.
        store: name of the folder for checkpoints.
        every: steps between two of them.
        guarded: steps between two looks at whether replicas differ.
        dealt: rows of a validation of which each worker has a part; 0: each validates on the same ones.
        metrics: of the model.
        patience: epochs without a lower loss than the first, after which all stop.
        saved: name of the file in which Keras saves the model at the end of each epoch.
    """

    faults: tuple[Fault, ...] = ()
    model: Callable[[], Any] = dense
    optimizer: Callable[[], Any] = momentum
    compiled: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    policy: str = "rollback"
    killed_in: tuple[int, int] | None = None
    plain: bool = False
    like_one_process: bool = True
    global_batch: int = GLOBAL
    epochs: int = EPOCHS
    hold: tuple[int, int] | None = None
    patience: int | None = None
    store: str | None = None
    every: int = 4
    guarded: int | None = None
    dealt: int = 0
    metrics: tuple[str, ...] = ("mae",)
    saved: str | None = None

    def callbacks(self) -> list[Any]:
        """What Keras has, and decides with."""
        patient = [] if self.patience is None else [self.patience]
        return [
            keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=10.0),
            *(keras.callbacks.EarlyStopping("loss", min_delta=10.0, patience=epochs) for epochs in patient),
        ]


def kill(worker: int, step: int, phase: Any, after: int = 0) -> Fault:
    return Fault(phase=phase, worker=worker, step=step, after=after)


def arrays_of(case: Case) -> tuple[Array, Array]:
    drawn = np.random.default_rng(7)
    words = drawn.integers(0, WORDS, (ROWS, 3)).astype(np.int32)
    numbers = drawn.normal(size=(ROWS, 6)).astype(np.float32)
    x = words if case.model is embedding else numbers
    return x, (numbers[:, :1] * numbers[:, 1:2]).astype(np.float32)


class DiesInValidation(keras.callbacks.Callback):  # type: ignore[misc]
    def __init__(self, epoch: int) -> None:
        super().__init__()
        self.epoch, self.present = epoch, -1

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.present = epoch

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.present == self.epoch:
            os.kill(os.getpid(), signal.SIGKILL)


def hold(folder: Path) -> None:
    """Wait until the test lets go, which it does when a worker has heard of a change."""
    (folder / f"holding-{os.getpid()}").touch()
    deadline = time.monotonic() + 60.0
    while not (folder / "release").exists():
        if current().membership.changed():
            (folder / "heard").touch()
        if time.monotonic() > deadline:
            raise TimeoutError("nobody let go")
        time.sleep(0.01)


class Holds(keras.callbacks.Callback):  # type: ignore[misc]
    """Waits before a batch until the test lets go, so that all workers hear of a new one in the same step."""

    def __init__(self, epoch: int, batch: int, folder: Path) -> None:
        super().__init__()
        self.at, self.folder, self.epoch = (epoch, batch), folder, -1

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if (self.epoch, batch) == self.at:
            hold(self.folder)


def made(case: Case, optimizer: Any) -> Any:
    keras.utils.set_random_seed(3)
    model = case.model()
    model.compile(optimizer=optimizer, loss="mse", metrics=list(case.metrics), **case.compiled)
    return model


def trained(name: str, case: Case, folder: Path) -> tuple[Any, dict[str, Any]]:
    runtime = current()
    runtime.ledger = Ledger(folder / f"ledger-{name}", runtime.bus.worker)
    runtime.injector.waiting = [fault for fault in case.faults if fault.worker == START_RANK]
    model = made(case, hvd.DistributedOptimizer(case.optimizer(), **case.options))
    keras.utils.set_random_seed(100 + START_RANK)
    x, y = arrays_of(case)
    checkpoint = None if case.store is None else hvd.elastic.Checkpoints(str(folder / case.store), every=case.every)
    looks = None if case.guarded is None else hvd.elastic.ReplicaGuard(every=case.guarded)
    guard = hvd.elastic.FaultToleranceCallback(policy=case.policy, checkpoint=checkpoint, guard=looks)
    watch = Watch(guard)
    callbacks = [guard, watch, *case.callbacks()]
    if case.saved is not None:
        note_saving(model, watch, folder)
        callbacks.append(keras.callbacks.ModelCheckpoint(folder / case.saved))
    if case.killed_in is not None and case.killed_in[0] == START_RANK:
        callbacks.append(DiesInValidation(case.killed_in[1]))
    if case.hold is not None:
        callbacks.append(Holds(*case.hold, folder))
    dealt = hvd.elastic.ElasticDataset(x, y, global_batch_size=case.global_batch, shuffle=True, seed=SEED)
    data = (x, y) if case.plain else (dealt,)
    batch = {"batch_size": case.global_batch, "shuffle": False} if case.plain else {}
    shown: Any = (x[:24], y[:24])
    if case.dealt:
        shown = hvd.elastic.ElasticDataset(x[: case.dealt], y[: case.dealt], global_batch_size=8)
    told = model.fit(*data, epochs=case.epochs, verbose=0, validation_data=shown, callbacks=callbacks, **batch)
    if case.saved is not None:
        watch.seen["saved"] = digest(keras.saving.load_model(folder / case.saved))
    return model, {"history": told.history, **watch.seen, "batches": watch.batches}


class Watch(keras.callbacks.Callback):  # type: ignore[misc]
    """What only shows while training runs."""

    def __init__(self, guard: Any) -> None:
        super().__init__()
        self.guard = guard
        self.seen: dict[str, Any] = {}
        self.batches: list[tuple[int, int]] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches.append((self.epoch, batch))
        state = self.guard.state
        metrics = [float(value.numpy().sum()) for value in state.ft_metrics_values()]
        traced = state.ft_update.stages.traced
        self.seen = {"metrics": metrics, "traced": traced, "steps": state.steps}


def note_saving(model: Any, watch: Watch, folder: Path) -> None:
    """Leave a note of the epoch and of this worker each time a model is saved."""
    save = model.save

    def noting(*args: Any, **kwargs: Any) -> None:
        (folder / f"wrote-{watch.epoch}-{START_RANK}").touch()
        save(*args, **kwargs)

    model.save = noting


def digest(model: Any) -> str:
    values = [variable.numpy() for variable in (*model.trainable_variables, *model.optimizer.variables)]
    return hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest()


def alone(case: Case) -> tuple[Any, dict[str, list[float]]]:
    """The same training by one process, without Horovod and without failures."""
    model = made(case, case.optimizer())
    x, y = arrays_of(case)
    order = EpochOrder(ROWS, shuffle=True, seed=SEED)
    size: int = case.global_batch * case.options.get("backward_passes_per_step", 1)

    class EachEpoch(keras.utils.PyDataset):  # type: ignore[misc]
        epoch = 0

        def __len__(self) -> int:
            return math.ceil(ROWS / size)

        def __getitem__(self, index: int) -> Any:
            rows = np.arange(ROWS) if case.plain else order(self.epoch)
            chosen = rows[index * size : (index + 1) * size]
            return x[chosen], y[chosen]

    data, shown = EachEpoch(workers=0), slice(case.dealt or 24)
    tell = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: setattr(data, "epoch", epoch))
    told: dict[str, list[float]] = model.fit(
        data, epochs=case.epochs, verbose=0, shuffle=False, validation_data=(x[shown], y[shown]),
        callbacks=[*case.callbacks(), tell],
    ).history  # fmt: skip
    return model, told


def apart(model: Any, history: dict[str, list[float]], case: Case) -> dict[str, float]:
    other, told = alone(case)
    pairs = zip(model.get_weights(), other.get_weights(), strict=True)
    assert history.keys() == told.keys()
    return {
        "weights": max(float(np.abs(one - two).max()) for one, two in pairs),
        "optimizer": max(
            float(np.abs(one.numpy() - two.numpy()).max())
            for one, two in zip(model.optimizer.variables, other.optimizer.variables, strict=True)
        ),
        "history": max(float(np.abs(np.array(history[key]) - np.array(told[key])).max()) for key in told),
    }


def scaled() -> Any:
    return keras.optimizers.LossScaleOptimizer(momentum(), initial_scale=64.0)


LOSSY = "lossy_forward | rollback"
FOUR = {"steps_per_execution": 4}
TWO = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
FP16 = {"compression": hvd.Compression.fp16}
#: By job: the cases that its workers go through, one after the other. Each job begins with workers of its own.
JOBS: dict[str, dict[str, Case]] = {
    "moments": {
        "quiet": Case(),
        "forward": Case((kill(4, 5, "forward"),)),
        "allreduce": Case((kill(3, 5, "allreduce", 2),), optimizer=adam),
        "rank_zero": Case((kill(0, 5, "optimizer"),), optimizer=adamw),
        "backward": Case((kill(2, 5, "backward"),)),
    },
    "epochs": {
        "parts": Case(dealt=23, metrics=("mae", "root_mean_squared_error", "r2_score")),
        "last_of_epoch": Case((kill(3, 9, "allreduce", 1),), embedding, adam, {"steps_per_execution": 4}),
        "validation": Case(killed_in=(2, 0)),
        "last_validation": Case(killed_in=(0, EPOCHS - 1)),
    },
    "kinds": {
        "lost": Case((Fault("allreduce", "lose", worker=2, step=5, after=2),)),
        "flipped": Case((Fault("optimizer", "bitflip", worker=1, step=5),), guarded=5),
        "two_at_once": Case((kill(4, 4, "allreduce", 1), kill(3, 4, "forward"))),
        "eagerly": Case((kill(0, 5, "allreduce", 2),), compiled={"run_eagerly": True}),
        "plain": Case((kill(1, 5, "allreduce", 2),), plain=True),
    },
    "models": {
        "commit": Case((kill(4, 5, "commit"),)),
        "own_state": Case((kill(3, 5, "allreduce", 3),), own_state, adam, like_one_process=False),
        "half": Case((kill(2, 5, "allreduce", 2),), half, scaled),
        "brain": Case((kill(1, 5, "allreduce", 2),), brain, adam),
    },
    "forward": {
        "late": Case((Fault("allreduce", "lose", worker=2, step=5, after=2),), optimizer=adam, policy=LOSSY),
        "whole_update": Case((kill(4, 5, "allreduce", 4),), optimizer=adam, policy=LOSSY),
        "part_of_it": Case((kill(0, 5, "allreduce", 2),), policy=LOSSY, like_one_process=False),
        "rows": Case((kill(3, 5, "allreduce", 0),), embedding, adam, policy=LOSSY, like_one_process=False),
        "half_forward": Case((kill(2, 5, "allreduce", 2),), half, scaled, policy=LOSSY, like_one_process=False),
    },
    "calls": {
        "call": Case((kill(4, 7, "allreduce", 2),), optimizer=adam, compiled=FOUR),
        "call_forward": Case(
            (kill(3, 7, "allreduce", 2),), optimizer=adam, compiled=FOUR, policy=LOSSY, like_one_process=False
        ),
        "call_restart": Case(  # back to a step of the call before
            (kill(2, 17, "allreduce", 2),), optimizer=adam, compiled=FOUR,
            policy="checkpoint_restart(every=6)", store="calls", every=6,
        ),
    },
    "twice": {
        "agreement": Case((kill(5, 5, "allreduce", 2), kill(4, 5, "agreement")), optimizer=adam),
        "completion": Case(
            (kill(3, 5, "allreduce", 2), kill(2, 5, "completion")), policy=LOSSY, like_one_process=False
        ),
    },
    "twice_more": {
        "reform": Case((kill(5, 5, "allreduce", 2), kill(4, 5, "reform"))),
        "transfer": Case((kill(3, 5, "allreduce", 2), kill(0, 5, "transfer")), optimizer=adam),
    },
    "options": {
        "passes": Case((kill(4, 3, "allreduce", 2),), options=TWO, global_batch=10),
        "passes_forward": Case(
            (kill(3, 3, "allreduce", 2),), options=TWO, global_batch=10, policy=LOSSY, like_one_process=False
        ),
        "fp16": Case((kill(2, 5, "allreduce", 2),), options=FP16),
    },
    "restart": {"restart": Case((kill(1, 15, "allreduce", 2),), policy="checkpoint_restart(every=4)", store="store")},
    "dies": {"dies": Case((kill(0, 15, "forward"), kill(1, 15, "forward")), store="store")},
    "again": {"again": Case(store="store")},
    "files": {"files": Case((kill(0, 15, "allreduce", 2),), saved="model.keras")},
    "newcomer": {"newcomer": Case(hold=(1, 3), epochs=5, patience=2)},
    "newcomer_calls": {
        "newcomer_calls": Case(
            (), own_state, adam, FOUR, hold=(1, 4), epochs=5, patience=2, like_one_process=False
        )
    },
    "newcomer_forward": {"newcomer_forward": Case(hold=(1, 3), epochs=5, patience=2, policy=LOSSY)},
}


def main() -> None:
    warnings.filterwarnings("ignore", message="model.fit.. got data")
    faulthandler.dump_traceback_later(STUCK_S)
    folder = Path(sys.argv[1])
    hvd.init()
    heard: set[str] = set()
    current().bus.subscribe(lambda event: heard.add(event.kind))
    for name, case in JOBS[sys.argv[2]].items():
        heard.clear()
        model, seen = trained(name, case, folder)
        group = current().group()
        waiting = [str(fault) for fault in current().injector.waiting]
        left = {"digest": digest(model), "size": group.size, "waiting": waiting, "heard": sorted(heard), **seen}
        if group.rank == group.size - 1 and case.like_one_process:
            left["apart"] = apart(model, seen["history"], case)
        (folder / f"{name}-{START_RANK}.json").write_text(json.dumps(left, default=float))
    hvd.shutdown()


if __name__ == "__main__":
    main()
