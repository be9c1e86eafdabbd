"""``FaultToleranceCallback`` in a job of one worker: a fit ends as ever, and what cannot work is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import horovod.tensorflow
import keras
import numpy as np
import pytest
import tensorflow as tf

import horovod_ft.keras as hvd
from horovod_ft import runtime
from horovod_ft.data import EpochOrder
from horovod_ft.errors import ConfigurationError, PolicyError
from horovod_ft.keras import callback

drawn = np.random.default_rng(7)
X = drawn.normal(size=(20, 3)).astype(np.float32)
Y = (X[:, :1] * X[:, 1:2]).astype(np.float32)


@pytest.fixture(autouse=True)
def _runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A runtime of its own for each test, on the Horovod that this folder shares."""
    monkeypatch.setattr(horovod.tensorflow, "init", lambda *_, **__: None)
    monkeypatch.setattr(runtime._Process, "runtime", None)
    hvd.init()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the model is compiled with jit_compile=False")
        yield


def compiled(*, optimizer: Any = None, **options: Any) -> Any:
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    chosen = optimizer or hvd.DistributedOptimizer(keras.optimizers.Adam(0.05))
    model.compile(optimizer=chosen, loss="mse", metrics=["mae"], **options)
    return model


def dealt() -> Any:
    return hvd.elastic.ElasticDataset(X, Y, global_batch_size=6, shuffle=True, seed=5)


def alone(epochs: int, optimizer: Any = None, **options: Any) -> tuple[Any, dict[str, list[float]]]:
    """The same training in one process, without Horovod."""
    chosen = optimizer or keras.optimizers.Adam(0.05)
    model, order = compiled(optimizer=chosen, **options), EpochOrder(20, shuffle=True, seed=5)
    chosen.build(model.trainable_variables)  # inside of its first step Keras loses the first values of some variables
    told: dict[str, list[float]] = {}
    for epoch in range(epochs):
        ids = order(epoch)
        history = model.fit(X[ids], Y[ids], batch_size=6, shuffle=False, verbose=0, validation_data=(X[:8], Y[:8]))
        for name, values in history.history.items():
            told.setdefault(name, []).extend(values)
    return model, told


def fit(model: Any, data: Any = None, epochs: int = 3, callbacks: list[Any] | None = None, **options: Any) -> Any:
    guard = hvd.elastic.FaultToleranceCallback()
    given = (dealt(),) if data is None else data
    return model.fit(*given, epochs=epochs, verbose=0, callbacks=[guard, *(callbacks or [])], **options)


@pytest.mark.parametrize(
    "options", [{}, {"steps_per_execution": 3}, {"run_eagerly": True}], ids=["", "steps_per_execution", "run_eagerly"]
)
def test_a_fit_ends_as_it_does_without(options: dict[str, Any]) -> None:
    model = compiled(**options)
    history = fit(model, validation_data=(X[:8], Y[:8])).history
    expected, told = alone(3)
    for one, other in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    assert history.keys() == told.keys()
    for name in told:
        assert history[name] == pytest.approx(told[name], rel=1e-4)


def by_kind_of_variable() -> Any:
    """Two optimizers in one."""
    kernels, others = keras.optimizers.SGD(0.01, momentum=0.9), keras.optimizers.Adam(0.01)
    return keras.optimizers.MultiOptimizer(lambda variable: kernels if "kernel" in variable.path else others)


#: All that Keras has, but for those that are put around others.
AROUND = (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer, keras.optimizers.MultiOptimizer)
OPTIMIZERS = {
    name: lambda kind=kind: kind(0.01)
    for name, kind in vars(keras.optimizers).items()
    if isinstance(kind, type) and issubclass(kind, keras.optimizers.Optimizer) and kind not in AROUND
}


