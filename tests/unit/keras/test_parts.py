"""Light state of Keras: what a step changes besides its update, and gets back when it is undone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import cloudpickle
import keras
import numpy as np
import pytest
import tensorflow as tf

from horovod_ft.keras.parts import (
    Known,
    RandomState,
    Variables,
    generators_of,
    kind_of,
    rates_of,
    read,
    seed_newcomer,
)
from horovod_ft.keras.replica import TensorFlowReplica, VariableBlock, variables_of


@pytest.fixture(autouse=True)
def _random() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    yield
    random.setstate(python)
    np.random.set_state(numpy)


def model() -> Any:
    layers = [keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    return keras.Sequential([keras.Input((2,)), *layers, keras.layers.Dense(1)])


class Looks:
    """Finds other variables each time, and says how many graphs there are."""

    def __init__(self) -> None:
        self.count = 0
        self.made = 0
        self.known = Known(self._look, lambda: self.made)

    def _look(self) -> list[int]:
        self.count += 1
        return [self.count]


def test_variables_are_looked_for_each_time_while_there_is_no_graph() -> None:
    looks = Looks()
    assert [looks.known() for _ in range(3)] == [[1], [2], [3]]


def test_variables_are_looked_for_again_only_with_another_graph() -> None:
    looks = Looks()
    found = []
    for looks.made in (0, 1, 1, 2, 2, 0, 2):
        found += looks.known()
    assert found == [1, 2, 2, 3, 3, 4, 5]


def test_variables_are_looked_for_again_when_told() -> None:
    looks = Looks()
    looks.made = 1
    assert [looks.known(), looks.known()] == [[1], [1]]
    looks.known.forget()
    assert [looks.known(), looks.known()] == [[2], [2]]


@pytest.mark.parametrize("make", [keras.Variable, tf.Variable])
def test_variables_go_back_to_where_the_step_began(make: Any) -> None:
    variable = make([1.0, 2.0])
    part = Variables(lambda: [variable], replicated=False)
    part.begin()
    variable.assign([3.0, 4.0])
    part.rollback()
    assert variable.numpy().tolist() == [1.0, 2.0]


@pytest.mark.parametrize("change", ["assign", "assign_add", "assign_sub"])
def test_what_was_remembered_does_not_change_with_the_variable(change: str) -> None:
    variable = keras.Variable([1.0, 2.0])
    remembered = read(variable)
    getattr(variable, change)([5.0, 5.0])
    tf.raw_ops.ResourceScatterAdd(resource=variable.value.handle, indices=[0], updates=[1.0])
    assert remembered.numpy().tolist() == [1.0, 2.0]


def test_values_can_be_sent_to_another_worker() -> None:
    variable, other = keras.Variable([1.0, 2.0]), keras.Variable([0.0, 0.0])
    sent = cloudpickle.dumps(Variables(lambda: [variable], replicated=True).export())
    Variables(lambda: [other], replicated=True).adopt(cloudpickle.loads(sent))
    assert other.numpy().tolist() == [1.0, 2.0]


def test_random_generators_go_back() -> None:
    def drawn() -> list[float]:
        own = keras.random.uniform((1,)).numpy().tolist()
        return [random.random(), float(np.random.rand()), *own]

    drawn()
    part = RandomState()
    part.begin()
    first = drawn()
    part.rollback()
    assert drawn() == first


def test_a_newcomer_has_random_streams_of_its_own() -> None:
    one, two = model(), model()
    for made, rank in ((one, 1), (two, 2)):
        for generator in generators_of(made):
            generator.assign([7, 0])
        seed_newcomer(generators_of(made), 4, rank)
    streams = [[generator.numpy().tolist() for generator in generators_of(made)] for made in (one, two)]
    assert len(streams[0]) == 1
    assert streams[0] != streams[1]


def test_a_replica_is_made_of_weights_and_the_optimizers_variables() -> None:
    made, optimizer = model(), keras.optimizers.Adam()
    optimizer.build(made.trainable_variables)
    replica = TensorFlowReplica(lambda: {"model": made}, lambda: {"optimizer": optimizer})
    replicated = [name for name, _ in replica.replicated()]
    assert "model.sequential.dense.kernel" in replicated
    assert "optimizer.adam.iteration" in replicated
    assert not [name for name in replicated if "moving" in name or "seed" in name or "learning_rate" in name]
    assert len(replicated) == 6 + 1 + 12
    assert sorted(variable.name for variable in replica.local()) == [
        "moving_mean", "moving_variance", "seed_generator_state",
    ]  # fmt: skip


def test_a_frozen_layer_is_replicated_all_the_same() -> None:
    made = model()
    made.layers[0].trainable = False
    replica = TensorFlowReplica(lambda: {"model": made}, dict)
    assert len(replica.replicated()) == 6


def test_names_do_not_depend_on_how_many_models_a_process_has_made() -> None:
    def schema() -> list[str]:
        made, optimizer = model(), keras.optimizers.Adam()
        optimizer.build(made.trainable_variables)
        return TensorFlowReplica(lambda: {"model": made}, lambda: {"optimizer": optimizer}).schema()

    assert schema() == schema()


def test_variables_of_an_optimizer_inside_of_another_are_there_once() -> None:
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    scaled.build([keras.Variable([1.0])])
    variables = variables_of(scaled)
    assert len({id(variable) for variable in variables}) == len(variables)
    assert sorted(variable.name for variable in variables) == [
        "dynamic_scale", "iteration", "iteration", "step_counter",
    ]  # fmt: skip
    assert len(rates_of(scaled)) == 2
    assert not {id(variable) for variable in variables} & {id(rate) for rate in rates_of(scaled)}


def test_a_block_is_the_bytes_of_a_variable() -> None:
    source, target = keras.Variable([[1.0, 2.0]]), keras.Variable([[0.0, 0.0]])
    sent = VariableBlock(source, local=False)
    received = VariableBlock(target, local=False)
    assert sent.nbytes == 8
    received.host(read=False)[:] = sent.host(read=True)
    received.write_back()
    assert target.numpy().tolist() == [[1.0, 2.0]]


def test_a_digest_sees_a_single_bit() -> None:
    made = model()
    replica = TensorFlowReplica(lambda: {"model": made}, dict)
    before = replica.digest()
    assert replica.digest() == before
    kernel = made.layers[0].kernel
    words = kernel.numpy().view(np.int32)
    words[0, 0] ^= 1
    kernel.assign(words.view(np.float32))
    assert replica.digest() != before


def test_what_is_not_finite_is_seen() -> None:
    made = model()
    replica = TensorFlowReplica(lambda: {"model": made}, dict)
    assert replica.finite()
    made.layers[0].bias.assign([0.0, np.nan, 0.0])
    assert not replica.finite()


def test_what_a_value_is_to_a_state() -> None:
    part = Variables(list, replicated=False)
    values = [model(), keras.optimizers.SGD(), part, 3]
    assert [kind_of(value) for value in values] == ["model", "optimizer", "part", "value"]
