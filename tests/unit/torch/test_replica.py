"""Parameters, buffers and optimizer state as bytes: what goes out of one worker is in the other, bitwise."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from horovod_ft.torch.replica import TensorBlock, TorchReplica
from tests.unit.torch.tools import SHIPPED, copy_of, make, model_for, network, same, train


class Worker:
    """A model, an optimizer, and both as a replica."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.model = model
        self.optimizer = make("SGD", model.parameters()) if optimizer is None else optimizer
        self.replica = TorchReplica(lambda: {"model": self.model}, lambda: {"optimizer": self.optimizer})


def send(source: Worker, target: Worker) -> None:
    """What ``transfer`` does, without a network."""
    target.replica.prepare(pickle.loads(pickle.dumps(source.replica.structure())))
    for out, into in zip(source.replica.blocks(), target.replica.blocks(), strict=True):
        assert (out.nbytes, out.local) == (into.nbytes, into.local)
        into.host(read=False)[:] = out.host(read=True)
        into.write_back()


@pytest.mark.parametrize("name", [name for name in SHIPPED if name != "LBFGS"])
@pytest.mark.parametrize("trained", [0, 2])
def test_a_newcomer_goes_on_bitwise_like_the_others(name: str, trained: int) -> None:
    source, target = (
        Worker(model, make(name, model.parameters())) for model in (model_for(name), model_for(name, seed=1))
    )
    train(source.model, source.optimizer, range(2))
    train(target.model, target.optimizer, range(trained))
    send(source, target)
    assert same(source.optimizer.state_dict()["state"], target.optimizer.state_dict()["state"])
    for worker in (source, target):
        train(worker.model, worker.optimizer, range(2, 5))
    assert same(copy_of(source.model), copy_of(target.model))


def test_an_optimizer_without_state_is_handed_on() -> None:
    source, target = (Worker(model, torch.optim.SGD(model.parameters(), lr=0.1)) for model in (network(), network(1)))
    train(source.model, source.optimizer, range(1))
    send(source, target)
    assert same(copy_of(source.model), copy_of(target.model))
    assert same(target.optimizer.state_dict(), source.optimizer.state_dict())


def test_state_of_a_laggard_that_the_others_lack_is_removed() -> None:
    source, target = Worker(network()), Worker(network(1))
    train(target.model, target.optimizer, range(1))
    send(source, target)
    assert not target.optimizer.state


def test_tensors_that_fit_are_kept() -> None:
    source, target = Worker(network()), Worker(network(1))
    for worker in (source, target):
        train(worker.model, worker.optimizer, range(1))
    before = [tensor.data_ptr() for tensor in target.replica.optimizer_tensors()]
    send(source, target)
    assert [tensor.data_ptr() for tensor in target.replica.optimizer_tensors()] == before


class Odd(torch.optim.Optimizer):
    """State of every kind: numbers, lists, tensors of other shapes."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("count", 0)
                state["count"] += 1
                state.setdefault("history", []).append(state["count"])
                state["scalar"] = torch.tensor(float(state["count"]))
                state["empty"] = torch.empty(0, 3)
                state["rows"] = parameter.mean(1, keepdim=True)
                state["flags"] = parameter > 0


def test_state_of_any_kind_is_handed_on() -> None:
    source, target = (Worker(model, Odd(model.parameters())) for model in (network(), network(1)))
    train(source.model, source.optimizer, range(3))
    send(source, target)
    assert same(target.optimizer.state_dict(), source.optimizer.state_dict())


def test_a_structure_does_not_change_with_the_state_it_describes() -> None:
    worker = Worker(model := network(), Odd(model.parameters()))
    train(worker.model, worker.optimizer, range(1))
    structure = worker.replica.structure()
    train(worker.model, worker.optimizer, range(1))
    for _ in range(2):
        worker.replica.prepare(structure)
        state = worker.optimizer.state[model[0].weight]
        assert (state["count"], state["history"]) == (1, [1])
        state["history"].append(9)


class Mixed(nn.Module):
    """Tensors of every kind."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.short = nn.Parameter(torch.full((3, 2), value).bfloat16())
        self.scalar = nn.Parameter(torch.tensor(value))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.image = nn.Parameter(torch.full((2, 3, 2, 2), value).contiguous(memory_format=torch.channels_last))
        self.holes = nn.Parameter((torch.arange(12.0).reshape(2, 6) * value)[:, ::2])
        self.complex = nn.Parameter(torch.full((2,), complex(value, 1.0)))
        self.register_buffer("flags", torch.tensor([value > 1, False]))
        self.register_buffer("count", torch.tensor(int(value)))


def test_tensors_of_every_kind_are_handed_on() -> None:
    source, target = Worker(Mixed(1.5)), Worker(Mixed(0.5))
    send(source, target)
    assert same(copy_of(source.model), copy_of(target.model))