@pytest.mark.parametrize("made", [*OPTIMIZERS.values(), by_kind_of_variable], ids=[*OPTIMIZERS, "MultiOptimizer"])
def test_it_works_with_every_optimizer_of_keras(made: Callable[[], Any]) -> None:
    model = compiled(optimizer=hvd.DistributedOptimizer(made()))
    fit(model, epochs=1)
    expected, _ = alone(1, made())
    pairs = zip(model.optimizer.variables, expected.optimizer.variables, strict=True)
    for one, other in (*pairs, *zip(model.variables, expected.variables, strict=True)):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-4, atol=1e-6)


def test_all_optimizers_of_keras_are_known() -> None:
    assert len(OPTIMIZERS) >= 13


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")  # Keras, when it learns how many there are
@pytest.mark.parametrize("kind", ["arrays", "dataset", "unknown", "generator"])
def test_other_data_works_too(kind: str) -> None:
    """Also a ``tf.data.Dataset`` or a generator that does not say how many batches it has."""
    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(6)
    endless = ((X[begin : begin + 6], Y[begin : begin + 6]) for _ in range(9) for begin in range(0, 20, 6))
    given: dict[str, tuple[Any, dict[str, Any]]] = {
        "arrays": ((X, Y), {"batch_size": 6}),
        "dataset": ((batches,), {"shuffle": False}),
        "unknown": ((batches.filter(lambda x, y: True),), {"shuffle": False}),
        "generator": ((endless,), {"shuffle": False, "steps_per_epoch": 4}),
    }
    data, options = given[kind]
    model = compiled()
    assert len(fit(model, data, **options).history["loss"]) == 3
    assert int(model.optimizer.iterations) == 3 * 4


def test_a_progress_bar_counts_batches_of_the_group(capsys: pytest.CaptureFixture[str]) -> None:
    compiled().fit(dealt(), epochs=2, callbacks=[hvd.elastic.FaultToleranceCallback()])
    printed = capsys.readouterr().out
    assert "Epoch 2/2" in printed
    assert printed.count("4/4") >= 2


def test_accumulation_goes_on_over_the_end_of_an_epoch() -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), backward_passes_per_step=3)
    model = compiled(optimizer=optimizer)
    fit(model, epochs=3)
    assert int(model.optimizer.iterations) == 3 * 4 // 3


def test_callbacks_see_each_batch_of_each_epoch_once() -> None:
    seen: list[tuple[str, int]] = []
    watch = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: seen.append(("epoch", epoch)),
        on_train_batch_end=lambda batch, logs: seen.append(("batch", batch)),
    )
    fit(compiled(), epochs=2, callbacks=[watch])
    assert seen == [(kind, number) for epoch in range(2)
                    for kind, number in [("epoch", epoch), *(("batch", batch) for batch in range(4))]]  # fmt: skip


def test_what_trains_next_is_no_slice_of_a_batch() -> None:
    model = compiled()
    reducer = model.optimizer.ft_reduction.reducer
    slices = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: reducer.set_weight(0.5))
    fit(model, callbacks=[slices])
    assert [float(one) for one in reducer.weighted([tf.constant(2.0)])] == [2.0]


def test_training_may_stop_early() -> None:
    stop = keras.callbacks.EarlyStopping("loss", min_delta=10.0, patience=1)
    assert len(fit(compiled(), epochs=5, callbacks=[stop]).history["loss"]) == 2


def test_the_first_epoch_may_be_a_later_one() -> None:
    dataset = dealt()
    history = fit(compiled(), (dataset,), epochs=5, initial_epoch=3)
    assert history.epoch == [3, 4]
    assert dataset.cursor.epoch == 4


def test_the_model_can_be_fitted_again_with_and_without() -> None:
    model = compiled()
    fit(model, epochs=1)
    fit(model, epochs=1)
    model.fit(X, Y, batch_size=10, verbose=0)
    assert int(model.optimizer.iterations) == 4 + 4 + 2


