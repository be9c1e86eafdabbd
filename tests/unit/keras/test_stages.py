"""A training step in stages: compute locally, reduce, update. In a group of two of which the other one is made up."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

import horovod_ft.keras as hvd
from horovod_ft.errors import ConfigurationError
from horovod_ft.events import EventBus
from horovod_ft.faults.inject import Injector
from horovod_ft.faults.plan import Fault
from horovod_ft.keras.metric_sums import MetricSums
from horovod_ft.keras.probes import FaultProbes
from horovod_ft.keras.question import NAME, Question
from horovod_ft.keras.stages import Stages
from tests.unit.keras.tools import Broken, TwoWorkers

X = np.arange(12, dtype=np.float32).reshape(6, 2) / 10
Y = X[:, :1]
#: How a step is taken apart: not at all, by stages, or by stages outside of a graph.
WAYS = pytest.mark.parametrize(("split", "eagerly"), [(False, False), (True, False), (False, True)],
                               ids=["whole", "split", "eager"])  # fmt: skip


class Same(TwoWorkers):
    """A group of two in which the other worker has what this one has."""

    def __init__(self) -> None:
        super().__init__(1.0)


def dense() -> Any:
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])


def stages_of(
    operations: Any, *, split: bool = False, eagerly: bool = False, model: Callable[[], Any] = dense, **options: Any
) -> tuple[Any, Stages]:
    made = model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), **options)
    made.compile(optimizer=optimizer, loss="mse", metrics=["mae"], run_eagerly=eagerly)
    made._symbolic_build(data_batch=(X, Y))
    optimizer.ft_reduction.reducer._operations = operations
    stages = Stages(made, MetricSums(lambda: made.metrics_variables), operations)
    stages.split = split
    return made, stages


def stepped(stages: Stages, rows: int = 6, *, ends: bool = True, applies: bool = True) -> Any:
    return stages.compute((tf.constant(X[:rows]), tf.constant(Y[:rows])), ends=ends, applies=applies)


def alone(steps: int) -> tuple[Any, dict[str, float]]:
    """A plain training of one process, and its logs over all steps."""
    model = dense()
    model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss="mse", metrics=["mae"])
    logs = [model.train_on_batch(X, Y, return_dict=True) for _ in range(steps)]
    return model, {name: float(np.mean([one[name] for one in logs])) for name in logs[0]}


@WAYS
def test_with_equal_workers_it_is_a_step_of_one(split: bool, eagerly: bool) -> None:
    model, stages = stages_of(Same(), split=split, eagerly=eagerly)
    logs = [stepped(stages) for _ in range(3)][-1]
    expected, told = alone(3)
    for one, other in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    assert {name: float(value) for name, value in logs.items()} == pytest.approx(told, rel=1e-5)


@WAYS
def test_metrics_are_those_of_all_workers(split: bool, eagerly: bool) -> None:
    model, stages = stages_of(TwoWorkers(3.0), split=split, eagerly=eagerly)
    stepped(stages)
    stepped(stages)
    total, count = (float(variable.numpy()) for variable in model._loss_tracker.variables)
    assert count == 2 * 6 * 4
    assert total > 0


@WAYS
def test_a_worker_that_borrows_a_sample_does_not_count_in_metrics(split: bool, eagerly: bool) -> None:
    model, stages = stages_of(Same(), split=split, eagerly=eagerly)
    stages._metrics.set_counts(False)
    stepped(stages)
    assert [float(variable.numpy()) for variable in model._loss_tracker.variables] == [0.0, 0.0]


@WAYS
def test_a_group_that_breaks_leaves_model_and_optimizer_as_they_were(split: bool, eagerly: bool) -> None:
    model, stages = stages_of(Broken(1.0), split=split, eagerly=eagerly)
    before = [variable.numpy() for variable in (*model.trainable_variables, *model.optimizer.variables)]
    with pytest.raises(HorovodInternalError):
        stepped(stages)
    after = [variable.numpy() for variable in (*model.trainable_variables, *model.optimizer.variables)]
    assert [value.tolist() for value in after] == [value.tolist() for value in before]


def test_an_error_of_the_users_goes_through_unchanged() -> None:
    class Picky(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.last = keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            tf.debugging.assert_less(x, 100.0)
            return self.last(x)

    _, stages = stages_of(Same(), model=Picky)
    with pytest.raises(tf.errors.InvalidArgumentError):
        stages.compute((tf.constant(X * 1000), tf.constant(Y)), ends=True, applies=True)


@pytest.mark.parametrize("split", [False, True])
def test_other_sizes_of_batches_make_no_other_graph(split: bool) -> None:
    _, stages = stages_of(Same(), split=split)
    stepped(stages, 6)
    made = stages.traced
    for rows in (5, 3, 6, 1):
        stepped(stages, rows)
    assert stages.traced == made == (3 if split else 1)


class Lookup(keras.Model):  # type: ignore[misc]
    """Whose gradient is sparse: as many rows as there are samples."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = keras.layers.Embedding(6, 1)

    def call(self, x: Any) -> Any:
        return self.rows(tf.cast(x[:, 0] * 5, tf.int32))


