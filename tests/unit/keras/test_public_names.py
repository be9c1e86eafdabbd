"""After ``import horovod_ft.keras as hvd`` a script finds every name that it found in Horovod's two modules."""

from __future__ import annotations

import horovod.tensorflow
import horovod.tensorflow.keras
import keras
import numpy as np
import pytest
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

import horovod_ft.keras as hvd

#: What Horovod's Keras module has imported for itself.
NOT_FOR_USERS = {"K", "inspect", "is_version_greater_equal_than"}


def public(module: object) -> list[str]:
    return [name for name in dir(module) if not name.startswith("_") and name not in NOT_FOR_USERS]


@pytest.mark.parametrize("name", sorted({*public(horovod.tensorflow), *public(horovod.tensorflow.keras)}))
def test_every_name_of_horovod_is_here(name: str) -> None:
    assert hasattr(hvd, name)
    assert name in dir(hvd)


@pytest.mark.parametrize("name", public(horovod.tensorflow.keras.callbacks))
def test_every_callback_of_horovod_is_here(name: str) -> None:
    assert hasattr(hvd.callbacks, name)


@pytest.mark.parametrize(
    "name", ["init", "shutdown", "DistributedOptimizer", "DistributedGradientTape", "broadcast_variables", "load_model"]
)
def test_what_fault_tolerance_or_keras_3_changes_is_ours(name: str) -> None:
    assert getattr(hvd, name) is not getattr(horovod.tensorflow, name, None)
    assert getattr(hvd, name) is not getattr(horovod.tensorflow.keras, name, None)


@pytest.mark.parametrize("name", ["size", "Average", "Compression", "ProcessSet", "mpi_ops", "alltoall"])
def test_everything_else_is_horovods(name: str) -> None:
    assert getattr(hvd, name) is getattr(horovod.tensorflow, name)


def test_all_lists_names_that_exist() -> None:
    assert hvd.__all__ == sorted(set(hvd.__all__))
    assert all(hasattr(hvd, name) for name in hvd.__all__)


@pytest.mark.parametrize("name", ["no_such_thing", "_private"])
@pytest.mark.parametrize("module", [hvd, hvd.callbacks], ids=["hvd", "callbacks"])
def test_an_unknown_name_is_an_attribute_error_that_names_it(module: object, name: str) -> None:
    with pytest.raises(AttributeError, match=name):
        getattr(module, name)


@pytest.mark.parametrize("value", [2.0, np.array([2.0], np.float32), tf.constant([2.0])], ids=["float", "array", "tf"])
def test_collectives_take_what_keras_users_have(value: object) -> None:
    assert float(np.squeeze(hvd.allreduce(value, "by position"))) == 2.0
    assert float(np.squeeze(hvd.broadcast(value, 0, "by position"))) == 2.0


def test_collectives_take_variables_of_keras() -> None:
    variable = keras.Variable([1.0, 2.0])
    assert hvd.allreduce(variable, op=hvd.Sum).numpy().tolist() == [1.0, 2.0]
    assert hvd.allgather(variable).numpy().tolist() == [1.0, 2.0]
    assert hvd.reducescatter(variable).numpy().tolist() == [1.0, 2.0]


def test_a_collective_of_a_broken_group_raises_horovods_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise tf.errors.UnknownError(None, None, "Horovod has been shut down. [Op:HorovodAllreduce]")

    monkeypatch.setattr(horovod.tensorflow, "allreduce", broken)
    with pytest.raises(HorovodInternalError):
        hvd.allreduce(1.0)
