"""The memory of one parameter, and parameters that are reduced together."""

from __future__ import annotations

from typing import Any

import horovod.torch
import pytest
import torch
from torch import nn

import horovod_ft.torch as hvd
from horovod_ft.errors import ConfigurationError
from horovod_ft.torch.slots import Bucket, Slot, flat, grouped, hooked, kept_or_new, trainable


def slot(value: torch.Tensor) -> Slot:
    return Slot("name", nn.Parameter(value), 1)


IMAGE = torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("parameter", "tensor", "fits"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 3), True),
        (torch.zeros(2, 3), torch.zeros(3, 2), False),
        (torch.zeros(2, 3), torch.zeros(2, 3).double(), False),
        (torch.zeros(2, 3), torch.zeros(3, 2).t(), False),
        (torch.zeros(2, 3), torch.zeros(2, 3).to_sparse(), False),
        (torch.zeros(2, 3), torch.zeros(1, 3).expand(2, 3), False),
        (torch.zeros(2, 6)[:, ::2], torch.zeros(2, 3), True),
        (torch.zeros(2, 6)[:, ::2], torch.zeros(2, 6)[:, ::2], False),
        (torch.zeros(3, 2).t(), torch.zeros(3, 2).t(), True),
        (IMAGE, IMAGE.clone(), True),
        (IMAGE, torch.zeros(2, 3, 4, 4), False),
        (torch.zeros(()), torch.zeros(()), True),
        (torch.zeros(1, 3), torch.zeros(1, 9)[:, :3], True),
    ],
)
def test_what_fits_has_the_parameters_shape_kind_and_order_and_no_holes(
    parameter: torch.Tensor, tensor: torch.Tensor, fits: bool
) -> None:
    assert slot(parameter).fits(tensor) is fits


def test_a_change_of_the_parameters_memory_format_is_noticed() -> None:
    one = slot(torch.zeros(2, 3, 4, 4))
    assert not one.fits(IMAGE)
    one.parameter.data = one.parameter.data.contiguous(memory_format=torch.channels_last)
    assert one.fits(IMAGE)


def test_room_is_kept_while_it_fits_and_made_anew_otherwise() -> None:
    one = slot(torch.zeros(2, 3))
    room = one.room()
    assert one.room() is room
    one.parameter.data = one.parameter.data.double()
    assert one.room().dtype == torch.float64


def test_room_does_not_require_gradients() -> None:
    assert not slot(torch.zeros(2)).room().requires_grad


def test_flat_gives_the_memory_as_it_lies() -> None:
    image = torch.arange(24.0).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    line = flat(image)
    assert line.is_contiguous()
    assert line.data_ptr() == image.data_ptr()
    line += 1.0
    assert torch.equal(image, torch.arange(24.0).reshape(1, 2, 3, 4) + 1.0)


def test_flat_respects_an_offset() -> None:
    part = torch.arange(12.0).reshape(4, 3)[1:3].t()
    assert flat(part).tolist() == [3.0, 4.0, 5.0, 6.0, 7.0, 8.0]


def test_a_wire_is_kept_while_shape_dtype_and_device_stay() -> None:
    model = torch.zeros(2, 3)
    wire = kept_or_new(None, model, torch.float16)
    assert (wire.shape, wire.dtype) == ((2, 3), torch.float16)
    assert kept_or_new(wire, model, torch.float16) is wire
    assert kept_or_new(wire, model, torch.float32) is not wire
    assert kept_or_new(wire, torch.zeros(3, 2), torch.float16) is not wire


def test_a_missing_gradient_counts_as_what_the_last_one_was() -> None:
    one = slot(torch.zeros(4, 2))
    kinds = []
    for gradient in (None, torch.ones(4, 2).to_sparse(1), None, torch.ones(4, 2), None):
        one.parameter.grad = gradient
        one.look()
        kinds.append(one.sparse)
    assert kinds == [0, 1, 1, 0, 0]


@pytest.mark.parametrize("dimensions", [1, 2])
def test_nothing_is_a_sparse_gradient_without_elements(dimensions: int) -> None:
    one = slot(torch.zeros(4, 2))
    one.sparse = dimensions
    nothing = one.nothing().coalesce()
    assert (nothing.shape, nothing.sparse_dim(), nothing.values().shape[0]) == ((4, 2), dimensions, 0)