@pytest.mark.parametrize("split", [False, True])
def test_nor_do_other_numbers_of_rows_of_a_sparse_gradient(split: bool) -> None:
    model, stages = stages_of(Same(), split=split, model=Lookup)
    stepped(stages, 6)
    made = stages.traced
    assert not split or stages.arrivals.gradients[0].sparse
    for rows in (5, 3, 6, 1):
        stepped(stages, rows)
    assert stages.traced == made == (3 if split else 1)
    assert int(model.optimizer.iterations) == 5


class Asking:
    """A worker that asks in each step."""

    def __init__(self) -> None:
        self.questions: list[Question] = []

    def taken_along(self) -> Question:
        self.questions.append(Question(0b101, _nobody))
        return self.questions[-1]


def _nobody(fields: int) -> Any:
    raise AssertionError("it has an operation of its own")


@WAYS
def test_the_last_pass_of_a_step_takes_a_question_along(split: bool, eagerly: bool) -> None:
    asking, operations = Asking(), Same()
    model, stages = stages_of(operations, split=split, eagerly=eagerly, backward_passes_per_step=2)
    stages._taken_along = asking.taken_along
    stepped(stages, ends=False, applies=False)
    assert (asking.questions, operations.asked.count(NAME)) == ([], 0)
    for rows in (6, 5):
        stepped(stages, rows)
        assert asking.questions[-1].result() == 0b101
    assert operations.asked.count(NAME) == 1  # once traced, for all sizes of batches
    assert int(model.optimizer.iterations) == 2


@WAYS
def test_a_fault_in_the_reduction_comes_in_the_last_pass(split: bool, eagerly: bool) -> None:
    model, stages = stages_of(Same(), split=split, eagerly=eagerly, backward_passes_per_step=3)
    bus = EventBus("worker")
    injector = Injector([Fault("allreduce", "lose", worker=0, after=1)], 0, "localhost", bus)
    stages._probes = FaultProbes(injector, lambda: 1)
    for _ in range(2):
        stepped(stages, ends=False, applies=False)
    assert injector.waiting
    with pytest.raises(HorovodInternalError):
        stepped(stages)
    assert int(model.optimizer.iterations) == 0
    if split or eagerly:
        assert stages.arrivals.done() == (True, False, False)


class LosesQuestions(Same):
    """A group that breaks in the reduction of a question, late."""

    def allreduce(self, tensor: Any, name: str, *more: Any) -> Any:
        reduced = super().allreduce(tensor, name, *more)
        return tf.py_function(_late, [reduced], reduced.dtype, name="HorovodLate") if name == NAME else reduced


def _late(_: Any) -> Any:
    time.sleep(0.1)
    raise RuntimeError("Horovod has been shut down")


