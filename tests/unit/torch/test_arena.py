"""One copy of parameters and optimizer state in memory that is set aside: it returns, bitwise, whatever came since."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from horovod_ft.torch.arena import ALIGNMENT, HostMemory, TorchArena
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


# --- the memory itself -----------------------------------------------------------------------------------------------


def test_memory_is_used_again_for_anything_that_fits_in() -> None:
    memory = HostMemory()
    (large,) = memory.room([1000], pinned=False)
    small, smaller = memory.room([100, 3], pinned=False)
    assert small.data_ptr() == large.data_ptr()
    assert smaller.data_ptr() == large.data_ptr() + 128
    assert memory.nbytes == 1024


def test_memory_grows_when_there_is_too_little() -> None:
    memory = HostMemory()
    memory.room([100], pinned=False)
    (view,) = memory.room([5000], pinned=False)
    assert (len(view), memory.nbytes) == (5000, 5056)


def test_a_copy_from_the_host_is_done_at_once() -> None:
    memory = HostMemory()
    views = memory.room([3, 0], pinned=False)
    wait = memory.copy(views, [torch.tensor([1, 2, 3], dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)])
    assert views[0].tolist() == [1, 2, 3]
    wait()


class Device:
    """CUDA's streams and events, written down in the order in which they are used."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        for name in ("Stream", "stream", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def Stream(self, device: object) -> Device.Of:  # noqa: N802  # torch's name
        return Device.Of(self, "side")

    def current_stream(self, device: object) -> Device.Of:
        return Device.Of(self, "main")

    @contextmanager
    def stream(self, stream: Device.Of) -> Iterator[None]:
        self.calls.append(f"on {stream.name}")
        yield
        self.calls.append("off")

    class Of:
        """A stream or an event of it."""

        def __init__(self, device: Device, name: str) -> None:
            self.device, self.name = device, name

        def wait_stream(self, other: Device.Of) -> None:
            self.device.calls.append(f"{self.name} waits for {other.name}")

        def wait_event(self, event: Device.Of) -> None:
            self.wait_stream(event)

        def record_event(self) -> Device.Of:
            return Device.Of(self.device, f"an event of {self.name}")

        def synchronize(self) -> None:
            self.device.calls.append(f"thread waits for {self.name}")


class OnDevice:
    """A tensor that looks as if it were on a GPU; there is none where these tests run."""

    device = torch.device("cuda", 0)


class View:
    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def copy_(self, source: object, *, non_blocking: bool) -> None:
        assert non_blocking
        self.calls.append("copy")


def test_from_a_gpu_a_copy_follows_the_update_and_the_next_update_follows_the_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device(monkeypatch)
    memory = HostMemory()
    source: Any = OnDevice()
    view: Any = View(device.calls)
    wait = memory.copy([view, view], [source, source])
    assert device.calls == ["side waits for main", "on side", "copy", "copy", "off"]
    device.calls.clear()
    memory.settle()
    memory.settle()
    wait()
    assert device.calls == ["main waits for an event of side", "thread waits for an event of side"]