def test_new_state_lies_in_memory_as_its_parameter_does() -> None:
    source, target = Worker(Mixed(1.5)), Worker(Mixed(0.5))
    source.model.image.sum().backward()
    source.optimizer.step()
    send(source, target)
    momentum = target.optimizer.state[target.model.image]["momentum_buffer"]
    assert momentum.is_contiguous(memory_format=torch.channels_last)
    assert not momentum.requires_grad


def test_tied_parameters_are_sent_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    assert [name for name, _, _ in Worker(model).replica.named()] == ["model.0.weight"]


def test_parameters_that_two_models_share_are_sent_once() -> None:
    model = network()
    replica = TorchReplica(lambda: {"a": model, "b": model}, dict)
    assert [name for name, _, _ in replica.named()] == ["a.0.weight", "a.2.weight"]


def test_parameters_of_the_optimizer_alone_are_sent_too() -> None:
    loose = nn.Parameter(torch.ones(2))
    replica = TorchReplica(dict, lambda: {"optimizer": torch.optim.SGD([loose], lr=0.1)})
    assert [name for name, _, _ in replica.named()] == ["optimizer.parameter0"]


def test_buffers_belong_to_each_worker_and_parameters_to_all() -> None:
    replica = Worker(nn.BatchNorm1d(2)).replica
    assert {name: local for name, _, local in replica.named()} == {
        "model.weight": False,
        "model.bias": False,
        "model.running_mean": True,
        "model.running_var": True,
        "model.num_batches_tracked": True,
    }
    assert len(replica.replicated_tensors()) == 2


def test_optimizer_state_is_named_by_its_parameters_index() -> None:
    worker = Worker(nn.Linear(2, 3))
    worker.model(torch.ones(1, 2)).sum().backward()
    worker.optimizer.step()
    assert [name for name, _ in worker.replica.replicated()] == [
        "model.weight",
        "model.bias",
        "optimizer.state.0.momentum_buffer",
        "optimizer.state.1.momentum_buffer",
    ]


def test_an_optimizer_does_not_have_the_room_that_was_made_for_it_before_it_is_installed() -> None:
    source, target = Worker(network()), Worker(network(1))
    train(source.model, source.optimizer, range(1))
    room = target.replica.room(source.replica.structure())
    made = [tensor for name, tensor in target.replica.replicated(room) if ".state." in name]
    assert not target.optimizer.state
    target.replica.install(room)
    assert [id(tensor) for tensor in target.replica.optimizer_tensors()] == [id(tensor) for tensor in made]
    assert len(made) == 2


def test_a_schema_names_every_tensor_and_group() -> None:
    assert Worker(nn.Linear(2, 3)).replica.schema() == [
        "model.weight (3, 2) torch.float32",
        "model.bias (3,) torch.float32",
        "optimizer: group 0 of SGD with 2 parameters",
    ]


@pytest.mark.parametrize(
    "other",
    [
        lambda: Worker(nn.Linear(2, 4)),
        lambda: Worker(nn.Linear(2, 3).double()),
        lambda: Worker(model := nn.Linear(2, 3), make("Adam", model.parameters())),
        lambda: Worker(model := nn.Linear(2, 3), make("SGD", list(model.parameters())[:1])),
    ],
    ids=["shape", "dtype", "optimizer", "parameters"],
)
def test_schemas_of_different_workers_differ(other: Any) -> None:
    assert Worker(nn.Linear(2, 3)).replica.schema() != other().replica.schema()


def test_a_schema_does_not_depend_on_training() -> None:
    worker = Worker(network())
    before = worker.replica.schema()
    train(worker.model, worker.optimizer, range(1))
    assert worker.replica.schema() == before


# --- blocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensor",
    [torch.randn(3, 4), torch.randn(3, 4).t(), torch.tensor(5), torch.empty(0), torch.randn(3).bfloat16()],
    ids=["contiguous", "transposed", "scalar", "empty", "bfloat16"],
)
def test_a_block_holds_the_tensors_bytes(tensor: Tensor) -> None:
    block = TensorBlock(tensor, local=False)
    data = block.host(read=True)
    assert data.dtype == np.uint8
    assert data.shape == (block.nbytes,) == (tensor.numel() * tensor.element_size(),)
    assert data.tobytes() == tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_a_block_of_host_memory_is_the_memory_itself() -> None:
    tensor = torch.zeros(2, dtype=torch.uint8)
    TensorBlock(tensor, local=False).host(read=False)[:] = [1, 2]
    assert tensor.tolist() == [1, 2]


def test_a_block_with_gaps_is_written_back_at_the_end() -> None:
    tensor = torch.zeros(2, 3).t()
    block = TensorBlock(tensor, local=False)
    block.host(read=False)[:] = torch.arange(6.0).view(torch.uint8).numpy()
    assert not tensor.any()
    block.write_back()
    assert tensor.reshape(-1).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_reading_a_block_leaves_the_tensor_alone() -> None:
    tensor = torch.randn(2, 3).t()
    before = copy.deepcopy(tensor)
    TensorBlock(tensor, local=False).host(read=True)
    assert torch.equal(tensor, before)
