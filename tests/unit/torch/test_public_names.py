"""After ``import horovod_ft.torch as hvd`` a script finds every name that it found in ``horovod.torch``."""

from __future__ import annotations

import horovod.torch
import horovod.torch.elastic
import pytest

import horovod_ft.torch as hvd


def public(module: object) -> list[str]:
    return [name for name in dir(module) if not name.startswith("_")]


@pytest.mark.parametrize("name", public(horovod.torch))
def test_every_name_of_horovod_torch_is_here(name: str) -> None:
    assert hasattr(hvd, name)
    assert name in dir(hvd)


@pytest.mark.parametrize("name", public(horovod.torch.elastic))
def test_every_name_of_horovod_torch_elastic_is_here(name: str) -> None:
    assert hasattr(hvd.elastic, name)


@pytest.mark.parametrize("name", ["init", "shutdown", "DistributedOptimizer", "elastic"])
def test_what_fault_tolerance_changes_is_ours(name: str) -> None:
    assert getattr(hvd, name) is not getattr(horovod.torch, name)


@pytest.mark.parametrize("name", ["init", "shutdown", "run", "TorchState", "ElasticSampler", "state", "sampler"])
def test_what_fault_tolerance_changes_in_elastic_is_ours(name: str) -> None:
    assert getattr(hvd.elastic, name) is not getattr(horovod.torch.elastic, name)


@pytest.mark.parametrize("name", ["allreduce", "broadcast_parameters", "size", "Average", "ProcessSet", "mpi_ops"])
def test_everything_else_is_horovods(name: str) -> None:
    assert getattr(hvd, name) is getattr(horovod.torch, name)


@pytest.mark.parametrize("module", [hvd, hvd.elastic])
def test_all_lists_names_that_exist(module: object) -> None:
    names: list[str] = module.__all__  # type: ignore[attr-defined]
    assert names == sorted(set(names))
    assert all(hasattr(module, name) for name in names)


@pytest.mark.parametrize("name", ["no_such_thing", "_private"])
def test_an_unknown_name_is_an_attribute_error_that_names_it(name: str) -> None:
    with pytest.raises(AttributeError, match=name):
        getattr(hvd, name)
