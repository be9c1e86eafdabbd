"""A compiled training step outlives a failure: ``python -m tests.jobs.keras_failure FOLDER``.

Worker 1 kills itself between two batches. The others find their variables as they were, form a group without it, and
compute the same batch with the same compiled step. Nothing recovers here but the script itself.
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
from horovod_ft.keras.failures import is_failure
from horovod_ft.keras.runtime import current

BATCHES, KILLED_AT = 12, 5


def digest(model: Any) -> str:
    values = [variable.numpy() for variable in (*model.trainable_variables, *model.optimizer.variables)]
    return hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest()


def main() -> None:
    hvd.init()
    membership, start_rank = current().membership, hvd.rank()
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Embedding(9, 4), keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,), dtype="int32"), *layers])
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
    drawn = np.random.default_rng(start_rank)
    left: dict[str, Any] = {"untouched": [], "sizes": []}
    for batch in range(BATCHES):
        x, y = drawn.integers(0, 9, (8, 3)), drawn.normal(size=(8, 1))
        if batch == KILLED_AT and start_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        before = digest(model) if model.optimizer.built else ""
        while True:
            try:
                model.train_on_batch(x, y)
                break
            except tf.errors.OpError as error:
                if not is_failure(error):
                    raise
                left["untouched"].append(digest(model) == before)
                membership.abort()
                left["sizes"].append(membership.reform().size)
                membership.adopt_generation(1)
    left |= {"digest": digest(model), "iterations": int(model.optimizer.iterations)}
    (Path(sys.argv[1]) / f"keras-{start_rank}.json").write_text(json.dumps(left))
    hvd.shutdown()


if __name__ == "__main__":
    main()
