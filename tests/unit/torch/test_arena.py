"""One copy of parameters and optimizer state in memory that is set aside: it returns, bitwise, whatever came since."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from horovod_ft.torch.arena import ALIGNMENT, TorchArena
from horovod_ft.torch.replica import TorchReplica
from tests.unit.torch.tools import SHIPPED, copy_of, make, model_for, network, same, train


def replica_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> TorchReplica:
    return TorchReplica(lambda: {"model": model}, lambda: {"optimizer": optimizer})


@pytest.mark.parametrize("name", [name for name in SHIPPED if name != "LBFGS"])
def test_training_goes_on_from_a_copy_as_it_did_the_first_time(name: str) -> None:
    model = model_for(name)
    optimizer = make(name, model.parameters())
    arena = TorchArena(replica_of(model, optimizer))
    arena.reserve()
    train(model, optimizer, range(2))
    arena.write()
    train(model, optimizer, range(2, 5))
    first = copy_of(model)
    arena.read()
    assert not same(copy_of(model), first)
    train(model, optimizer, range(2, 5))
    assert same(copy_of(model), first)


def test_a_copy_from_before_the_first_update_takes_the_optimizers_state_away() -> None:
    model = network()
    optimizer = make("Adam", model.parameters())
    arena = TorchArena(replica_of(model, optimizer))
    arena.write()
    before = copy_of(model)
    train(model, optimizer, range(2))
    arena.read()
    assert same(copy_of(model), before)
    assert not any(optimizer.state.values())


def test_the_copy_does_not_change_with_what_it_was_copied_from() -> None:
    model = network()
    optimizer = make("SGD", model.parameters())
    arena = TorchArena(replica_of(model, optimizer))
    arena.write()
    before = copy_of(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    arena.read()
    assert same(copy_of(model), before)


def test_memory_is_taken_once() -> None:
    model = network()
    optimizer = make("SGD", model.parameters())
    train(model, optimizer, range(1))
    arena = TorchArena(replica_of(model, optimizer))
    arena.reserve()
    places = [view.data_ptr() for view in arena._views]
    for _ in range(2):
        train(model, optimizer, range(1))
        arena.write()
    assert [view.data_ptr() for view in arena._views] == places


def test_how_much_memory() -> None:
    model = network()  # 24 and 18 numbers of 4 bytes, each beginning at a multiple of 64
    optimizer = make("SGD", model.parameters())
    arena = TorchArena(replica_of(model, optimizer))
    assert arena.nbytes == 0
    arena.reserve()
    assert arena.nbytes == 128 + 128
    train(model, optimizer, range(1))
    arena.write()
    assert arena.nbytes == 2 * (128 + 128)
    assert all(view.data_ptr() % ALIGNMENT == arena._views[0].data_ptr() % ALIGNMENT for view in arena._views)


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(3, 5).t(),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.tensor([1 + 2j, -3j]),
        torch.empty(0, 4),
        torch.tensor([True, False]),
    ],
    ids=["transposed", "channels-last", "scalar", "complex", "empty", "bool"],
)
def test_tensors_of_every_kind(value: torch.Tensor) -> None:
    model = nn.ParameterList([nn.Parameter(value.clone(memory_format=torch.preserve_format), requires_grad=False)])
    optimizer = make("SGD", [nn.Parameter(torch.zeros(1))])
    arena = TorchArena(replica_of(model, optimizer))
    arena.write()
    with torch.no_grad():
        model[0].zero_()
    arena.read()
    assert same(model[0].detach(), value)
    assert model[0].stride() == value.stride()


def test_nothing_to_copy() -> None:
    model = nn.ReLU()
    arena = TorchArena(TorchReplica(lambda: {"model": model}, dict))
    arena.reserve()
    arena.write()
    arena.read()
    assert arena.nbytes == 0


def test_memory_that_could_not_be_had_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    arena = TorchArena(replica_of(model, make("SGD", model.parameters())))

    def nothing_left(*_: object, **__: object) -> torch.Tensor:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(torch, "zeros", nothing_left)
        with pytest.raises(MemoryError):
            arena.write()
    arena.write()
    before = copy_of(model)
    arena.read()
    assert same(copy_of(model), before)
