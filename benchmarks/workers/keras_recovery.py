"""One worker of ``recovery_gap.py --framework keras``: what ``recovery.py`` trains, in Keras 3 on TensorFlow.

``python -m benchmarks.workers.keras_recovery stock|ours FOLDER KILL_RANK KILL_STEP``. Ours is ``model.fit`` with a
``FaultToleranceCallback``. Horovod's own ``fit`` averages nothing on Keras 3, so its side is the loop that its
documentation shows for TensorFlow, compiled, with a commit in every step; it has no sampler there, and each worker goes
on through all samples.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from benchmarks.workers.completed import Dies, Steps, take_part
from benchmarks.workers.keras_models import Shape, layers_of

EPOCHS, WORKERS, BATCH = 2, 4, 16
SHAPE = Shape(128, 6, BATCH, inputs=64)
Array = np.ndarray[Any, Any]


def digits() -> tuple[Array, Array]:
    images, labels = load_digits(return_X_y=True)
    return (images / 16).astype(np.float32), labels.astype(np.int64)


class Mortal(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Kills its process when the backward pass comes to it, if it is time. It has no weights."""

    def __init__(self, now: Callable[[], bool]) -> None:
        super().__init__()
        self._now = now

    def call(self, inputs: Any) -> Any:
        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def same(x: Any) -> Any:
            return tf.identity(x), self._back

        return same(inputs)

    def _back(self, upstream: Any) -> Any:
        def pass_on(value: Array) -> Array:
            if self._now():
                os.kill(os.getpid(), signal.SIGKILL)
            return value

        passed = tf.numpy_function(pass_on, [upstream], upstream.dtype)
        passed.set_shape(upstream.shape)
        return passed


def network(now: Callable[[], bool]) -> Any:
    """Behind the first layer: the gradients of all others are being reduced when it comes to die."""
    keras.utils.set_random_seed(1)
    inputs, first, *others = layers_of(SHAPE)
    return keras.Sequential([inputs, first, Mortal(now), *others])


def momentum() -> Any:
    return keras.optimizers.SGD(0.01, momentum=0.9)


def entropy() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def stock(steps: Steps, dies: Dies) -> None:
    import horovod.tensorflow as hvd  # noqa: PLC0415  each side imports what its users import

    hvd.init()
    (images, labels), loss, optimizer = digits(), entropy(), momentum()
    model = network(lambda: dies(state.batch, hvd.size()))
    optimizer.build(model.trainable_variables)
    variables = [variable.value for variable in (*model.variables, *optimizer.variables)]
    state = hvd.elastic.TensorFlowState(variables=variables, batch=0)
    as_many_as_ours = EPOCHS * math.ceil(len(images) / (WORKERS * BATCH))

    @tf.function  # type: ignore[untyped-decorator]
    def one_step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply([hvd.allreduce(gradient) for gradient in gradients], model.trainable_variables)

    def train(state: Any) -> None:
        for begin in itertools.cycle(range(0, len(images) - BATCH, BATCH)):
            if state.batch >= as_many_as_ours:
                return
            one_step(images[begin : begin + BATCH], labels[begin : begin + BATCH])
            state.batch += 1
            state.commit()
            steps.completed(state.batch, hvd.size())

    hvd.elastic.run(train)(state)


def ours(steps: Steps, dies: Dies) -> None:
    import horovod_ft.keras as hvd  # noqa: PLC0415

    hvd.init()
    guard = hvd.elastic.FaultToleranceCallback()
    done = itertools.count(1)
    tell = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: steps.completed(next(done), hvd.size())
    )
    model = network(lambda: guard.state is not None and dies(guard.state.steps, hvd.size()))
    model.compile(optimizer=hvd.DistributedOptimizer(momentum()), loss=entropy(), jit_compile=False)
    dataset = hvd.elastic.ElasticDataset(*digits(), global_batch_size=WORKERS * BATCH, shuffle=True, seed=1)
    model.fit(dataset, epochs=EPOCHS, verbose=0, callbacks=[guard, tell])
    hvd.shutdown()


if __name__ == "__main__":
    take_part({"stock": stock, "ours": ours}, WORKERS, *sys.argv[1:])
