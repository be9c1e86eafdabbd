"""The callbacks of Horovod, on Keras 3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import horovod_ft.keras as hvd
from horovod_ft.errors import ConfigurationError
from horovod_ft.keras import callbacks as module

STEPS, EPOCHS = 4, 3


def model(*more: Any) -> Any:
    return keras.Sequential([keras.Input((2,)), *more, keras.layers.Dense(1)])


def compiled(optimizer: Any = None, *more: Any) -> Any:
    made = model(*more)
    made.compile(optimizer=optimizer or keras.optimizers.SGD(0.1), loss="mse")
    return made


def fit(trained: Any, *callbacks: Any, epochs: int = EPOCHS) -> Any:
    data = np.ones((STEPS * 2, 2), np.float32), np.ones((STEPS * 2, 1), np.float32)
    return trained.fit(*data, batch_size=2, epochs=epochs, verbose=0, callbacks=list(callbacks))


class Rates(keras.callbacks.Callback):  # type: ignore[misc]
    """Learning rates with which batches are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(round(float(self.model.optimizer.learning_rate), 6))


@pytest.fixture
def two_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horovod.tensorflow.size", lambda: 2)


# --- variables -----------------------------------------------------------------------------------------------------


@pytest.fixture
def broadcast(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], int]]:
    """What was broadcast, and from whom."""
    calls: list[tuple[list[str], int]] = []
    monkeypatch.setattr(
        module, "broadcast_variables", lambda given, root: calls.append(([v.path.split("/")[-1] for v in given], root))
    )
    return calls


def test_model_and_optimizer_are_broadcast_once_before_the_first_step(
    broadcast: list[tuple[list[str], int]],
) -> None:
    class First(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            assert len(broadcast) == 1

    fit(compiled(keras.optimizers.SGD(0.1, momentum=0.9)), hvd.callbacks.BroadcastGlobalVariablesCallback(1), First())
    ((names, root),) = broadcast
    assert root == 1
    assert {"kernel", "bias", "iteration", "learning_rate"} <= set(names)
    assert sum(name.endswith("momentum") for name in names) == 2


def test_what_is_built_late_is_broadcast_after_the_first_batch(broadcast: list[tuple[list[str], int]]) -> None:
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    late = keras.Sequential([keras.layers.Dense(1)])
    late.compile(optimizer="sgd", loss="mse")
    callback.set_model(late)
    callback.on_train_begin()
    assert broadcast == []
    callback.on_train_batch_end(0)
    callback.on_train_batch_end(1)
    assert len(broadcast) == 1


def test_random_generators_stay_each_workers_own(broadcast: list[tuple[list[str], int]]) -> None:
    fit(compiled(None, keras.layers.Dropout(0.5)), hvd.callbacks.BroadcastGlobalVariablesCallback(0))
    ((names, _),) = broadcast
    assert "seed_generator_state" not in names


def test_local_variables_stay_each_workers_own(broadcast: list[tuple[list[str], int]]) -> None:
    trained = compiled()
    kernel, bias = trained.trainable_variables
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[kernel])
    callback.register_local_var(bias)
    fit(trained, callback)
    ((names, _),) = broadcast
    assert {"kernel", "bias"}.isdisjoint(names)


def test_a_real_broadcast_keeps_the_values_of_a_single_worker() -> None:
    trained = compiled()
    before = trained.get_weights()[0].tolist()
    trained.optimizer.learning_rate = 0.0
    fit(trained, hvd.callbacks.BroadcastGlobalVariablesCallback(0))
    assert trained.get_weights()[0].tolist() == before


# --- metrics -------------------------------------------------------------------------------------------------------


def test_metrics_are_averaged_for_the_callbacks_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_mean", lambda values: values * 2.0)
    logs = {"loss": 1.0, "accuracy": np.float32(0.5), "note": "text"}
    hvd.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    assert logs == {"loss": 2.0, "accuracy": 1.0, "note": "text"}


def test_history_has_the_averages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_mean", lambda values: values * 0.0 + 7.0)
    history = fit(compiled(), hvd.callbacks.MetricAverageCallback(), epochs=1)
    assert history.history["loss"] == [7.0]


