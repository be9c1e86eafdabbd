"""Names of operations: equal on all workers, whatever else a process has made before."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

from horovod_ft.keras.names import name_of, names_of


def model() -> keras.Model:
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dense(2)])


def test_a_name_is_the_path_of_the_variable() -> None:
    layer = keras.layers.Dense(2, name="head")
    layer.build((1, 2))
    assert names_of(layer.variables) == ("head.kernel", "head.bias")


def test_names_are_unique() -> None:
    names = names_of(model().variables)
    assert len(set(names)) == len(names) == 4


def test_names_do_not_depend_on_what_was_made_before() -> None:
    assert names_of(model().variables) == names_of(model().variables)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("kernel:0", "kernel"), ("a/b c", "a.b_c"), ("block_12/w_3", "block.w"), ("x_1y", "x_1y"), ("conv2d", "conv2d")],
)
def test_names_of_tensorflows_variables(name: str, expected: str) -> None:
    class Named:
        def __init__(self) -> None:
            self.name = name

    assert name_of(Named()) == expected


def test_what_has_no_name_has_one_by_its_place() -> None:
    assert names_of([tf.constant(1.0), tf.constant(2.0)]) == ("tensor", "tensor.1")
