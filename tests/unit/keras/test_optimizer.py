"""``DistributedOptimizer``: still the optimizer that it was, with reduced gradients."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.keras
import horovod.tensorflow.keras
import keras
import numpy as np
import pytest
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

import horovod_ft.keras as hvd
from horovod_ft.errors import ConfigurationError
from horovod_ft.keras.operations import HorovodOperations
from horovod_ft.keras.optimizer import distributed_in
from tests.unit.keras.tools import Broken, TwoWorkers

sgd = keras.optimizers.SGD
MODES = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])


def in_two(optimizer: Any, operations: Any = None, **options: Any) -> Any:
    """The distributed optimizer in a group of two, where gradients are reduced to twice the local ones."""
    hvd.DistributedOptimizer(optimizer, **options)
    optimizer.ft_reduction.reducer._operations = operations or TwoWorkers()
    return optimizer


def weight(value: Any = (1.0, 1.0), name: str = "w") -> keras.Variable:
    return keras.Variable(np.array(value, np.float32), name=name)


def stepped(optimizer: Any, gradients: list[Any], graph: bool = False, start: Any = (1.0, 1.0)) -> list[float]:
    """The weight after an update for each gradient."""
    variable = weight(start)
    optimizer.build([variable])
    step = tf.function(lambda g: optimizer.apply([g], [variable])) if graph else lambda g: optimizer.apply([g])
    for gradient in gradients:
        step(tf.constant(gradient))
    values: list[float] = variable.numpy().tolist()
    return values


def model() -> Any:
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


# --- what it is ----------------------------------------------------------------------------------------------------


def test_the_same_object_is_returned() -> None:
    plain = keras.optimizers.Adam()
    assert hvd.DistributedOptimizer(plain) is plain


def test_it_is_what_it_was() -> None:
    wrapped = hvd.DistributedOptimizer(keras.optimizers.Adam(0.25))
    assert isinstance(wrapped, keras.optimizers.Adam)
    assert isinstance(wrapped, keras.optimizers.Optimizer)
    assert float(wrapped.learning_rate) == 0.25
    assert type(wrapped).__name__ == "Adam"


def test_it_is_serialized_as_the_plain_optimizer() -> None:
    told = keras.saving.serialize_keras_object(hvd.DistributedOptimizer(keras.optimizers.Adam(0.25)))
    assert told == {**keras.saving.serialize_keras_object(keras.optimizers.Adam(0.25)), "config": told["config"]}
    back = keras.saving.deserialize_keras_object(told)
    assert type(back) is keras.optimizers.Adam
    assert float(back.learning_rate) == 0.25


def test_an_optimizer_of_the_users_is_serialized_under_its_name() -> None:
    @keras.saving.register_keras_serializable("tests", "Mine")
    class Mine(sgd):  # type: ignore[misc, valid-type]
        pass

    told = keras.saving.serialize_keras_object(hvd.DistributedOptimizer(Mine()))
    assert told["registered_name"] == "tests>Mine"
    assert type(keras.saving.deserialize_keras_object(told)) is Mine


def test_from_config_gives_the_plain_optimizer() -> None:
    wrapped = hvd.DistributedOptimizer(keras.optimizers.Adam(0.25))
    assert type(wrapped.from_config(wrapped.get_config())) is keras.optimizers.Adam


def test_it_cannot_be_copied() -> None:
    with pytest.raises(TypeError, match="cannot be pickled or copied"):
        copy.copy(hvd.DistributedOptimizer(sgd()))


def test_other_optimizers_are_not_touched() -> None:
    hvd.DistributedOptimizer(sgd(1.0))
    assert stepped(sgd(1.0), [[1.0, 0.0]]) == [0.0, 1.0]


# --- gradients -----------------------------------------------------------------------------------------------------


@MODES
def test_an_update_is_of_reduced_gradients(graph: bool) -> None:
    assert stepped(in_two(sgd(1.0)), [[1.0, 0.0]], graph) == [-1.0, 1.0]


def test_apply_gradients_reduces_too() -> None:
    optimizer, variable = in_two(sgd(1.0)), weight()
    optimizer.apply_gradients([(tf.constant([1.0, 0.0]), variable)])
    assert variable.numpy().tolist() == [-1.0, 1.0]


def test_gradients_without_variables_are_in_the_order_of_build() -> None:
    operations = TwoWorkers()
    optimizer, first, second = in_two(sgd(1.0), operations), weight(1.0, "a"), weight(1.0, "b")
    optimizer.build([first, second])
    optimizer.apply([tf.constant(0.0), tf.constant(1.0)])
    assert (float(first), float(second)) == (1.0, -1.0)


def test_names_are_those_of_all_variables_whichever_are_updated() -> None:
    operations = TwoWorkers()
    optimizer, variables = in_two(sgd(1.0), operations), [weight(1.0, "w"), weight(1.0, "w")]
    optimizer.build(variables)
    optimizer.apply([tf.constant(1.0)], variables[1:])
    assert operations.asked == ["gradient.w.1"]


def test_the_users_name_comes_before_those_of_gradients() -> None:
    operations = TwoWorkers()
    stepped(in_two(sgd(1.0), operations, name="generator"), [[1.0, 0.0]])
    assert operations.asked == ["generator.w"]


@MODES
def test_a_variable_without_a_gradient_is_left_alone(graph: bool) -> None:
    optimizer, first, second = in_two(sgd(1.0, weight_decay=0.5)), weight(1.0, "a"), weight(1.0, "b")
    optimizer.build([first, second])

    def step() -> None:
        optimizer.apply([None, tf.constant(1.0)], [first, second])

    with pytest.warns(UserWarning, match="Gradients do not exist for variables"):
        (tf.function(step) if graph else step)()
    assert (float(first), float(second)) == (1.0, -1.5)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (lambda: sgd(1.0, clipvalue=1.5), [-0.5, 1.0]),
        (lambda: sgd(1.0, clipnorm=1.0), [0.0, 1.0]),
        (lambda: sgd(1.0, global_clipnorm=1.0), [0.0, 1.0]),
        (lambda: sgd(1.0, loss_scale_factor=2.0), [0.0, 1.0]),
        (lambda: sgd(keras.optimizers.schedules.PiecewiseConstantDecay([0], [1.0, 0.5])), [-1.0, 1.0]),
        (lambda: sgd(1.0, weight_decay=0.5), [-1.5, 0.5]),
    ],
    ids=["clipvalue", "clipnorm", "global_clipnorm", "loss_scale_factor", "schedule", "weight_decay"],
)
def test_what_keras_does_with_gradients_it_does_with_reduced_ones(
    optimizer: Callable[[], Any], expected: list[float]
) -> None:
    assert stepped(in_two(optimizer()), [[1.0, 0.0]]) == pytest.approx(expected)


@MODES
def test_a_broken_group_leaves_everything_untouched(graph: bool) -> None:
    optimizer, variables = in_two(sgd(1.0, momentum=0.9), Broken()), [weight(1.0, "a"), weight(1.0, "b")]
    optimizer.build(variables)
    before = [value.numpy() for value in (*variables, *optimizer.variables)]

    def step() -> None:
        optimizer.apply([tf.constant(1.0), tf.constant(1.0)], variables)

    with pytest.raises(tf.errors.UnknownError if graph else HorovodInternalError, match="Horovod has been shut down"):
        (tf.function(step) if graph else step)()
    assert [value.numpy() for value in (*variables, *optimizer.variables)] == before
    assert not optimizer.ft_reduction.done


def test_after_a_broken_group_gradients_are_reduced_again() -> None:
    optimizer, variable = in_two(sgd(1.0), Broken()), weight()
    optimizer.ft_reduction.reducer._operations.asked.append("the first")
    optimizer.build([variable])
    with pytest.raises(HorovodInternalError):
        optimizer.apply([tf.constant([1.0, 0.0])])
    optimizer.ft_reduction.reducer._operations = TwoWorkers()
    optimizer.ft_reduction.reducer._graph = tf.function(optimizer.ft_reduction.reducer._reduce)
    optimizer.apply([tf.constant([1.0, 0.0])])
    assert variable.numpy().tolist() == [-1.0, 1.0]


def test_an_optimizer_that_is_not_built_says_so_as_keras_does() -> None:
    with pytest.raises(ValueError, match="must already be built"):
        in_two(sgd(1.0)).apply([tf.constant(1.0)])


def test_no_gradients_are_no_update() -> None:
    optimizer = in_two(sgd(1.0))
    optimizer.apply([], [])
    assert int(optimizer.iterations) == 0


# --- several backward passes ---------------------------------------------------------------------------------------


@MODES
def test_passes_are_summed_up_locally(graph: bool) -> None:
    optimizer = in_two(sgd(1.0), backward_passes_per_step=2)
    assert stepped(optimizer, [[1.0, 0.0]], graph) == [1.0, 1.0]
    variable = weight()
    optimizer = in_two(sgd(1.0), backward_passes_per_step=2)
    optimizer.build([variable])
    for gradient in ([1.0, 0.0], [0.5, 1.0], [9.0, 9.0]):
        optimizer.apply([tf.constant(gradient)])
    assert variable.numpy().tolist() == [-2.0, -1.0]


@MODES
def test_the_sum_of_passes_can_be_averaged(graph: bool) -> None:
    options = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
    assert stepped(in_two(sgd(1.0), **options), [[1.0, 0.0], [0.5, 1.0]], graph) == [-0.5, 0.0]


@MODES
def test_sums_begin_anew_after_an_update(graph: bool) -> None:
    optimizer = in_two(sgd(1.0), backward_passes_per_step=2)
    assert stepped(optimizer, [[1.0, 0.0]] * 4, graph, start=(0.0, 0.0)) == [-8.0, 0.0]


@MODES
def test_each_pass_counts_by_the_weight_that_it_has_then(graph: bool) -> None:
    optimizer, variable = in_two(sgd(1.0), backward_passes_per_step=2), weight((0.0, 0.0))
    optimizer.build([variable])
    apply = (tf.function if graph else lambda function: function)(lambda gradient: optimizer.apply([gradient]))
    for factor, gradient in ((0.5, [2.0, 0.0]), (1.0, [0.0, 3.0])):
        optimizer.ft_reduction.reducer.set_weight(factor)
        apply(tf.constant(gradient))
    assert variable.numpy().tolist() == [-2.0, -6.0]


def test_iterations_count_updates() -> None:
    optimizer = in_two(sgd(1.0), backward_passes_per_step=2)
    stepped(optimizer, [[1.0, 0.0]] * 5)
    assert int(optimizer.iterations) == 2


def test_sums_are_not_saved() -> None:
    plain, wrapped = sgd(1.0, momentum=0.9), in_two(sgd(1.0, momentum=0.9), backward_passes_per_step=2)
    stepped(wrapped, [[1.0, 0.0]])
    stepped(plain, [[1.0, 0.0]])
    assert len(wrapped.variables) == len(plain.variables)


def test_rows_are_summed_up_as_dense_gradients() -> None:
    optimizer, table = in_two(sgd(1.0), backward_passes_per_step=2), weight(np.zeros((3, 2)))
    optimizer.build([table])
    for row in (0, 2):
        optimizer.apply([tf.IndexedSlices(tf.ones([1, 2]), tf.constant([row]), tf.constant([3, 2]))])
    assert table.numpy().tolist() == [[-2.0, -2.0], [0.0, 0.0], [-2.0, -2.0]]


def test_what_had_no_gradient_in_any_pass_has_none_in_the_update() -> None:
    optimizer, variables = in_two(sgd(1.0), backward_passes_per_step=2), [weight(1.0, "a"), weight(1.0, "b")]
    optimizer.build(variables)
    optimizer.apply([None, tf.constant(1.0)], variables)
    with pytest.warns(UserWarning, match="Gradients do not exist for variables"):
        optimizer.apply([None, tf.constant(1.0)], variables)
    assert [float(variable) for variable in variables] == [1.0, -3.0]


def test_an_optimizer_that_was_built_before_can_sum_up() -> None:
    optimizer, variable = sgd(1.0), weight()
    optimizer.build([variable])
    in_two(optimizer, backward_passes_per_step=1 + 1)
    for _ in range(2):
        optimizer.apply([tf.constant([1.0, 0.0])])
    assert variable.numpy().tolist() == [-3.0, 1.0]


# --- loss scales ---------------------------------------------------------------------------------------------------


def scaled(inner: Any) -> Any:
    return keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0)


WRAPPED = pytest.mark.parametrize(
    "wrapped", [lambda: scaled(in_two(sgd(1.0))), lambda: in_two(scaled(sgd(1.0)))], ids=["inside", "outside"]
)


@WRAPPED
@MODES
def test_reduced_gradients_are_scaled_back(wrapped: Callable[[], Any], graph: bool) -> None:
    assert stepped(wrapped(), [[4.0, 0.0]], graph) == [-1.0, 1.0]


class Overflown(TwoWorkers):
    """The other worker has a gradient that is not finite."""

    def allreduce(self, tensor: Any, name: str, op: Any, prescale: float, postscale: float) -> Any:
        return tensor * np.inf


@pytest.mark.parametrize(
    "wrapped",
    [lambda: scaled(in_two(sgd(1.0), Overflown())), lambda: in_two(scaled(sgd(1.0)), Overflown())],
    ids=["inside", "outside"],
)
@MODES
def test_an_update_is_left_out_if_any_workers_gradient_is_not_finite(wrapped: Callable[[], Any], graph: bool) -> None:
    optimizer = wrapped()
    assert stepped(optimizer, [[4.0, 1.0]], graph) == [1.0, 1.0]
    assert float(optimizer.dynamic_scale) == 2.0


def test_the_gradients_of_a_scaled_optimizer_are_reduced_once() -> None:
    operations = TwoWorkers()
    stepped(scaled(in_two(sgd(1.0), operations)), [[4.0, 0.0]])
    assert operations.asked == ["gradient.w"]


def test_a_plain_optimizer_with_loss_scales_is_as_it_was() -> None:
    in_two(sgd(1.0))
    assert stepped(scaled(sgd(1.0)), [[4.0, 0.0]]) == [0.0, 1.0]


# --- models --------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras, when it saves a model
@pytest.mark.parametrize("around", [lambda inner: inner, scaled], ids=["it", "one around it"])
def test_a_saved_model_holds_the_plain_optimizer(tmp_path: Path, around: Callable[[Any], Any]) -> None:
    trained = model()
    trained.compile(optimizer=around(in_two(keras.optimizers.Adam(0.25))), loss="mse")
    trained.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    trained.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(getattr(loaded.optimizer, "inner_optimizer", loaded.optimizer)) is keras.optimizers.Adam
    saved = [variable.numpy().tolist() for variable in trained.optimizer.variables]
    assert [variable.numpy().tolist() for variable in loaded.optimizer.variables] == saved


def test_xla_is_left_out_with_a_reason() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        compiled = model()
        compiled.compile(optimizer=hvd.DistributedOptimizer(sgd()), loss="mse", jit_compile=True)
    assert compiled.jit_compile is False
    assert any("XLA cannot compile Horovod's operations" in str(warning.message) for warning in said)


def test_xla_is_left_out_where_keras_would_choose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Accelerator:
        device_type = "GPU"

    monkeypatch.setattr(tf.config, "list_physical_devices", lambda *_: [Accelerator()])
    compiled = model()
    with pytest.warns(UserWarning, match="XLA cannot compile Horovod's operations"):
        compiled.compile(optimizer=hvd.DistributedOptimizer(sgd()), loss="mse")
    assert compiled.jit_compile is False


def test_a_model_with_loss_scales_is_not_compiled_with_xla_either() -> None:
    compiled = model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled.compile(optimizer=scaled(hvd.DistributedOptimizer(sgd())), loss="mse", jit_compile=True)
    assert compiled.jit_compile is False


def test_a_plain_model_is_compiled_with_xla_as_before() -> None:
    hvd.DistributedOptimizer(sgd())
    compiled = model()
    compiled.compile(optimizer=sgd(), loss="mse", jit_compile=True)
    assert compiled.jit_compile is True


# --- two optimizers in a step ----------------------------------------------------------------------------------------


class Two(keras.Model):  # type: ignore[misc]
    """Two models with equal paths, each with an optimizer of its own: ``train_step`` applies both, as that of a GAN."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.both = [model(), model()]
        self.optimizers = [hvd.DistributedOptimizer(sgd(0.1), **options) for _ in self.both]

    def call(self, x: Any) -> Any:
        return self.both[0](x) + self.both[1](x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            losses = [tf.reduce_mean((one(x) - y) ** 2) for one in self.both]
        for one, optimizer, loss in zip(self.both, self.optimizers, losses, strict=True):
            optimizer.apply(tape.gradient(loss, one.trainable_variables), one.trainable_variables)
        return {"first": losses[0], "second": losses[1]}


@pytest.mark.parametrize("passes", [1, 2])
def test_two_optimizers_may_be_applied_in_a_step(monkeypatch: pytest.MonkeyPatch, passes: int) -> None:
    asked: list[str] = []

    class Noted(HorovodOperations):
        def allreduce(self, tensor: Any, name: str, *more: Any) -> Any:
            asked.append(name)
            return super().allreduce(tensor, name, *more)

    monkeypatch.setattr("horovod_ft.keras.reducer.HorovodOperations", Noted)
    joined = tf.Variable(1, dtype=tf.int64)  # a group, so that names are compared
    monkeypatch.setattr("horovod_ft.keras.optimizer.formations", lambda: joined)
    trained = Two(backward_passes_per_step=passes)
    for optimizer, one in zip(trained.optimizers, trained.both, strict=True):
        optimizer.build(one.trainable_variables)
    trained.compile()
    history = trained.fit(np.ones((32, 2)), np.ones((32, 1)), batch_size=4, epochs=2, verbose=0).history
    assert all(history[name][1] < history[name][0] for name in ("first", "second"))
    assert len(set(asked)) == len(asked) == 6


# --- mistakes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"op": hvd.Adasum}, r"op must be hvd\.Average or hvd\.Sum"),
        ({"backward_passes_per_step": 0}, "must be at least 1"),
        ({"gradient_predivide_factor": 0.0}, "must be positive"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, r"op=hvd\.Average only"),
        ({"process_set": hvd.ProcessSet([0])}, "cannot form process sets anew"),
    ],
    ids=str,
)
def test_an_argument_without_a_meaning_is_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        hvd.DistributedOptimizer(sgd(), **options)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (sgd, "not its class"),
        ("sgd", r"keras\.optimizers\.Optimizer of Keras 3, not str"),
        (tf.Variable(1.0), "of Keras 3, not ResourceVariable"),
        (None, "not NoneType"),
    ],
    ids=["class", "name", "foreign", "nothing"],
)
def test_what_is_no_optimizer_is_refused(given: Any, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        hvd.DistributedOptimizer(given)


@pytest.mark.parametrize("around", [lambda inner: inner, scaled], ids=["it", "one around it"])
@pytest.mark.parametrize("stock", [horovod.keras, horovod.tensorflow.keras, horovod.tensorflow])
def test_what_horovod_has_wrapped_already_is_refused(stock: Any, around: Callable[[Any], Any]) -> None:
    wrapped = around(stock.DistributedOptimizer(sgd()))
    with pytest.raises(ConfigurationError, match=r"wrapped already.*import horovod_ft\.keras as hvd"):
        hvd.DistributedOptimizer(wrapped)


@pytest.mark.parametrize("around", [lambda inner: inner, scaled], ids=["it", "one around it"])
def test_to_wrap_twice_is_refused(around: Callable[[Any], Any]) -> None:
    with pytest.raises(ConfigurationError, match="applied to it twice"):
        hvd.DistributedOptimizer(around(hvd.DistributedOptimizer(sgd())))


def test_the_distributed_optimizer_is_found_inside_another() -> None:
    inner = hvd.DistributedOptimizer(sgd())
    assert distributed_in(scaled(inner)) is inner
    assert distributed_in(inner) is inner
    assert distributed_in(scaled(sgd())) is None
