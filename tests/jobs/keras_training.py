"""``model.fit`` on two workers under many configurations: ``python -m tests.jobs.keras_training FOLDER``.

Each worker trains on its rows of each global batch, and leaves a digest of its final weights. One of the two also
trains alone on whole batches, and leaves how far the weights are apart.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import horovod.tensorflow.keras as stock
import keras
import numpy as np
import tensorflow as tf

import horovod_ft.keras as hvd
from horovod_ft.data import EpochOrder
from horovod_ft.keras.runtime import current

ROWS, GLOBAL, WORKERS, EPOCHS, WORDS = 64, 16, 2, 2, 11
Array = np.ndarray[Any, Any]


def dense() -> Any:
    return keras.Sequential([keras.Input((5,)), keras.layers.Dense(7, activation="tanh"), keras.layers.Dense(1)])


def embedding() -> Any:
    layers = [keras.layers.Embedding(WORDS, 4), keras.layers.Flatten(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((3,), dtype="int32"), *layers])


def half() -> Any:
    """Like ``dense``, in float16 with float32 variables."""
    layers = [keras.layers.Dense(7, activation="tanh"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((5,)), *layers], name="half")
    for layer in layers:
        layer.dtype_policy = keras.DTypePolicy("mixed_float16")
    model.dtype_policy = keras.DTypePolicy("mixed_float16")
    return model


def unused() -> Any:
    """The weights of one layer have no gradient."""

    class Model(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = keras.layers.Dense(1), keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            self.unused(x)
            return self.used(x)

    return Model()


@dataclass(frozen=True)
class Case:
    """A configuration.

    Attributes:
        optimizer: for one process that computes whole batches.
        options: for ``DistributedOptimizer``.
        distributed: the optimizer of the workers, if it is another than ``optimizer`` with ``DistributedOptimizer``.
        passes: batches for an update.
    """

    optimizer: Callable[[], Any]
    model: Callable[[], Any] = dense
    options: Any = None
    distributed: Callable[[], Any] | None = None
    passes: int = 1
    compiled: Any = None

    def wrapped(self) -> Any:
        if self.distributed is not None:
            return self.distributed()
        return hvd.DistributedOptimizer(self.optimizer(), **(self.options or {}))


def sgd(rate: float = 0.05, **more: Any) -> Any:
    return keras.optimizers.SGD(rate, momentum=0.9, **more)


def adam(**more: Any) -> Any:
    return keras.optimizers.Adam(0.01, **more)


def scaled(inner: Any) -> Any:
    return keras.optimizers.LossScaleOptimizer(inner, initial_scale=64.0)


def everything() -> Any:
    """AdamW with all that comes after the reduction."""
    rate = keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)
    averaged = {"use_ema": True, "ema_overwrite_frequency": 3}
    return keras.optimizers.AdamW(rate, weight_decay=0.1, global_clipnorm=0.05, **averaged)


def summed(rate: float, **more: Any) -> Any:
    return hvd.DistributedOptimizer(sgd(rate, **more), op=hvd.Sum)


TWO = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
CASES = {
    "sgd": Case(sgd),
    "eagerly": Case(sgd, compiled={"run_eagerly": True}),
    "adamw": Case(everything),
    "clipnorm": Case(lambda: sgd(clipnorm=0.05), options={"gradient_predivide_factor": 4.0}),
    "sum": Case(lambda: sgd(0.02, clipvalue=0.01), distributed=lambda: summed(0.01, clipvalue=0.02)),
    "steps_per_execution": Case(adam, compiled={"steps_per_execution": 4}),
    "accumulation": Case(adam, options=TWO, passes=2, compiled={"steps_per_execution": 4}),
    "no_gradient": Case(sgd, unused),
    "embedding": Case(sgd, embedding),
    "embedding_adam": Case(adam, embedding),
    "embedding_accumulation": Case(sgd, embedding, options=TWO, passes=2),
    "scaled_outside": Case(sgd, distributed=lambda: scaled(hvd.DistributedOptimizer(sgd()))),
    "scaled_inside": Case(sgd, distributed=lambda: hvd.DistributedOptimizer(scaled(sgd()))),
    "mixed_float16": Case(sgd, half),
    "compression": Case(sgd, options={"compression": hvd.Compression.fp16}),
    "stock": Case(sgd, distributed=lambda: stock.DistributedOptimizer(sgd())),
}


def data_of(case: Case, rank: int | None) -> tuple[Array, Array]:
    """The rows in the order in which a worker trains on them, or one process with whole batches (None)."""
    drawn = np.random.default_rng(7)
    words = drawn.integers(0, WORDS, (ROWS, 3)).astype(np.int32)
    numbers = drawn.normal(size=(ROWS, 5)).astype(np.float32)
    x, y = words if case.model is embedding else numbers, drawn.normal(size=(ROWS, 1)).astype(np.float32)
    if rank is None:
        return x, y
    order = np.arange(ROWS).reshape(-1, WORKERS, GLOBAL // WORKERS)[:, rank].reshape(-1)
    return x[order], y[order]


def trained(case: Case, optimizer: Any, data: tuple[Array, Array], batch: int) -> list[Array]:
    keras.utils.set_random_seed(3)
    model = case.model()
    model.compile(optimizer=optimizer, loss="mse", **(case.compiled or {}))
    model.fit(*data, batch_size=batch, epochs=EPOCHS, shuffle=False, verbose=0)
    weights: list[Array] = model.get_weights()
    return weights


def digest(weights: list[Array]) -> str:
    return hashlib.sha256(b"".join(weight.tobytes() for weight in weights)).hexdigest()


def skipped_together() -> dict[str, Any]:
    """One worker alone has a gradient that is not finite, on its first batch."""
    data = data_of(CASES["sgd"], hvd.rank())
    if hvd.rank() == 1:
        data[0][0, 0] = np.inf
    optimizer = scaled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)))
    weights = trained(CASES["sgd"], optimizer, data, GLOBAL // WORKERS)
    scale, steps = float(optimizer.dynamic_scale), int(optimizer.iterations)
    return {"digest": digest(weights), "scale": scale, "steps": steps}


def with_callbacks() -> dict[str, Any]:
    """Workers begin with weights of their own, and see losses of their own."""
    keras.utils.set_random_seed(hvd.rank())
    model = dense()
    model.compile(optimizer=hvd.DistributedOptimizer(sgd()), loss="mse")
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(1),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(0.05, warmup_epochs=1),
    ]
    data = data_of(CASES["sgd"], hvd.rank())
    told = model.fit(*data, batch_size=8, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=callbacks)
    return {"digest": digest(model.get_weights()), "history": told.history}


def by_hand() -> dict[str, Any]:
    """A training loop of one's own, with a tape."""
    keras.utils.set_random_seed(3)
    (x, y), model, optimizer = data_of(CASES["sgd"], hvd.rank()), dense(), keras.optimizers.SGD(0.05)
    step = 8
    for begin in range(0, len(x), step):
        tape = hvd.DistributedGradientTape(tf.GradientTape())
        with tape:
            loss = tf.reduce_mean((model(x[begin : begin + step]) - y[begin : begin + step]) ** 2)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
    return {"digest": digest(model.get_weights())}


