"""One worker's model lacks a layer that the other's has: ``python -m tests.jobs.keras_unequal FOLDER``.

Each worker leaves what it was told, by a ``fit``, and by a tape.
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
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    made.layers[0].trainable = hvd.rank() == 0
    return made


def fit() -> None:
    made = model()
    made.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    made.fit(X, Y, verbose=0)


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
    rank, left = hvd.rank(), {"fit": told(fit), "tape": told(tape)}
    (Path(sys.argv[1]) / f"unequal-{rank}.json").write_text(json.dumps(left))
    hvd.shutdown()


if __name__ == "__main__":
    main()