def test_a_model_is_built_from_its_data() -> None:
    model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), loss="mse")
    fit(model, (X, Y), batch_size=5, epochs=1)
    assert model.built


class Boom(keras.callbacks.Callback):  # type: ignore[misc]
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        raise KeyError("of the user's own")


def test_an_error_of_the_users_ends_the_fit_and_not_the_next_one() -> None:
    model = compiled()
    with pytest.raises(KeyError, match="of the user's own"):
        fit(model, callbacks=[Boom()])
    fit(model, epochs=1)


# --- what is refused -------------------------------------------------------------------------------------------------


def test_an_optimizer_that_is_not_distributed_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"hvd\.DistributedOptimizer"):
        fit(compiled(optimizer=keras.optimizers.SGD()))


def test_two_of_them_in_one_fit_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="more than one"):
        fit(compiled(), callbacks=[hvd.elastic.FaultToleranceCallback()])


def test_a_fit_inside_of_a_fit_is_refused() -> None:
    class Inner(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            fit(compiled())

    with pytest.raises(ConfigurationError, match="inside of another"):
        fit(compiled(), callbacks=[Inner()])


def test_xla_is_refused() -> None:
    model = compiled(optimizer=keras.optimizers.SGD(0.05), jit_compile=True)
    hvd.DistributedOptimizer(model.optimizer)
    with pytest.raises(ConfigurationError, match="jit_compile=False"):
        fit(model)


def test_steps_per_epoch_has_no_meaning_with_an_elastic_dataset() -> None:
    with pytest.raises(ConfigurationError, match="steps_per_epoch"):
        fit(compiled(), steps_per_epoch=2)


def test_an_unknown_policy_is_refused_at_once() -> None:
    with pytest.raises(PolicyError):
        hvd.elastic.FaultToleranceCallback(policy="nonsense")


def test_a_guard_is_a_replica_guard() -> None:
    with pytest.raises(ConfigurationError, match=r"guard is 100; it must be an hvd\.elastic\.ReplicaGuard"):
        hvd.elastic.FaultToleranceCallback(guard=100)  # type: ignore[arg-type]


def test_outside_of_fit_it_is_refused() -> None:
    model = compiled()
    with pytest.raises(ConfigurationError, match=r"inside of model\.fit"):
        keras.callbacks.CallbackList([hvd.elastic.FaultToleranceCallback()], model=model).on_train_begin()


def two_fits(places: list[Any], *, broken: bool = False, frozen: bool = True) -> tuple[Any, list[Any]]:
    """Training in two phases, the first layer frozen in the second one. Returns the model and both histories."""

    def die(epoch: int, logs: Any) -> None:
        if broken and epoch == 1:
            raise SystemExit(1)

    model, histories = compiled(), []
    for phase, place in enumerate(places):
        model.layers[0].trainable = not (phase and frozen)
        model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.05)), loss="mse")
        callbacks = [hvd.elastic.FaultToleranceCallback(checkpoint=hvd.elastic.Checkpoints(place, every=1))]
        if phase:
            callbacks.append(keras.callbacks.LambdaCallback(on_epoch_begin=die))
        histories.append(model.fit(dealt(), epochs=3, verbose=0, callbacks=callbacks))
    return model, histories


def test_a_second_fit_in_the_place_of_the_first_says_that_it_goes_on_from_that(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"from step 12, .* give each fit a place of its own"):
        two_fits([tmp_path, tmp_path], frozen=False)


def test_two_fits_with_a_place_each_go_on_where_the_script_was_cut_off(tmp_path: Path) -> None:
    expected, told = two_fits([tmp_path / "whole 1", tmp_path / "whole 2"])
    places = [tmp_path / "1", tmp_path / "2"]
    with pytest.raises(SystemExit):
        two_fits(places, broken=True)
    callback._Active.saved_in.clear()  # as in a new process
    model, histories = two_fits(places)
    assert [history.history for history in histories] == [history.history for history in told]
    for one, other in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
