"""A Keras script written for stock Horovod elastic, as its documentation shows; only the import is ours.

``python -m tests.jobs.keras_stock_script FOLDER`` commits every third batch; worker 1 kills itself between two commits.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import horovod_ft.keras as hvd

FOLDER = Path(sys.argv[1])
START_RANK = int(os.environ["HOROVOD_RANK"])
EPOCHS, STEPS, BATCH = 3, 7, 4

hvd.init()
keras.utils.set_random_seed(1)
x = np.random.default_rng(START_RANK).normal(size=(64, 5)).astype(np.float32)
data = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).repeat().shuffle(64).batch(BATCH)
model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01 * hvd.size(), momentum=0.9))
model.compile(optimizer=optimizer, loss="mse")


def weights() -> str:
    kept = [variable for variable in optimizer.variables if variable is not optimizer._learning_rate]
    values = [variable.numpy() for variable in (*model.variables, *kept)]
    return hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest()


def note(kind: str, state: Any) -> None:
    rate = round(float(optimizer.learning_rate), 6)
    record = {"kind": kind, "epoch": state.epoch, "batch": state.batch, "size": hvd.size(), "rate": rate,
              "weights": weights()}  # fmt: skip
    with (FOLDER / f"notes-{START_RANK}.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


class Events(keras.callbacks.Callback):  # type: ignore[misc]
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if START_RANK == 1 and state.epoch == 1 and batch == 4:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        note("batch", state)


state = hvd.elastic.KerasState(model, batch=0, epoch=0)


def reset() -> None:
    optimizer.learning_rate.assign(0.01 * hvd.size())


state.register_reset_callbacks([reset])


@hvd.elastic.run
def train(state: Any) -> str:
    note("enter", state)
    model.fit(
        data, steps_per_epoch=STEPS, epochs=EPOCHS - state.epoch, verbose=0,
        callbacks=[
            hvd.elastic.UpdateBatchStateCallback(state), hvd.elastic.UpdateEpochStateCallback(state), Events(),
            hvd.elastic.CommitStateCallback(state, 3),
        ],
    )  # fmt: skip
    note("end", state)
    return "done"


assert train(state) == "done"