@WAYS
def test_a_question_that_is_lost_leaves_model_and_optimizer_as_they_were(split: bool, eagerly: bool) -> None:
    model, stages = stages_of(LosesQuestions(), split=split, eagerly=eagerly)
    stages._taken_along = Asking().taken_along
    before = [variable.numpy().tolist() for variable in (*model.trainable_variables, *model.optimizer.variables)]
    with pytest.raises(HorovodInternalError):
        stepped(stages)
    assert [one.numpy().tolist() for one in (*model.trainable_variables, *model.optimizer.variables)] == before


@WAYS
def test_a_replay_of_an_update_that_is_applied_takes_a_question_along(split: bool, eagerly: bool) -> None:
    asking = Asking()
    _, stages = stages_of(Same(), split=split, eagerly=eagerly)
    stages._taken_along = asking.taken_along
    stepped(stages, applies=False)
    assert [one.result() for one in asking.questions] == [0b101]


def test_names_are_those_of_the_gradients_then_of_the_metrics() -> None:
    operations = Same()
    _, stages = stages_of(operations)
    stepped(stages)
    assert operations.asked == ["gradient.sequential.dense.kernel", "gradient.sequential.dense.bias", "metrics.float32"]
    assert stages.names == ("sequential.dense.kernel", "sequential.dense.bias")
    assert stages.elements == 3


def test_of_a_step_by_stages_the_local_gradients_stay() -> None:
    model, stages = stages_of(Broken(1.0), split=True)
    with pytest.raises(HorovodInternalError):
        stepped(stages)
    assert stages.local is not None
    assert [tuple(gradient.shape) for gradient in stages.local.gradients] == [(2, 1), (1,)]
    assert stages.arrivals.done()[1:] == (False, False)
    for place, value in zip(stages.arrivals.places, (*stages.local.gradients, *stages.local.deltas.values()),
                            strict=True):  # fmt: skip
        stages.arrivals.put(place, value)
    assert stages.arrivals.done() == (True, True, True)
    stages.update(ends=True, applies=True)
    np.testing.assert_allclose(model.get_weights()[0], alone(1)[0].get_weights()[0], rtol=1e-5)


def test_an_update_that_is_applied_already_is_left_out() -> None:
    model, stages = stages_of(Same())
    before = [value.tolist() for value in model.get_weights()]
    stepped(stages, applies=False)
    assert [value.tolist() for value in model.get_weights()] == before
    assert int(model.optimizer.iterations) == 0


@WAYS
def test_gradients_of_several_batches_are_summed_up(split: bool, eagerly: bool) -> None:
    model, stages = stages_of(
        Same(), split=split, eagerly=eagerly, backward_passes_per_step=2, average_aggregated_gradients=True
    )
    assert stages.passes == 2
    stepped(stages, ends=False, applies=False)
    assert int(model.optimizer.iterations) == 0
    stepped(stages)
    np.testing.assert_allclose(model.get_weights()[0], alone(1)[0].get_weights()[0], rtol=1e-5)
    assert all(not total.numpy().any() for total in model.optimizer.ft_reduction.accumulation.sums)


def test_sums_are_forgotten_with_the_step() -> None:
    model, stages = stages_of(Same(), backward_passes_per_step=2)
    stepped(stages, ends=False, applies=False)
    stages.forget()
    assert all(not total.numpy().any() for total in model.optimizer.ft_reduction.accumulation.sums)


@pytest.mark.parametrize(("split", "eagerly", "graphs"), [(False, False, 1), (True, False, 3), (False, True, 0)],
                         ids=["whole", "split", "eager"])  # fmt: skip
def test_graphs_that_were_made_are_counted(split: bool, eagerly: bool, graphs: int) -> None:
    _, stages = stages_of(Same(), split=split, eagerly=eagerly)
    assert stages.made == 0
    for rows in (6, 4):
        stepped(stages, rows)
        assert stages.made == graphs


class TwoUpdates(keras.Sequential):  # type: ignore[misc]
    def train_step(self, data: Any) -> Any:
        super().train_step(data)
        return super().train_step(data)


