"""Horovod's collectives of host memory, with one real worker."""

from __future__ import annotations

from typing import Any

import horovod.torch
import numpy as np
import pytest
import torch

import horovod_ft.torch as hvd
from horovod_ft.errors import RecoveryTimeoutError
from horovod_ft.membership.base import FLAGS
from horovod_ft.membership.counts import fields_of
from horovod_ft.torch import handles
from horovod_ft.torch.binding import TorchBinding


@pytest.fixture
def binding() -> TorchBinding:
    return TorchBinding(timeout_s=5.0)


def test_it_knows_its_place(binding: TorchBinding) -> None:
    assert (binding.rank(), binding.size()) == (0, 1)
    assert binding.failure_types == (hvd.HorovodInternalError,)


@pytest.mark.parametrize("value", [None, "text", {"a": [1, 2.5]}, (1,), np.arange(3).tolist()])
def test_objects_are_gathered_and_broadcast(binding: TorchBinding, value: Any) -> None:
    assert binding.allgather_object(value, "value") == [value]
    assert binding.broadcast_object(value, 0, "value") == value


def test_functions_can_be_sent(binding: TorchBinding) -> None:
    received = binding.allgather_object(lambda: 7, "function")
    assert received[0]() == 7


@pytest.mark.parametrize("length", [0, 1, 1000])
def test_bytes_are_broadcast_in_place(binding: TorchBinding, length: int) -> None:
    data = np.arange(length, dtype=np.uint8)
    binding.broadcast_bytes(data, 0, "bytes")
    assert data.tolist() == np.arange(length, dtype=np.uint8).tolist()


@pytest.mark.parametrize("flags", range(2**FLAGS))
def test_flags_are_merged(binding: TorchBinding, flags: int) -> None:
    assert binding.any_async(flags).result() == flags


def test_flags_are_merged_bit_by_bit(binding: TorchBinding, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three workers, of whom two have said yes to the first question, and one to the last."""
    pending = binding.any_async(0b1001)
    counts = [0b1001, 0b0001, 0b0000]
    summed = sum(map(fields_of, counts))
    monkeypatch.setattr("horovod_ft.torch.binding.hvd.synchronize", lambda handle: torch.tensor([summed]))
    assert pending.result() == 0b1001


def test_flags_can_be_asked_again(binding: TorchBinding) -> None:
    assert [binding.any_async(flags).result() for flags in (1, 0, 8, 1)] == [1, 0, 8, 1]


@pytest.mark.parametrize("size", [2, 3])
def test_objects_of_several_workers_are_told_apart(
    binding: TorchBinding, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    def gather(tensor: Any, name: str, what: str) -> Any:
        return tensor.repeat(size)

    monkeypatch.setattr(binding, "_allgather", gather)
    assert binding.allgather_object("mine", "value") == ["mine"] * size


def test_a_wait_without_end_names_what_was_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handles, "done", lambda _: False)
    binding = TorchBinding(timeout_s=0.002)
    with pytest.raises(RecoveryTimeoutError, match="for the agreement: a worker of the group is alive but does not"):
        binding.wait(0, "the agreement")


def test_a_failed_wait_raises_the_failure(binding: TorchBinding, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: int) -> None:
        raise hvd.HorovodInternalError("the peer is gone")

    monkeypatch.setattr(horovod.torch, "synchronize", broken)
    with pytest.raises(binding.failure_types, match="the peer is gone"):
        binding.wait(0, "the agreement")


def test_init_hands_the_users_arguments_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(horovod.torch, "init", lambda *args, **options: calls.append((args, options)))
    TorchBinding(1.0, [0, 1], process_sets=[]).init()
    assert calls == [(([0, 1],), {"process_sets": []})]
