"""``DistributedGradientTape``: reduced gradients of Keras's variables and of TensorFlow's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import pytest
import tensorflow as tf

import horovod_ft.keras as hvd
from horovod_ft.errors import ConfigurationError
from horovod_ft.keras import tape as module
from tests.unit.keras.tools import TwoWorkers


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoWorkers]:
    """Of a group of two, where gradients are reduced to twice the local ones."""
    made = TwoWorkers()
    module._reducer.cache_clear()
    monkeypatch.setattr("horovod_ft.keras.reducer.HorovodOperations", lambda: made)
    monkeypatch.setattr(module, "formations", lambda: None)
    yield made
    module._reducer.cache_clear()


def gradient(sources: Any, loss: Any, **options: Any) -> Any:
    tape = tf.GradientTape()
    with tape:
        target = loss()
    return hvd.DistributedGradientTape(tape, **options).gradient(target, sources)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_gradients_of_keras_variables_are_reduced(operations: TwoWorkers, graph: bool) -> None:
    variable = keras.Variable([1.0, 2.0], name="w")

    def run() -> Any:
        return gradient([variable], lambda: tf.reduce_sum(variable * 3.0))[0]

    assert (tf.function(run) if graph else run)().numpy().tolist() == [6.0, 6.0]
    assert operations.asked == ["tape.w"]


def test_gradients_of_tensorflows_variables_are_reduced(operations: TwoWorkers) -> None:
    variable = tf.Variable(2.0, name="w")
    assert float(gradient(variable, lambda: variable * 3.0)) == 6.0
    assert operations.asked == ["tape.w"]


def test_the_structure_of_the_sources_is_kept(operations: TwoWorkers) -> None:
    one, other = tf.Variable(1.0), tf.Variable(1.0)
    got = gradient({"a": one, "b": [other]}, lambda: one * 2.0 + other * 3.0)
    assert (float(got["a"]), float(got["b"][0])) == (4.0, 6.0)


def test_a_source_without_a_gradient_has_none(operations: TwoWorkers) -> None:
    used, unused = tf.Variable(1.0), tf.Variable(1.0)
    got = gradient([used, unused], lambda: used * 2.0)
    assert float(got[0]) == 4.0
    assert got[1] is None


def test_sparse_gradients_stay_sparse(operations: TwoWorkers) -> None:
    table = tf.Variable(tf.ones([3, 2]), name="t")
    (got,) = gradient([table], lambda: tf.reduce_sum(tf.gather(table, [1])))
    assert isinstance(got, tf.IndexedSlices)
    assert tf.convert_to_tensor(got).numpy().tolist() == [[0.0, 0.0], [2.0, 2.0], [0.0, 0.0]]


def test_gradients_can_be_summed(operations: TwoWorkers) -> None:
    variable = tf.Variable(2.0)
    assert float(gradient(variable, lambda: variable * 3.0, op=hvd.Sum)) == 12.0


def test_a_tape_for_each_step_compiles_the_reduction_once(operations: TwoWorkers) -> None:
    variable = tf.Variable(2.0, name="w")
    for _ in range(3):
        gradient(variable, lambda: variable * 3.0)
    assert operations.asked == ["tape.w"]


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_count_by_the_size_of_the_slice(operations: TwoWorkers, compiled: bool) -> None:
    variable = tf.Variable(2.0)

    def step() -> Any:
        return gradient(variable, lambda: variable * 3.0)

    taken = tf.function(step) if compiled else step
    try:
        module.set_weight(0.5)
        assert float(taken()) == 0.5 * (3.0 + 9.0) / 2
        module.set_weight(1.5)
        assert float(taken()) == 1.5 * (3.0 + 9.0) / 2
    finally:
        module.set_weight(1.0)
    assert float(taken()) == (3.0 + 9.0) / 2


def test_the_same_tape_is_returned() -> None:
    tape = tf.GradientTape(persistent=True)
    assert hvd.DistributedGradientTape(tape) is tape
    assert isinstance(tape, tf.GradientTape)


def test_to_wrap_twice_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="applied to it twice"):
        hvd.DistributedGradientTape(hvd.DistributedGradientTape(tf.GradientTape()))


def test_what_is_no_tape_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"needs a tf\.GradientTape, not float"):
        hvd.DistributedGradientTape(1.0)


def test_arguments_are_checked() -> None:
    with pytest.raises(ConfigurationError, match="op must be"):
        hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Max)
