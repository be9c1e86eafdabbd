"""Broadcast of variables, with one real worker, and with another that is made up."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

import horovod_ft.keras as hvd
from horovod_ft.errors import ConfigurationError
from horovod_ft.keras.operations import HorovodOperations


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what is broadcast; all that the other worker has is zero."""
    names: list[str] = []

    def broadcast(_: Any, tensor: Any, root: int, name: str) -> Any:
        names.append(f"{name} from {root}")
        return tf.zeros_like(tensor)

    monkeypatch.setattr(HorovodOperations, "broadcast", broadcast)
    return names


def test_variables_get_the_values_of_the_root(asked: list[str]) -> None:
    one, other = keras.Variable([1.0, 2.0], name="a"), tf.Variable(3, name="b")
    hvd.broadcast_variables([one, other], root_rank=1)
    assert one.numpy().tolist() == [0.0, 0.0]
    assert other.numpy() == 0
    assert asked == ["variable.a from 1", "variable.b from 1"]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "uint32", "bool", "complex64", "float64"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)], ids=str)
def test_values_of_any_dtype_arrive_bit_by_bit(dtype: str, shape: tuple[int, ...]) -> None:
    value = tf.cast(tf.fill(shape, 1), dtype)
    variable = tf.Variable(value)
    hvd.broadcast_variables([variable], root_rank=0)
    assert variable.dtype == dtype
    assert np.array_equal(variable.numpy(), value.numpy())


def test_no_variables_are_no_broadcast(asked: list[str]) -> None:
    hvd.broadcast_variables([], root_rank=0)
    assert asked == []


def test_a_broken_group_leaves_variables_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise tf.errors.UnknownError(None, None, "Horovod has been shut down.")

    variable = tf.Variable(1.0)
    monkeypatch.setattr(HorovodOperations, "broadcast", broken)
    with pytest.raises(HorovodInternalError):
        hvd.broadcast_variables([variable], root_rank=0)
    assert variable.numpy() == 1.0


def test_process_sets_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="cannot form process sets anew"):
        hvd.broadcast_variables([tf.Variable(1.0)], 0, process_set=hvd.ProcessSet([0]))
