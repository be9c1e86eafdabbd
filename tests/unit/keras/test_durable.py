"""What a Keras training hands to a durable checkpoint comes back bit for bit, through its files too."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from horovod_ft.checkpoint import values
from horovod_ft.checkpoint.partition import plan
from horovod_ft.committer import Committer
from horovod_ft.errors import MismatchError
from horovod_ft.keras.durable import TensorFlowDurable
from horovod_ft.keras.parts import LOCAL, METRICS, RANDOM, RandomState, Variables
from horovod_ft.keras.replica import TensorFlowReplica


class Training:
    """A model with statistics of its own, and a metric."""

    def __init__(self, optimizer: Any = None, seed: int = 1) -> None:
        keras.utils.set_random_seed(seed)
        layers = [keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        self.model = keras.Sequential([keras.Input((2,)), *layers])
        self.model.compile(optimizer=optimizer or keras.optimizers.Adam(0.1), loss="mse")
        self.model.optimizer.build(self.model.trainable_variables)
        self.replica = TensorFlowReplica(lambda: {"model": self.model}, lambda: {"optimizer": self.model.optimizer})
        parts: dict[str, Any] = {
            RANDOM: RandomState(),
            LOCAL: Variables(self.replica.local, replicated=False),
            METRICS: Variables(lambda: self.model.metrics_variables, replicated=True),
        }
        self.committer = Committer(list(parts.values()))
        self.durable = TensorFlowDurable(self.replica, self.committer, parts)

    def train(self, steps: int = 2) -> Training:
        drawn = np.random.default_rng(4)
        for _ in range(steps):
            self.committer.begin()
            self.model.train_on_batch(drawn.normal(size=(4, 2)), drawn.normal(size=(4, 1)))
            self.committer.commit()
        return self

    def everything(self) -> list[list[float]]:
        owned = [variable for _, variable, _ in self.replica.named()]
        return [variable.numpy().reshape(-1).tolist() for variable in (*owned, *self.model.metrics_variables)]


def saved(training: Training, workers: int = 1) -> tuple[dict[str, bytes], bytes, bytes]:
    """Tensors by name, and documents, as they lie in a store."""
    specs = training.durable.tensors()
    whole = {spec.name: bytearray(spec.nbytes) for spec in specs}
    for pieces in plan(specs, workers):
        parts, ready = training.durable.capture(pieces)
        ready()
        for part in parts:
            whole[part.piece.tensor][part.piece.start : part.piece.stop] = part.data
    documents = (values.dump(value)[0] for value in (training.durable.shared(), training.durable.local()))
    return ({name: bytes(data) for name, data in whole.items()}, *documents)  # type: ignore[return-value]


def restore(training: Training, stored: tuple[dict[str, bytes], bytes, bytes]) -> None:
    named, shared, local = stored
    for tensor in training.durable.open(values.load(shared)):
        tensor.data[:] = named[tensor.spec.name]
    training.durable.restored(values.load(shared), values.load(local))


@pytest.mark.parametrize("workers", [1, 3])
def test_everything_comes_back(workers: int) -> None:
    stored = saved(first := Training().train(), workers)
    other = Training(seed=2)
    restore(other, stored)
    assert other.everything() == first.everything()


def test_training_goes_on_from_it_alike() -> None:
    first = Training().train()
    other = Training(seed=2)
    restore(other, saved(first))
    assert other.train(3).everything() == first.train(3).everything()


def test_a_capture_does_not_change_with_the_variables() -> None:
    training = Training().train()
    parts, _ = training.durable.capture(plan(training.durable.tensors(), 1)[0])
    before = [bytes(part.data) for part in parts]
    training.train()
    assert [bytes(part.data) for part in parts] == before


def test_local_is_of_the_last_commit_when_training_ends_within_a_step() -> None:
    training = Training().train()
    before = repr(training.durable.local())
    training.committer.begin()
    training.model(np.ones((4, 2), np.float32), training=True)  # statistics
    np.random.random()
    assert repr(training.durable.local()) == before
    training.committer.commit()
    assert repr(training.durable.local()) != before


def test_a_checkpoint_of_another_optimizer_is_refused() -> None:
    stored = saved(Training().train())
    with pytest.raises(MismatchError, match="optimizers"):
        restore(Training(keras.optimizers.SGD(0.1)), stored)


def test_what_was_saved_from_something_else_is_refused() -> None:
    with pytest.raises(MismatchError, match="TensorFlowState"):
        Training().durable.open({"epoch": 3})


def test_versions_are_told() -> None:
    assert {"tensorflow", "keras", "horovod"} == set(Training().durable.versions)
