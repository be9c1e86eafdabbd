"""The digest of a replica: equal for equal bits, and different for any other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import horovod_ft.torch as hvd
from horovod_ft.torch.faults import corrupt
from horovod_ft.torch.replica import TorchReplica
from tests.unit.torch.tools import distributed, make, network, train


def replica(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> TorchReplica:
    optimizers = {} if optimizer is None else {"optimizer": optimizer}
    return TorchReplica(lambda: {"model": model}, lambda: optimizers)


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network()
    optimizer = make("Adam", model.parameters())
    train(model, optimizer, range(2))
    return model, optimizer


def test_equal_replicas_have_equal_digests() -> None:
    assert replica(*trained()).digest() == replica(*trained()).digest()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("bit", [0, 7, 15])
def test_any_flipped_bit_changes_it(dtype: torch.dtype, bit: int) -> None:
    model = nn.ParameterList([nn.Parameter(torch.randn(3, 5).to(dtype)) for _ in range(3)])
    before = replica(model).digest()
    with torch.no_grad():
        words = torch.view_as_real(model[1]) if dtype.is_complex else model[1].data
        words.view(torch.int16).reshape(-1)[4].bitwise_xor_(1 << bit if bit < 15 else -(1 << 15))
    assert replica(model).digest() != before


def test_optimizer_state_counts() -> None:
    model, optimizer = trained()
    before = replica(model, optimizer).digest()
    optimizer.state[next(model.parameters())]["exp_avg"].view(-1)[0] += 1e-6
    assert replica(model, optimizer).digest() != before


def test_what_each_worker_has_of_its_own_does_not_count() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    before = replica(model).digest()
    model(torch.randn(8, 4))
    assert replica(model).digest() == before


def test_values_that_changed_places_between_tensors_change_it() -> None:
    model = nn.ParameterList([nn.Parameter(torch.full((2,), value)) for value in (1.0, 2.0)])
    swapped = nn.ParameterList([nn.Parameter(torch.full((2,), value)) for value in (2.0, 1.0)])
    assert replica(model).digest() != replica(swapped).digest()


def test_a_model_in_another_memory_format_can_be_digested() -> None:
    model: Any = nn.Conv2d(3, 4, 3)
    model.to(memory_format=torch.channels_last)
    assert replica(model).digest() == replica(model).digest()


def test_without_tensors_it_is_zero() -> None:
    assert replica(nn.Tanh()).digest() == 0


def test_finite_numbers_only() -> None:
    model, optimizer = trained()
    assert replica(model, optimizer).finite()
    corrupt(next(model.parameters()), "nan")
    assert not replica(model, optimizer).finite()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["bitflip", "nan"])
def test_a_fault_changes_one_number(dtype: torch.dtype, kind: str) -> None:
    parameter = nn.Parameter(torch.ones(3, 5).to(dtype))
    corrupt(parameter, kind)
    assert (parameter != 1).sum() == 1
    assert bool(torch.isnan(parameter).any()) == (kind == "nan")


def test_a_state_looks_after_its_guard_without_remembering_it_in_each_step() -> None:
    model = network()
    guard = hvd.elastic.ReplicaGuard(every=10)
    state: Any = hvd.elastic.TorchState(model=model, optimizer=distributed(model), guard=guard)
    assert state.ft_guard() is guard
    assert state._names["guard"] == "guard"