def weighted(model: Callable[[], Any]) -> dict[str, Any]:
    """Slices of 5 and 3 samples, each with its weight: as one process on batches of 8."""
    case, parts = Case(adam, model), [slice(0, 5), slice(5, 8)]
    mine, whole = parts[hvd.rank()], data_of(Case(adam, model), None)

    def batches(of: slice) -> Iterator[tuple[Array, Array]]:
        for begin in range(0, ROWS, 8):
            yield whole[0][begin : begin + 8][of], whole[1][begin : begin + 8][of]

    optimizer = case.wrapped()
    optimizer.ft_reduction.reducer.set_weight((mine.stop - mine.start) * WORKERS / 8)
    return apart(stepped(case, optimizer, batches(mine)), stepped(case, case.optimizer(), batches(slice(8))))


def stepped(case: Case, optimizer: Any, batches: Iterator[tuple[Array, Array]]) -> list[Array]:
    keras.utils.set_random_seed(3)
    model = case.model()
    model.compile(optimizer=optimizer, loss="mse")
    for x, y in batches:
        model.train_on_batch(x, y)
    weights: list[Array] = model.get_weights()
    return weights


def dealt() -> dict[str, Any]:
    """``fit`` on an ``ElasticDataset``, without a callback: global batches of 7, of which the last one has 1 sample."""
    case, (x, y) = CASES["sgd"], data_of(CASES["sgd"], None)
    weights = fitted(case.wrapped(), hvd.elastic.ElasticDataset(x, y, global_batch_size=7, shuffle=True, seed=2))
    alone = fitted(case.optimizer(), Ordered(x, y))
    return apart(weights, alone)