class InsideOfCond(keras.Sequential):  # type: ignore[misc]
    def train_step(self, data: Any) -> Any:
        x, y = data
        return tf.cond(tf.reduce_sum(y) > -1.0, lambda: super(InsideOfCond, self).train_step((x, y)), lambda: {
            "loss": tf.constant(0.0), "mae": tf.constant(0.0)})  # fmt: skip


class TwoOptimizers(keras.Sequential):  # type: ignore[misc]
    """As a GAN has them. The other one is applied first."""

    def __init__(self, layers: Any) -> None:
        super().__init__(layers)
        self.other = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))

    def train_step(self, data: Any) -> Any:
        kernel = self.trainable_variables[0]
        self.other.apply([tf.ones(kernel.shape)], [kernel])
        return super().train_step(data)


class PlainOptimizer(TwoOptimizers):
    """Its gradients would be averaged nowhere, and a step that is undone would leave its update."""

    def __init__(self, layers: Any) -> None:
        super().__init__(layers)
        self.other = keras.optimizers.SGD(0.1)


class ScaledPlainOptimizer(TwoOptimizers):
    def __init__(self, layers: Any) -> None:
        super().__init__(layers)
        self.other = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))


class Taped(keras.Sequential):  # type: ignore[misc]
    """Its gradients would be reduced twice."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


REFUSED = pytest.mark.parametrize(
    ("kind", "told"),
    [
        (TwoUpdates, "more than once"),
        (TwoOptimizers, "another distributed optimizer"),
        (PlainOptimizer, "plain SGD"),
        (ScaledPlainOptimizer, "plain SGD"),
        (Taped, "DistributedGradientTape"),
        (InsideOfCond, "inside of tf.cond"),
    ],
)


@REFUSED
def test_a_train_step_that_cannot_be_taken_apart_is_refused(kind: Any, told: str) -> None:
    _, stages = stages_of(Same(), model=lambda: kind([keras.Input((2,)), keras.layers.Dense(1)]))
    with pytest.raises(ConfigurationError, match=told):
        stepped(stages)


@WAYS
@pytest.mark.parametrize(
    ("kind", "told"), [(TwoOptimizers, "another distributed optimizer"), (PlainOptimizer, "plain SGD")]
)
def test_another_optimizer_that_is_refused_has_changed_nothing(
    kind: Any, told: str, split: bool, eagerly: bool
) -> None:  # fmt: skip
    model, stages = stages_of(
        Same(), split=split, eagerly=eagerly, model=lambda: kind([keras.Input((2,)), keras.layers.Dense(1)])
    )
    before = [value.tolist() for value in model.get_weights()]
    with pytest.raises(ConfigurationError, match=told):
        stepped(stages)
    assert [value.tolist() for value in model.get_weights()] == before


@pytest.mark.parametrize("around", [lambda plain: plain, hvd.DistributedOptimizer], ids=["plain", "distributed"])
def test_after_a_step_another_optimizer_is_applied_as_ever(around: Callable[[Any], Any]) -> None:
    _, stages = stages_of(Same())
    stepped(stages)
    other, variable = around(keras.optimizers.SGD(1.0)), keras.Variable(1.0)
    other.build([variable])
    other.apply([tf.constant(1.0)])
    assert float(variable) == 0.0


def test_sparse_gradients_stay_sparse() -> None:
    def words() -> Any:
        layers = [keras.layers.Embedding(5, 3), keras.layers.Flatten(), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((2,), dtype="int32"), *layers])

    operations = Same()
    made = words()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.1))
    made.compile(optimizer=optimizer, loss="mse")
    made._symbolic_build(data_batch=(np.zeros((6, 2), np.int32), Y))
    optimizer.ft_reduction.reducer._operations = operations
    stages = Stages(made, MetricSums(lambda: made.metrics_variables), operations)
    stages.split = True
    stages.compute((tf.constant([[1, 2], [2, 3]], tf.int32), tf.constant(Y[:2])), ends=True, applies=True)
    assert "gradient.sequential.embedding.embeddings.indices" in operations.asked
    assert stages.arrivals.places[0].sparse
    assert stages.arrivals.places[0].elements == 15
