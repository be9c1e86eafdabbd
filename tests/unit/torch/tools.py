"""What several test files need: small models, every optimizer that torch ships, and made-up other workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import horovod.torch
import pytest
import torch
import torch.nn.functional as F
from horovod.torch import mpi_ops
from torch import Tensor, nn

import horovod_ft.torch as hvd

SHIPPED = sorted(
    name
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
)
#: Options that make an optimizer keep as much state as it can.
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    "Adam": {"lr": 0.1, "amsgrad": True},
    "ASGD": {"lr": 0.1, "t0": 1},
    "RMSprop": {"lr": 0.1, "momentum": 0.9, "centered": True},
    "Adagrad": {"lr": 0.1, "initial_accumulator_value": 0.1},
}


class Words(nn.Module):
    """A table with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 3, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        rows = (x[:, 0].abs() * 7).long() % 10
        out: Tensor = self.table(rows)
        return out


def network(seed: int = 0) -> Any:  # to mypy, members of a Sequential could be anything
    """A Sequential of two matrices, so that optimizers for matrices only can train it."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False))


def model_for(name: str, seed: int = 0) -> Any:
    if name == "SparseAdam":
        torch.manual_seed(seed)
        return Words()
    return network(seed)


def make(name: str, parameters: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    kind = getattr(torch.optim, name)
    made: torch.optim.Optimizer = kind(parameters, **{**OPTIONS.get(name, {}), **options})
    return made


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(5, 4, generator=generator), torch.randint(0, 3, (5,), generator=generator)


def backward(model: nn.Module, step: int = 0, dtype: torch.dtype | None = None) -> None:
    x, y = batch(step)
    F.cross_entropy(model(x if dtype is None else x.to(dtype)), y).backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def distributed(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any) -> Any:
    """The optimizer made distributed; by default SGD with momentum."""
    plain = make("SGD", model.parameters()) if optimizer is None else optimizer
    return hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters(), **options)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients."""
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def full(tensor: Tensor, value: float) -> Tensor:
    return torch.full_like(tensor, value)


def same(left: Any, right: Any) -> bool:
    """Bitwise equality of tensors, and of dicts and sequences of them."""
    if isinstance(left, Tensor):
        if not isinstance(right, Tensor) or left.dtype != right.dtype or left.shape != right.shape:
            return False
        dense = [part.to_dense() if part.is_sparse else part for part in (left, right)]
        return torch.equal(dense[0], dense[1])
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)


def copy_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


class Peers:
    """Horovod's collectives with other workers that are made up.

    Attributes:
        others: name of a tensor -> the sum of what the other workers hand over for it; zeros by default.
        rows: name of a gathered tensor -> what the other workers append.
        broken: names of tensors whose reduction fails.
        calls: names in the order in which they were handed over.
        scales: name -> (prescale_factor, postscale_factor).
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        self.size = size
        self.others: dict[str, Tensor] = {}
        self.rows: dict[str, Tensor] = {}
        self.broken: set[str] = set()
        self.calls: list[str] = []
        self.scales: dict[str, tuple[float, float]] = {}
        self._work: dict[int, Callable[[], Any]] = {}
        monkeypatch.setattr(mpi_ops, "_allreduce_async", self._allreduce)
        monkeypatch.setattr(mpi_ops, "_grouped_allreduce_async", self._grouped)
        monkeypatch.setattr(horovod.torch, "allgather_async", self._allgather)
        monkeypatch.setattr(horovod.torch, "synchronize", self._synchronize)
        monkeypatch.setattr(horovod.torch, "size", lambda: self.size)

    def _start(self, work: Callable[[], Any]) -> int:
        handle = 10_000_000 + len(self.calls)
        self._work[handle] = work
        return handle

    def _reduced(self, tensor: Tensor, output: Tensor, name: str, op: Any, scales: tuple[float, float]) -> Tensor:
        if name in self.broken:
            output.fill_(float("nan"))  # Horovod leaves anything behind
            raise hvd.HorovodInternalError(f"{name} was lost")
        total = tensor * scales[0] + self.others.get(name, torch.zeros(())).to(tensor.dtype)
        return output.copy_(total * scales[1] / (self.size if op == hvd.Average else 1))

    def _allreduce(
        self, tensor: Tensor, output: Tensor, name: str, op: Any, *, prescale_factor: float, postscale_factor: float,
        process_set: Any,
    ) -> int:  # fmt: skip
        assert tensor.is_contiguous()
        assert output.is_contiguous()
        scales = self.scales[name] = prescale_factor, postscale_factor
        self.calls.append(name)
        return self._start(lambda: self._reduced(tensor, output, name, op, scales))

    def _grouped(
        self, tensors: list[Tensor], outputs: list[Tensor], name: str, op: Any, *, prescale_factor: float,
        postscale_factor: float, process_set: Any,
    ) -> int:  # fmt: skip
        scales = self.scales[name] = prescale_factor, postscale_factor
        self.calls.append(f"{name} and {len(tensors) - 1} more")
        pairs = list(zip(tensors, outputs, strict=True))
        return self._start(lambda: [self._reduced(tensor, output, name, op, scales) for tensor, output in pairs])

    def _allgather(self, tensor: Tensor, name: str) -> int:
        self.calls.append(name)
        more = [self.rows[name]] if name in self.rows else []
        return self._start(lambda: torch.cat([tensor, *more]))

    def _synchronize(self, handle: int) -> Any:
        work = self._work.pop(handle, None)
        return None if work is None else work()