def test_indices_from_a_worker_with_a_larger_table_are_refused() -> None:
    one = slot(torch.zeros(4, 2))
    with pytest.raises(RuntimeError, match="size is inconsistent with indices"):
        one.made_of(torch.tensor([[9]]), torch.ones(1, 2))


# --- buckets ---------------------------------------------------------------------------------------------------------


def bucket_with(monkeypatch: pytest.MonkeyPatch, *outputs: Any) -> Bucket:
    """A bucket whose handles give these outputs, each once; exceptions are raised."""
    left = dict(enumerate(outputs))

    def synchronize(handle: int) -> Any:
        output = left.pop(handle, None)
        if isinstance(output, BaseException):
            raise output
        return output

    monkeypatch.setattr(horovod.torch, "synchronize", synchronize)
    bucket = Bucket([slot(torch.zeros(2))])
    bucket.handles = list(range(len(outputs)))
    return bucket


def test_outputs_can_be_collected_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = bucket_with(monkeypatch, torch.ones(1), torch.ones(2))
    bucket.collect()
    bucket.collect()
    assert bucket.outputs is not None
    assert [len(output) for output in bucket.outputs] == [1, 2]


def test_an_output_that_is_lost_counts_as_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = bucket_with(monkeypatch, torch.ones(1), None)
    with pytest.raises(hvd.HorovodInternalError, match="cut short"):
        bucket.collect()
    assert bucket.failed
    assert bucket.outputs is None


def test_the_end_of_a_broken_group_keeps_what_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = bucket_with(monkeypatch, torch.ones(1))
    bucket.end(deadline=0.0)
    assert bucket.outputs is not None


@pytest.mark.parametrize("error", [hvd.HorovodInternalError("gone"), ValueError("refused")])
def test_the_end_of_a_broken_group_swallows_failures(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    bucket = bucket_with(monkeypatch, torch.ones(1), error)
    bucket.end(deadline=0.0)
    assert bucket.failed
    assert bucket.outputs is None


def test_the_end_waits_for_the_handles_that_a_failure_left(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = bucket_with(monkeypatch, hvd.HorovodInternalError("gone"), torch.ones(1))
    with pytest.raises(hvd.HorovodInternalError):
        bucket.collect()
    bucket.end(deadline=0.0)
    assert horovod.torch.synchronize(1) is None  # somebody has waited for it


# --- who goes with whom ----------------------------------------------------------------------------------------------


def slots(count: int) -> list[Slot]:
    return [slot(torch.zeros(1)) for _ in range(count)]


@pytest.mark.parametrize(
    ("groups", "sizes"), [(None, [1] * 5), (0, [1] * 5), (1, [5]), (2, [3, 2]), (3, [2, 2, 1]), (7, [1] * 5)]
)
def test_a_number_cuts_the_parameters_into_even_groups(groups: int | None, sizes: list[int]) -> None:
    some = slots(5)
    buckets = grouped(some, groups)
    assert [len(bucket) for bucket in buckets] == sizes
    assert [one for bucket in buckets for one in bucket] == some


def test_lists_group_their_members_and_leave_the_others_alone() -> None:
    some = slots(4)
    parameters = [one.parameter for one in some]
    buckets = grouped(some, [[parameters[3], parameters[0]], [nn.Parameter(torch.zeros(1))]])
    assert buckets == [[some[3], some[0]], [some[1]], [some[2]]]


@pytest.mark.parametrize("groups", ["ab", [1], [[1]], {"a": 1}, 2.5])
def test_other_groups_are_refused(groups: Any) -> None:
    with pytest.raises(ConfigurationError, match="groups must be a number, or a list of lists"):
        grouped(slots(2), groups)


def test_a_parameter_in_two_groups_is_refused() -> None:
    some = slots(2)
    member = some[0].parameter
    with pytest.raises(ConfigurationError, match="one group only"):
        grouped(some, [[member], [member]])


# --- hooks -----------------------------------------------------------------------------------------------------------


def test_a_hook_on_a_frozen_parameter_waits_until_it_is_thawed() -> None:
    parameter = nn.Parameter(torch.ones(2), requires_grad=False)
    calls: list[torch.Tensor] = []
    hooked(parameter, calls.append)
    assert not parameter.requires_grad
    parameter.requires_grad_(True)
    parameter.sum().backward()
    assert calls == [parameter]


def test_integers_never_have_gradients() -> None:
    assert not trainable(torch.zeros(2, dtype=torch.int8))
    assert trainable(torch.zeros(2))
