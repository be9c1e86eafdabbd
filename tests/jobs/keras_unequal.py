"""A layer has no gradients in the model of one worker only: ``python -m tests.jobs.keras_unequal FOLDER``.

Each worker leaves what it was told: by a ``fit``, by one that recovers, and by a tape.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import horovod_ft.keras as hvd

X, Y = np.ones((4, 2), np.float32), np.ones((4, 1), np.float32)


def model() -> Any:
    inputs = keras.Input((2,))
    hidden = keras.layers.Dense(3)(inputs)
    return keras.Model(inputs, keras.layers.Dense(1)(hidden if hvd.rank() == 0 else keras.ops.stop_gradient(hidden)))


def fit(*callbacks: Any) -> None:
    made = model()
    made.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    made.fit(X, Y, verbose=0, callbacks=list(callbacks))


def fit_through_failures() -> None:
    fit(hvd.elastic.FaultToleranceCallback())


def tape() -> None:
    made = model()
    with hvd.DistributedGradientTape(tf.GradientTape()) as taped:
        loss = tf.reduce_mean((made(X) - Y) ** 2)
    taped.gradient(loss, made.trainable_variables)


def told(train: Callable[[], None]) -> list[str]:
    try:
        train()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return []


def main() -> None:
    hvd.init()
    rank, left = hvd.rank(), {"fit": told(fit), "tape": told(tape), "callback": told(fit_through_failures)}
    (Path(sys.argv[1]) / f"unequal-{rank}.json").write_text(json.dumps(left))
    hvd.shutdown()


if __name__ == "__main__":
    main()
