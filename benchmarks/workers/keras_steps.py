"""One worker of ``keras_overhead.py``: ``model.fit`` of three kinds in turns, in the same processes.

``python -m benchmarks.workers.keras_steps FOLDER MODEL SECONDS STEPS``. The same model, data and optimizer each time:

- plain: a ``train_step`` of one's own that calls ``horovod.tensorflow.allreduce`` for each gradient;
- wrapper: Keras's ``train_step`` with our ``DistributedOptimizer``, on the same arrays;
- callback: that, with ``FaultToleranceCallback`` on an ``ElasticDataset``.

A time is that of the slowest worker, from the end of batch ``SKIPPED`` of a ``fit`` to the end of its last one: what it
takes to begin a ``fit``, such as tracing, is in none.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.tensorflow
import keras
import numpy as np
import tensorflow as tf

import horovod_ft.keras as hvd
from benchmarks.workers.keras_models import CLASSES, SHAPES, Shape, layers_of

SKIPPED = 5
KINDS = ("plain", "wrapper", "callback")
Array = np.ndarray[Any, Any]


class PlainModel(keras.Sequential):  # type: ignore[misc]  # Keras has no types
    """Data parallelism as one would write it without a wrapper."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        variables = self.trainable_variables
        gradients = [horovod.tensorflow.allreduce(gradient) for gradient in tape.gradient(loss, variables)]
        self.optimizer.apply(gradients, variables)
        for metric in self.metrics:
            metric.update_state(loss)
        return {metric.name: metric.result() for metric in self.metrics}


class Clock(keras.callbacks.Callback):  # type: ignore[misc]
    """Seconds from the end of one batch of a ``fit`` to the end of its last one."""

    def __init__(self) -> None:
        super().__init__()
        self.began = self.ended = 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == SKIPPED:
            self.began = time.perf_counter()
        self.ended = time.perf_counter()


def made(kind: str, shape: Shape) -> Any:
    keras.utils.set_random_seed(1)
    model = (PlainModel if kind == "plain" else keras.Sequential)(layers_of(shape))
    optimizer = keras.optimizers.SGD(1e-3, momentum=0.9)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if kind != "plain":
        optimizer = hvd.DistributedOptimizer(optimizer)
    model.compile(optimizer=optimizer, loss=loss, jit_compile=False)
    return model


def fits(shape: Shape, steps: int) -> dict[str, Callable[[], float]]:
    """What gives the seconds of ``steps`` steps of a ``fit``, by kind."""
    drawn, batches = np.random.default_rng(hvd.rank()), steps + SKIPPED + 1
    x = drawn.normal(size=(batches * shape.batch, shape.width)).astype(np.float32)
    y = drawn.integers(0, CLASSES, len(x))
    models = {kind: made(kind, shape) for kind in KINDS}
    dealt = hvd.elastic.ElasticDataset(
        lambda ids: (x[ids % len(x)], y[ids % len(x)]), length=len(x) * hvd.size(), batch_size=shape.batch
    )

    def fit(kind: str) -> float:
        clock = Clock()
        if kind == "callback":
            dealt.begin_epoch(0)
            callbacks = [hvd.elastic.FaultToleranceCallback(), clock]
            models[kind].fit(dealt, verbose=0, callbacks=callbacks)
        else:
            models[kind].fit(x, y, batch_size=shape.batch, shuffle=False, verbose=0, callbacks=[clock])
        return slowest(clock.ended - clock.began)

    return {kind: lambda kind=kind: fit(kind) for kind in KINDS}  # type: ignore[misc]


def slowest(seconds: float) -> float:
    """The largest of all workers' values."""
    value = tf.constant(seconds, tf.float64)
    return float(horovod.tensorflow.allreduce(value, name="benchmark.slowest", op=hvd.Max))


def main(folder: str, model: str, seconds: str, steps: str) -> None:
    hvd.init()
    timed = fits(SHAPES[model], int(steps))
    for kind in KINDS:
        timed[kind]()
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    began = time.perf_counter()
    while len(times["plain"]) < 2 or slowest(time.perf_counter() - began) < float(seconds):
        for kind in KINDS if len(times["plain"]) % 2 == 0 else reversed(KINDS):
            times[kind].append(timed[kind]() / int(steps))
    if hvd.rank() == 0:
        (Path(folder) / "times.json").write_text(json.dumps(times))
    hvd.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
