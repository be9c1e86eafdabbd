"""``KerasState``: commits of weights, optimizer and values, by hand; and ``elastic.run`` on it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

import horovod_ft.keras as hvd
from horovod_ft.errors import ConfigurationError
from horovod_ft.events import EventBus
from horovod_ft.faults.inject import Injector
from horovod_ft.keras import state as module
from horovod_ft.keras.elastic import KerasState, run
from horovod_ft.membership.base import Group


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    def group() -> Group:
        return Group(0, 1, 0)

    runtime = SimpleNamespace(
        group=group, membership=None, bus=None, injector=Injector((), 0, "localhost", EventBus("worker")), ledger=None,
        settings=SimpleNamespace(attempt=0, timeout_s=1.0),
    )  # fmt: skip
    monkeypatch.setattr(module, "current", lambda: runtime)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), "mse")
    return model


def train(model: Any) -> None:
    model.fit(np.ones((2, 1), np.float32), np.ones((2, 1), np.float32), batch_size=1, verbose=0)


def values(model: Any) -> list[Any]:
    return [variable.numpy().tolist() for variable in (*model.variables, *model.optimizer.variables)]


def test_an_optimizer_that_is_not_built_is_built(model: Any) -> None:
    KerasState(model, epoch=0)
    assert model.optimizer.built


def test_restoring_goes_back_to_what_was_saved(model: Any) -> None:
    state = KerasState(model, epoch=0)
    train(model)
    state.epoch = 3
    state.save()
    saved = values(model)
    train(model)
    state.epoch = 4
    assert values(model) != saved
    state.restore()
    assert values(model) == saved
    assert state.epoch == 3


def test_what_was_saved_can_be_restored_again(model: Any) -> None:
    state = KerasState(model)
    before = values(model)
    for _ in range(2):
        train(model)
        state.restore()
        assert values(model) == before


def test_a_model_that_is_not_built_is_refused(model: Any) -> None:
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    unbuilt.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    with pytest.raises(ConfigurationError, match=r"model\.build"):
        KerasState(unbuilt)


def test_a_training_function_needs_a_state_that_survives() -> None:
    @run
    def train(state: Any) -> None:
        raise AssertionError

    with pytest.raises(ConfigurationError, match="KerasState"):
        train("state")
