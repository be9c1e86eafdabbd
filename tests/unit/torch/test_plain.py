"""Torch's objects in plain form: through a checkpoint's values and back, bit for bit."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

from horovod_ft.checkpoint import values
from horovod_ft.errors import DamagedCheckpointError, UnsupportedStateError
from horovod_ft.torch.elastic import ElasticSampler, LearningRateRule
from horovod_ft.torch.parts import RandomState
from horovod_ft.torch.plain import from_plain, to_plain
from horovod_ft.torch.replica import TensorSpec
from tests.unit.torch.tools import make, network, same


def through(value: Any) -> Any:
    """Into a checkpoint, and back."""
    return from_plain(values.load(values.dump(to_plain(value))[0]))


def bits(tensor: Tensor) -> bytes:
    data: bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return data


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype(dtype: torch.dtype) -> None:
    data = torch.arange(96, dtype=torch.uint8) % (2 if dtype is torch.bool else 251)
    tensor = data.view(dtype).reshape(2, -1)
    back = through(tensor)
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert bits(back) == bits(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.5),
        torch.empty(0),
        torch.empty(3, 0, 2, dtype=torch.int16),
        torch.randn(3, 5).t(),
        torch.randn(4, 6)[::2, 1::3],
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(1, 3).expand(4, 3),
        torch.tensor([1 + 2j, -3j]).conj(),
        torch.tensor([1 + 2j, -3j]).conj().imag,
        torch.tensor([float("nan"), float("-inf"), -0.0]),
    ],
    ids=["scalar", "empty", "empty-3d", "transposed", "strided", "channels-last", "expanded", "conjugated", "negated",
         "not-finite"],
)  # fmt: skip
def test_tensors_of_every_kind(tensor: Tensor) -> None:
    back = through(tensor)
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert bits(back) == bits(tensor.resolve_conj().resolve_neg())


def test_a_parameter_comes_back_as_a_tensor_without_gradient() -> None:
    back = through(nn.Parameter(torch.ones(2)))
    assert type(back) is Tensor
    assert not back.requires_grad


def test_what_came_back_can_be_written() -> None:
    back = through(torch.zeros(2))
    back += 1.0
    assert back.tolist() == [1.0, 1.0]


def test_a_plain_form_does_not_change_with_the_tensor() -> None:
    tensor = torch.zeros(2)
    form = to_plain(tensor)
    tensor += 1.0
    assert from_plain(form).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "value",
    [
        torch.bfloat16,
        torch.device("cuda:3"),
        torch.device("cpu"),
        torch.Size([2, 0, 3]),
        torch.Size([]),
        TensorSpec((2, 3), torch.float32, True),
        TensorSpec((), torch.float8_e5m2, False),
    ],
    ids=str,
)
def test_what_describes_tensors(value: Any) -> None:
    back = through(value)
    assert (type(back), back) == (type(value), value)


@pytest.mark.parametrize(
    "value",
    [
        {"torch.Tensor": [1, 2]},
        {"torch.dict": []},
        {"torch.": {"torch.dtype": "float32"}},
        {"torch.Size": 1, "other": 2},
        OrderedDict({"torch.Size": [1]}),
        {torch.float32: 1, torch.float64: 2},
        OrderedDict({torch.device("cpu"): 1}),
        Counter({torch.Size([1]): 2, "b": 1}),
        {(1, (torch.float16, 2)): "deep"},
        {(0, "running_mean"): None, 3: (1, [2, (3,)])},
        {"$tuple": {"torch.Size": torch.Size([1])}},
        [(), {}, [], OrderedDict(), Counter(), None, True, 1 << 70, b"\x00", "torch."],
    ],
    ids=str,
)
def test_values_of_the_users_own_are_not_taken_for_anything_else(value: Any) -> None:
    back = through(value)
    assert repr(back) == repr(value)
    assert back == value


def test_tensors_are_found_wherever_they_are() -> None:
    value = {"a": [torch.ones(2), (torch.tensor(3), OrderedDict(b=torch.zeros(0)))], "torch.x": torch.eye(2)}
    assert same(through(value), value)


def test_what_is_not_known_goes_through_unchanged() -> None:
    odd = object()
    assert to_plain([odd])[0] is odd
    with pytest.raises(UnsupportedStateError, match=r"state\.a\[0\]: an object cannot be saved"):
        values.dump(to_plain({"a": [odd]}))


@pytest.mark.parametrize(
    "tensor", [torch.eye(2).to_sparse(), torch.empty(2, device="meta")], ids=["sparse", "without-memory"]
)
def test_tensors_that_are_more_than_numbers_are_refused_with_their_path(tensor: Tensor) -> None:
    with pytest.raises(UnsupportedStateError, match=r"state\.a: a torch\.Tensor cannot be saved"):
        values.dump(to_plain({"a": tensor}))


def test_what_contains_itself_is_refused_with_its_path() -> None:
    loop: list[Any] = []
    loop += [loop, loop]
    with pytest.raises(UnsupportedStateError, match=r"state\.a\[0\].* contains itself"):
        values.dump(to_plain({"a": loop}))


def test_what_is_nested_too_deeply_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(900):
        deep = [deep]
    with pytest.raises(UnsupportedStateError, match="is nested more than"):
        values.dump(to_plain(deep))


@pytest.mark.parametrize(
    "form",
    [
        {"torch.Thing": 1},
        {"torch.dtype": "float33"},
        {"torch.dtype": "nn"},
        {"torch.Tensor": ["float32", [2], np.zeros(7, np.uint8)]},
        {"torch.Tensor": ["float32", [3], np.zeros(8, np.uint8)]},
        {"torch.Tensor": ["float32"]},
        {"torch.Size": "ab"},
        {"torch.TensorSpec": []},
        {"torch.dict": [1]},
    ],
    ids=str,
)
def test_what_is_no_form_is_damaged(form: Any) -> None:
    with pytest.raises(DamagedCheckpointError, match="values of torch cannot be read"):
        from_plain(form)


# --- what a training state holds -------------------------------------------------------------------------------------

Optimizer = torch.optim.Optimizer
SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 2, 4]),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=9),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.1, 0.3, 2),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.5, 3), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.MultiStepLR(optimizer, [1, 3])], [3]
    ),
}


def rates(optimizer: Optimizer, step: Callable[[], None], steps: int) -> list[float]:
    seen = []
    for _ in range(steps):
        optimizer.step()
        step()
        seen.append(optimizer.param_groups[0]["lr"])
    return seen


def at_work(kind: Callable[[Optimizer], Any]) -> tuple[Optimizer, Any]:
    optimizer = make("SGD", network().parameters())
    return optimizer, kind(optimizer)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on_from_its_state_as_it_did_the_first_time(name: str) -> None:
    optimizer, scheduler = at_work(SCHEDULERS[name])
    rates(optimizer, scheduler.step, 2)
    form, now = values.dump(to_plain(scheduler.state_dict()))[0], optimizer.param_groups[0]["lr"]
    first = rates(optimizer, scheduler.step, 5)
    other, fresh = at_work(SCHEDULERS[name])
    fresh.load_state_dict(from_plain(values.load(form)))
    other.param_groups[0].update(lr=now)
    assert rates(other, fresh.step, 5) == first


def test_a_scheduler_that_watches_a_metric_goes_on_from_its_state() -> None:
    kind = lr_scheduler.ReduceLROnPlateau
    optimizer, scheduler = at_work(lambda optimizer: kind(optimizer, patience=1))
    scheduler.step(1.0)
    state = through(scheduler.state_dict())
    first = rates(optimizer, lambda: scheduler.step(2.0), 4)
    other, fresh = at_work(lambda optimizer: kind(optimizer, patience=1))
    fresh.load_state_dict(state)
    assert rates(other, lambda: fresh.step(2.0), 4) == first
    assert first[0] != first[-1]


def test_the_state_of_a_scaler() -> None:
    scaler, fresh = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (8.0, 2.0))
    scaler.scale(torch.ones(1))
    scaler.update(3.0)
    fresh.load_state_dict(through(scaler.state_dict()))
    assert fresh.state_dict() == scaler.state_dict()


@pytest.mark.parametrize("draw", [random.random, random.gauss, np.random.randn, lambda: float(torch.randn(()))])
def test_the_state_of_random_generators(draw: Callable[[], float]) -> None:
    part = RandomState()
    draw()
    state = through(part.export())
    first = [draw(), draw()]
    part.adopt(state)
    assert [draw(), draw()] == first


def test_the_state_of_a_sampler() -> None:
    sampler, fresh = (ElasticSampler(TensorDataset(torch.arange(12))) for _ in range(2))
    sampler.set_epoch(2)
    sampler.record_batch(0, 3)
    fresh.load_state_dict(through(sampler.state_dict()))
    assert (fresh.epoch, fresh.processed_num, list(fresh)) == (2, 3, list(sampler)[3:])


def test_the_state_of_a_rule_for_learning_rates() -> None:
    rule, fresh = LearningRateRule(workers=3), LearningRateRule()
    fresh.load_state_dict(through(rule.state_dict()))
    assert fresh.workers == 3