class Ordered(keras.utils.PyDataset):  # type: ignore[misc]
    """What ``dealt`` deals, whole."""

    def __init__(self, x: Array, y: Array) -> None:
        super().__init__()
        self._order, self._epoch, self._data = EpochOrder(ROWS, shuffle=True, seed=2), -1, (x, y)

    def on_epoch_begin(self) -> None:
        self._epoch += 1

    def __len__(self) -> int:
        return len(range(0, ROWS, 7))

    def __getitem__(self, index: int) -> tuple[Array, Array]:
        ids = self._order(max(self._epoch, 0))[index * 7 : index * 7 + 7]
        return self._data[0][ids], self._data[1][ids]


def fitted(optimizer: Any, data: Any) -> list[Array]:
    keras.utils.set_random_seed(3)
    model = dense()
    model.compile(optimizer=optimizer, loss="mse")
    model.fit(data, epochs=EPOCHS, shuffle=False, verbose=0)
    weights: list[Array] = model.get_weights()
    return weights


def apart(weights: list[Array], alone: list[Array]) -> dict[str, Any]:
    differences = [float(np.abs(one - other).max()) for one, other in zip(weights, alone, strict=True)]
    return {"digest": digest(weights), "apart": max(differences)}


def predicted() -> dict[str, Any]:
    """The predictions of both workers on an ``ElasticDataset``, one after the other."""
    keras.utils.set_random_seed(3)
    model, x = dense(), data_of(CASES["sgd"], None)[0][:13]
    mine = model.predict(hvd.elastic.ElasticDataset(x, global_batch_size=4, shuffle=True), verbose=0)
    together = hvd.allgather(tf.constant(mine)).numpy()
    return {"rows": len(together), "apart": float(np.abs(together - model.predict(x, verbose=0)).max())}


def objects() -> dict[str, Any]:
    """The runtime's collectives."""
    binding, rank = current().binding, hvd.rank()
    asked = [binding.any_async(flags).result() for flags in (0, 1 << rank, 8 * rank)]
    data = np.full(5, rank, dtype=np.uint8)
    binding.broadcast_bytes(data, 1, "bytes")
    gathered = binding.allgather_object({"rank": rank, "text": "x" * (1 + 100 * rank)}, "values")
    received = binding.broadcast_object(["from", rank], 0, "value")
    return {"asked": asked, "data": data.tolist(), "ranks": [one["rank"] for one in gathered], "received": received}


def main() -> None:
    warnings.filterwarnings("ignore", message="Gradients do not exist")
    hvd.init()
    rank = hvd.rank()
    left: dict[str, Any] = {"objects": objects(), "skipped": skipped_together()}
    left |= {"callbacks": with_callbacks(), "by_hand": by_hand(), "dealt": dealt(), "predicted": predicted()}
    left |= {"weighted": weighted(dense), "weighted_rows": weighted(embedding)}
    for index, (name, case) in enumerate(CASES.items()):
        weights = trained(case, case.wrapped(), data_of(case, rank), GLOBAL // WORKERS // case.passes)
        left[name] = {"digest": digest(weights)}
        if index % WORKERS == rank and name != "stock":
            alone = trained(case, case.optimizer(), data_of(case, None), GLOBAL)
            left[name] |= apart(weights, alone)
    (Path(sys.argv[1]) / f"keras-{rank}.json").write_text(json.dumps(left))
    hvd.shutdown()


if __name__ == "__main__":
    main()