@pytest.mark.parametrize("logs", [None, {}])
def test_without_metrics_nothing_is_averaged(logs: Any) -> None:
    hvd.callbacks.MetricAverageCallback().on_epoch_end(0, logs)


def test_metrics_of_a_single_worker_are_their_own_average() -> None:
    logs = {"loss": 0.1}
    hvd.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    assert logs == {"loss": 0.1}


# --- learning rates ------------------------------------------------------------------------------------------------


def test_a_staircase_of_powers() -> None:
    rates = Rates()
    callback = hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5, start_epoch=1)
    history = fit(compiled(), callback, rates)
    assert rates.seen == [0.1] * 8 + [0.05] * 4
    assert history.history["lr"] == pytest.approx([0.1, 0.1, 0.05])


def test_a_smooth_schedule_is_by_batch() -> None:
    rates = Rates()
    fit(compiled(), hvd.callbacks.LearningRateScheduleCallback(1.0, lambda epoch: epoch, staircase=False), rates)
    assert rates.seen == [batch / STEPS for batch in range(STEPS * EPOCHS)]


def test_a_schedule_ends() -> None:
    rates = Rates()
    fit(compiled(), hvd.callbacks.LearningRateScheduleCallback(0.2, lambda epoch: 1.0 + epoch, end_epoch=2), rates)
    assert rates.seen == [0.2] * 4 + [0.4] * 8


@pytest.mark.parametrize("around", [lambda inner: inner, keras.optimizers.LossScaleOptimizer], ids=["plain", "scaled"])
def test_momentum_follows_the_learning_rate(around: Any) -> None:
    inner = keras.optimizers.SGD(0.1, momentum=0.9)
    trained = compiled(around(inner))
    fit(trained, epochs=1)
    before = [summed.numpy() for summed in inner.momentums]
    callback = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 3.0)
    callback.set_model(trained)
    callback.on_train_batch_begin(0)
    for summed, old in zip(inner.momentums, before, strict=True):
        assert summed.numpy() == pytest.approx(old * 3.0)


def test_momentum_can_be_left_as_it_is() -> None:
    trained = compiled(keras.optimizers.SGD(0.1, momentum=0.9))
    fit(trained, epochs=1)
    before = [summed.numpy().tolist() for summed in trained.optimizer.momentums]
    callback = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 3.0, momentum_correction=False)
    callback.set_model(trained)
    callback.on_train_batch_begin(0)
    assert [summed.numpy().tolist() for summed in trained.optimizer.momentums] == before


def test_warmup_ends_at_the_learning_rate(two_workers: None, capsys: pytest.CaptureFixture[str]) -> None:
    rates = Rates()
    fit(compiled(), hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2, verbose=1), rates)
    assert rates.seen == pytest.approx([0.2 + 0.025 * step for step in range(1, 9)] + [0.4] * 4)
    assert "Epoch 2: finished gradual learning rate warmup to 0.4." in capsys.readouterr().out


def test_a_smooth_schedule_needs_steps() -> None:
    callback = hvd.callbacks.LearningRateScheduleCallback(1.0, 0.5, staircase=False)
    callback.set_params({"steps": None})
    with pytest.raises(ConfigurationError, match="needs steps_per_epoch"):
        callback.on_train_begin()


def test_an_initial_learning_rate_is_needed() -> None:
    nothing: Any = None
    with pytest.raises(ConfigurationError, match="needs initial_lr"):
        hvd.callbacks.LearningRateWarmupCallback(nothing)


# --- saved models --------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras, when it saves a model
def test_a_loaded_model_is_distributed_again_and_goes_on(tmp_path: Path) -> None:
    trained = compiled(keras.optimizers.Adam(0.1))
    fit(trained, epochs=1)
    trained.save(tmp_path / "model.keras")
    loaded = hvd.load_model(tmp_path / "model.keras", backward_passes_per_step=2)
    assert isinstance(loaded.optimizer, keras.optimizers.Adam)
    assert loaded.optimizer.ft_reduction.accumulation.passes == 2
    assert int(loaded.optimizer.iterations) == STEPS
    fit(loaded, epochs=1)
    assert int(loaded.optimizer.iterations) == STEPS + STEPS // 2


def test_keras_3_has_no_legacy_optimizers(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no legacy optimizers"):
        hvd.load_model(tmp_path / "model.keras", legacy_opts=True)
