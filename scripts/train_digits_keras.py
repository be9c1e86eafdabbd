"""Train a small convolutional net on scikit-learn's handwritten digits with ``model.fit``, and go on when workers die.

This is the script that ``scripts/demo --framework keras`` runs, and an example to copy from: an ordinary training with
Keras, plus the lines with ``hvd``. By hand:

    horovodrun -np 4 --min-np 1 --host-discovery-script ./hosts.sh python scripts/train_digits_keras.py
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import horovod_ft.keras as hvd


def digits() -> Any:
    """1,437 images to train on and 360 to test with: 8 x 8 x 1 floats in 0..1, and the digit."""
    images, labels = load_digits(return_X_y=True)
    images = images.astype(np.float32).reshape(-1, 8, 8, 1) / 16
    return train_test_split(images, labels, test_size=360, random_state=0, stratify=labels)


def make_model() -> Any:
    layers = keras.layers
    return keras.Sequential([
        keras.Input((8, 8, 1)),
        layers.Conv2D(24, 3, padding="same", activation="relu"),
        layers.Conv2D(48, 3, padding="same", activation="relu"), layers.MaxPooling2D(2),
        layers.Flatten(), layers.Dense(96, activation="relu"), layers.Dense(10),
    ])  # fmt: skip


class Tell(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """One line an epoch, by the first worker."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1:2d}  step {int(self.model.optimizer.iterations):4d}  workers {hvd.size()}  "
                  f"loss {logs['loss']:.3f}  test accuracy {logs['val_accuracy']:.1%}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--result", type=Path, help="folder for a JSON file a worker about the end of the training")
    arguments = parser.parse_args()

    hvd.init()
    keras.utils.set_random_seed(arguments.seed)
    images, test_images, labels, test_labels = digits()
    rate = keras.optimizers.schedules.CosineDecay(0.05, arguments.epochs * 23)
    model = make_model()
    model.compile(
        optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    data = hvd.elastic.ElasticDataset(images, labels, global_batch_size=64, shuffle=True, seed=arguments.seed)
    test = hvd.elastic.ElasticDataset(test_images, test_labels, global_batch_size=360)
    told = model.fit(
        data, epochs=arguments.epochs, validation_data=test, verbose=0,
        callbacks=[hvd.elastic.FaultToleranceCallback(), Tell()],
    )  # fmt: skip
    if arguments.result is not None:
        leave_result(arguments.result, model, told.history["val_accuracy"][-1])


def leave_result(folder: Path, model: Any, test_accuracy: float) -> None:
    """What scripts/demo compares between the workers."""
    weights = hashlib.sha256()
    for variable in (*model.trainable_variables, *model.optimizer.variables):
        weights.update(variable.numpy().tobytes())
    folder.mkdir(parents=True, exist_ok=True)
    result = {"rank": hvd.rank(), "steps": int(model.optimizer.iterations), "weights": weights.hexdigest(),
              "test_accuracy": test_accuracy}  # fmt: skip
    (folder / f"worker-{os.getpid()}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
