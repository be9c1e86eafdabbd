"""The places in Keras's ``fit`` that call a callback which makes training fault tolerant, and when."""

from __future__ import annotations

import gc
from typing import Any

import keras
import numpy as np
import pytest
from keras.src.backend.tensorflow.trainer import TFEpochIterator
from keras.src.callbacks.callback_list import CallbackList

from horovod_ft.keras import fit_hooks

X = np.zeros((8, 1), np.float32)


class Noting(keras.callbacks.Callback):  # type: ignore[misc]
    """Any other callback."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def on_train_begin(self, logs: Any = None) -> None:
        self.seen.append("train begins")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen.append("epoch ends")

    def on_train_end(self, logs: Any = None) -> None:
        self.seen.append("train ends")


class Guarding(keras.callbacks.Callback):  # type: ignore[misc]
    """What the hooks call."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen
        self.callbacks: list[Any] = []
        self.iterator: Any = None

    def ft_check(self, callbacks: Any) -> None:
        self.seen.append("check")

    def ft_begin(self, callbacks: Any) -> None:
        self.seen.append("begin")
        self.callbacks = list(callbacks)
        self.iterator = fit_hooks.newest_iterator()
        self.running = fit_hooks.is_running(self.iterator)

    def ft_epoch_end(self, epoch: int, logs: Any) -> None:
        self.seen.append("guard's epoch ends")
        logs["agreed"] = 5.0

    def ft_end(self) -> None:
        self.seen.append("end")

    def ft_over(self) -> None:
        self.seen.append("over")


@pytest.fixture(autouse=True)
def _hooks() -> None:
    fit_hooks.install()


def fit(*callbacks: Any) -> Any:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model.fit(X, X, batch_size=4, verbose=0, callbacks=list(callbacks))


@pytest.mark.parametrize("first", [False, True])
def test_it_acts_before_all_others_wherever_it_is_in_the_list(first: bool) -> None:
    seen: list[str] = []
    both = [Guarding(seen), Noting(seen)]
    told = fit(*(both if first else reversed(both)))
    begins, ends = ["check", "train begins", "begin"], ["end", "train ends", "over"]
    assert seen == [*begins, "guard's epoch ends", "epoch ends", *ends]
    assert told.history["agreed"] == [5.0]  # the history, too, gets what was agreed on


@pytest.mark.parametrize("when", ["on_train_begin", "on_train_end"])
def test_it_knows_that_training_is_over_when_another_one_fails(when: str) -> None:
    def failing(logs: Any) -> None:
        raise KeyError(when)

    seen: list[str] = []
    with pytest.raises(KeyError):
        fit(Guarding(seen), keras.callbacks.LambdaCallback(**{when: failing}))
    assert seen[-1] == "over"


def test_it_knows_the_epochs_of_its_fit() -> None:
    guard = Guarding([])
    fit(guard)
    assert isinstance(guard.iterator, TFEpochIterator)
    assert guard.running
    assert not fit_hooks.is_running(guard.iterator)


def test_the_epochs_of_a_fit_that_is_over_are_not_kept() -> None:
    fit()
    gc.collect()
    assert fit_hooks.newest_iterator() is None


def test_a_fit_without_it_is_keras_own() -> None:
    seen: list[str] = []
    told = fit(Noting(seen))
    assert seen == ["train begins", "epoch ends", "train ends"]
    assert list(told.history) == ["loss"]


def test_hooks_are_installed_once() -> None:
    before = TFEpochIterator.__init__, CallbackList.on_train_begin, CallbackList.on_epoch_end, CallbackList.on_train_end
    fit_hooks.install()
    after = TFEpochIterator.__init__, CallbackList.on_train_begin, CallbackList.on_epoch_end, CallbackList.on_train_end
    assert after == before
