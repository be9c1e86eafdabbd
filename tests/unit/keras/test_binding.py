"""Horovod's collectives of host memory through TensorFlow, with one real worker."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError
from horovod.tensorflow import mpi_ops

from horovod_ft.errors import RecoveryTimeoutError
from horovod_ft.keras.binding import TensorFlowBinding
from horovod_ft.membership.base import FLAGS
from horovod_ft.membership.counts import fields_of


@pytest.fixture
def binding() -> TensorFlowBinding:
    return TensorFlowBinding(timeout_s=5.0)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    opened = threading.Event()
    yield opened
    opened.set()


def test_it_knows_its_place(binding: TensorFlowBinding) -> None:
    assert (binding.rank(), binding.size()) == (0, 1)
    assert binding.failure_types == (HorovodInternalError,)


@pytest.mark.parametrize("value", [None, "text", {"a": [1, 2.5]}, (1,), np.arange(3).tolist()])
def test_objects_are_gathered_and_broadcast(binding: TensorFlowBinding, value: Any) -> None:
    assert binding.allgather_object(value, "value") == [value]
    assert binding.broadcast_object(value, 0, "value") == value


def test_functions_can_be_sent(binding: TensorFlowBinding) -> None:
    received = binding.allgather_object(lambda: 7, "function")
    assert received[0]() == 7


@pytest.mark.parametrize("length", [0, 1, 1000])
def test_bytes_are_broadcast_in_place(binding: TensorFlowBinding, length: int) -> None:
    data = np.arange(length, dtype=np.uint8)
    binding.broadcast_bytes(data, 0, "bytes")
    assert data.tolist() == np.arange(length, dtype=np.uint8).tolist()


def test_received_bytes_fill_the_buffer(binding: TensorFlowBinding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi_ops, "broadcast", lambda tensor, root: tensor + 1)
    monkeypatch.setattr(binding, "rank", lambda: 1)
    data = np.zeros(3, dtype=np.uint8)
    binding.broadcast_bytes(data, 0, "bytes")
    assert data.tolist() == [1, 1, 1]


@pytest.mark.parametrize("flags", range(2**FLAGS))
def test_flags_are_merged(binding: TensorFlowBinding, flags: int) -> None:
    assert binding.any_async(flags).result() == flags


def test_flags_are_merged_bit_by_bit(binding: TensorFlowBinding, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three workers, of whom two have said yes to the first question, and one to the last."""
    counts = [0b1001, 0b0001, 0b0000]
    summed = sum(map(fields_of, counts))
    monkeypatch.setattr(binding, "_sum", lambda fields: tf.constant([summed], dtype=tf.int64))
    assert binding.any_async(0b1001).result() == 0b1001


def test_flags_can_be_asked_again(binding: TensorFlowBinding) -> None:
    assert [binding.any_async(flags).result() for flags in (1, 0, 8, 1)] == [1, 0, 8, 1]


def test_to_ask_for_flags_does_not_block(
    binding: TensorFlowBinding, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(fields: Any) -> Any:
        gate.wait()
        return fields

    monkeypatch.setattr(binding, "_sum", slow)
    pending = binding.any_async(1)
    gate.set()
    assert pending.result() == 1


def test_a_question_that_rides_is_given_away_once(
    binding: TensorFlowBinding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(binding, "_sum")  # it is not asked otherwise
    binding.riding = True
    pending = binding.any_async(0b1001)
    assert binding.taken_along() is pending
    assert binding.taken_along() is None
    pending.answered(fields_of(0b1001) + fields_of(0b0010))
    assert pending.result() == 0b1011


def test_a_question_that_no_step_has_taken_along_is_asked_in_the_end(binding: TensorFlowBinding) -> None:
    binding.riding = True
    assert binding.any_async(0b0101).result() == 0b0101
    assert binding.taken_along() is None


def test_a_question_of_its_own_is_not_given_away(binding: TensorFlowBinding) -> None:
    pending = binding.any_async(1)
    assert binding.taken_along() is None
    assert pending.result() == 1


@pytest.mark.parametrize("size", [2, 3])
def test_objects_of_several_workers_are_told_apart(
    binding: TensorFlowBinding, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(mpi_ops, "allgather", lambda tensor: tf.tile(tensor, [size]))
    assert binding.allgather_object("mine", "value") == ["mine"] * size


def test_a_wait_without_end_names_what_was_waited_for(gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi_ops, "allgather", lambda tensor: gate.wait())
    binding = TensorFlowBinding(timeout_s=0.002)
    with pytest.raises(RecoveryTimeoutError, match="for the agreement of all workers: a worker of the group is alive"):
        binding.allgather_object(1, "agreement")


def test_a_failed_collective_raises_the_failure(binding: TensorFlowBinding, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(tensor: Any) -> None:
        raise tf.errors.UnknownError(None, None, "Horovod has been shut down. [Op:HorovodAllgather]")

    monkeypatch.setattr(mpi_ops, "allgather", broken)
    with pytest.raises(binding.failure_types, match="Horovod has been shut down"):
        binding.allgather_object(1, "agreement")


def test_a_foreign_error_of_a_collective_is_raised_as_it_is(
    binding: TensorFlowBinding, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(tensor: Any) -> None:
        raise tf.errors.UnknownError(None, None, "the disk is on fire")

    monkeypatch.setattr(mpi_ops, "allgather", broken)
    with pytest.raises(tf.errors.UnknownError, match="the disk is on fire"):
        binding.allgather_object(1, "agreement")


def test_init_hands_the_users_arguments_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(hvd, "init", lambda *args, **options: calls.append((args, options)))
    TensorFlowBinding(1.0, [0, 1], process_sets=[]).init()
    assert calls == [(([0, 1],), {"process_sets": []})]
