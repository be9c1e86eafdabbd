"""Reduction from backward hooks: right at any size, out of place, and safe against a failure at any moment."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import horovod.torch
import pytest
import torch
import torch.nn.functional as F
from horovod.torch import mpi_ops
from torch import Tensor, nn

import horovod_ft.torch as hvd
from horovod_ft.torch import reducer as reducer_module
from tests.unit.torch.tools import (
    Peers,
    Words,
    backward,
    batch,
    copy_of,
    distributed,
    full,
    gradients,
    make,
    network,
    same,
    train,
)


def local_gradients(model: nn.Module, step: int = 0) -> dict[str, Tensor]:
    """What one backward pass gives, without touching the model."""
    twin = network()
    twin.load_state_dict(model.state_dict())
    backward(twin, step)
    return gradients(twin)


# --- what is reduced -------------------------------------------------------------------------------------------------


def test_gradients_are_averaged_over_all_workers(peers: Peers) -> None:
    model = network()
    optimizer = distributed(model)
    peers.others = {name: full(p, 3.0) for name, p in model.named_parameters()}
    backward(model)
    local = gradients(model)
    optimizer.synchronize()
    assert all(torch.allclose(g, (local[name] + 3.0) / 2) for name, g in gradients(model).items())


def test_gradients_are_summed_if_asked_for(peers: Peers) -> None:
    model = network()
    optimizer = distributed(model, op=hvd.Sum)
    peers.others["0.weight"] = full(model[0].weight, 3.0)
    backward(model)
    local = gradients(model)["0.weight"]
    optimizer.synchronize()
    assert torch.equal(gradients(model)["0.weight"], local + 3.0)


def test_predivision_divides_before_the_sum_and_multiplies_after_it(peers: Peers) -> None:
    model = network()
    optimizer = distributed(model, gradient_predivide_factor=4.0)
    backward(model)
    local = gradients(model)["0.weight"]
    optimizer.synchronize()
    assert peers.scales["0.weight"] == (0.25, 4.0)
    assert torch.allclose(gradients(model)["0.weight"], local / 2)


def test_gradients_are_handed_over_during_the_backward_pass(peers: Peers) -> None:
    model = network()
    optimizer = distributed(model)
    backward(model)
    assert peers.calls == ["2.weight", "0.weight"]
    optimizer.step()


def test_names_default_to_positions(peers: Peers) -> None:
    model = network()
    train(model, hvd.DistributedOptimizer(make("SGD", model.parameters())), range(1))
    assert set(peers.calls) == {"group0.0", "group0.1"}


def test_two_optimizers_with_the_same_names_are_told_apart_by_their_prefix(peers: Peers) -> None:
    one, two = network(0), network(1)
    first, second = distributed(one), distributed(two)
    first.ft_reducer.prefix = "first."
    x, _ = batch(0)
    (one(x).sum() + two(x).sum()).backward()
    first.step()
    second.step()
    assert sorted(peers.calls) == ["0.weight", "2.weight", "first.0.weight", "first.2.weight"]


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_gradients_are_summed_up_locally_over_several_passes(peers: Peers, passes: int) -> None:
    model = network()
    optimizer = distributed(model, backward_passes_per_step=passes)
    for step in range(passes):
        assert peers.calls == []
        backward(model, step)
    assert len(peers.calls) == 2
    local = gradients(model)["0.weight"]
    optimizer.synchronize()
    assert torch.allclose(gradients(model)["0.weight"], local / 2)


def test_a_step_before_all_passes_reduces_what_there_is(peers: Peers) -> None:
    model = network()
    optimizer = distributed(model, backward_passes_per_step=3)
    backward(model)
    optimizer.step()
    assert len(peers.calls) == 2
    assert not optimizer.ft_reducer.underway()


def test_accumulating_lasts_until_the_last_pass() -> None:
    model = network()
    optimizer = distributed(model, backward_passes_per_step=2)
    seen = [optimizer.ft_reducer.accumulating()]
    for _ in range(2):
        backward(model)
        seen.append(optimizer.ft_reducer.accumulating())
    optimizer.step()
    assert seen == [False, True, False]


def test_create_graph_is_supported() -> None:
    model = network()
    optimizer = distributed(model)
    x, y = batch(0)
    with pytest.warns(UserWarning, match="create_graph=True"):
        F.cross_entropy(model(x), y).backward(create_graph=True)
    optimizer.step()
    assert all(p.grad is not None and not p.grad.requires_grad for p in model.parameters())


# --- groups ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("groups", "calls"), [(1, 1), (2, 2), (4, 4), (9, 5), (0, 5), (None, 5)])
def test_a_number_of_groups_gives_so_many_collectives(peers: Peers, groups: int | None, calls: int) -> None:
    model = nn.Sequential(network(), nn.Linear(3, 2), nn.Linear(2, 3, bias=False))
    train(model, distributed(model, groups=groups), range(1))
    assert len(peers.calls) == calls


def test_listed_groups_go_together_and_the_others_on_their_own(peers: Peers) -> None:
    model: Any = nn.Sequential(network(), nn.Linear(3, 3))
    listed = [[model[0][0].weight, model[1].bias], []]
    train(model, distributed(model, groups=listed), range(1))
    assert sorted(peers.calls) == ["0.0.weight and 1 more", "0.2.weight", "1.weight"]


@pytest.mark.parametrize("groups", [1, 2])
def test_groups_train_like_single_parameters(groups: int) -> None:
    ours, plain = network(), network()
    train(ours, distributed(ours, groups=groups), range(3))
    train(plain, make("SGD", plain.parameters()), range(3))
    assert same(copy_of(ours), copy_of(plain))


def test_a_group_may_mix_dtypes() -> None:
    model: Any = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2).double()])
    optimizer = distributed(model, groups=1)
    loss = model[0](torch.ones(1, 2)).sum() + model[1](torch.ones(1, 2).double()).sum()
    loss.backward()
    local = gradients(model)
    optimizer.synchronize()
    assert same(gradients(model), local)


def test_a_group_with_an_unused_member_is_completed_in_the_step(peers: Peers) -> None:
    model: Any = nn.Sequential(network(), nn.Linear(3, 3))
    optimizer = distributed(model, groups=1)
    backward(model[0])
    assert peers.calls == []
    optimizer.step()
    assert peers.calls == ["0.0.weight and 3 more"]


# --- compression -----------------------------------------------------------------------------------------------------


def test_fp16_rounds_what_is_sent_and_keeps_the_dtype(peers: Peers) -> None:
    model = network()
    optimizer = distributed(model, compression=hvd.Compression.fp16)
    backward(model)
    local = gradients(model)["0.weight"]
    optimizer.synchronize()
    assert torch.equal(gradients(model)["0.weight"], (local.half() / 2).float())


class Reversed:
    """A compressor whose result is neither contiguous nor of the gradient's dtype, and that needs its context."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor.double().t(), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, context: Any) -> Tensor:
        return tensor.t().to(context)


class Same(hvd.Compression.none):  # type: ignore[misc]
    """A compressor that hands out the gradient itself."""


@pytest.mark.parametrize("compression", [Reversed, Same, Same()], ids=["converting", "aliasing", "an instance"])
def test_a_custom_compressor_is_used(peers: Peers, compression: Any) -> None:
    model = network()
    optimizer = distributed(model, compression=compression)
    peers.others["0.weight"] = torch.ones(())
    backward(model)
    local = gradients(model)["0.weight"]
    optimizer.synchronize()
    assert torch.allclose(gradients(model)["0.weight"], (local + 1.0) / 2)


@pytest.mark.parametrize("compression", [Reversed, Same, hvd.Compression.fp16, hvd.Compression.none])
def test_local_gradients_survive_a_failure_under_every_compression(peers: Peers, compression: Any) -> None:
    model = network()
    optimizer = distributed(model, compression=compression)
    peers.broken = {"0.weight", "2.weight"}
    backward(model)
    local = gradients(model)
    with pytest.raises(hvd.HorovodInternalError):
        optimizer.step()
    assert same(gradients(model), local)


def test_a_compressor_that_fails_is_asked_again_by_the_next_try(peers: Peers) -> None:
    class Fragile(Same):
        broken = True

        @classmethod
        def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
            if cls.broken:
                raise ValueError("no space left")
            return tensor, None

    model = network()
    optimizer = distributed(model, compression=Fragile)
    with pytest.raises(ValueError, match="no space left"):
        backward(model)
    with pytest.raises(ValueError, match="no space left"):
        optimizer.step()
    Fragile.broken = False
    optimizer.step()
    assert sorted(peers.calls) == ["0.weight", "2.weight"]


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compression", "weight"),
    [(hvd.Compression.none, 1.0), (hvd.Compression.fp16, 1.0), (hvd.Compression.none, 0.5)],
    ids=["plain", "fp16", "weighted"],
)
def test_gradients_live_in_two_places_for_ever(compression: Any, weight: float) -> None:
    model = network()
    optimizer = distributed(model, compression=compression)
    optimizer.ft_reducer.set_weight(weight)
    places: dict[str, set[int]] = {name: set() for name, _ in model.named_parameters()}
    for step in range(8):
        optimizer.zero_grad(set_to_none=False)
        backward(model, step)
        optimizer.step()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            places[name].add(parameter.grad.data_ptr())
    assert {len(used) for used in places.values()} == {2}


def test_the_reducer_keeps_the_local_gradient_as_the_next_result() -> None:
    model = network()
    optimizer = distributed(model)
    backward(model)
    local = [p.grad.data_ptr() for p in model.parameters() if p.grad is not None]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    backward(model)
    optimizer.step()
    assert [p.grad.data_ptr() for p in model.parameters() if p.grad is not None] == local


def test_a_gradient_that_was_kept_from_the_last_step_is_not_overwritten() -> None:
    model = network()
    optimizer = distributed(model)
    train(model, optimizer, range(1))
    kept = model[0].weight.grad
    assert kept is not None
    value = kept.clone()
    train(model, optimizer, range(1, 4))
    assert torch.equal(kept, value)


def test_an_optimizer_that_is_gone_leaves_no_hook_behind() -> None:
    model = network()
    optimizer = distributed(model)
    gone = weakref.ref(optimizer.ft_reducer)
    del optimizer
    gc.collect()
    assert gone() is None
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


# --- weights ---------------------------------------------------------------------------------------------------------


def test_a_weight_scales_this_workers_gradients(peers: Peers) -> None:
    model = network()
    optimizer = distributed(model)
    optimizer.ft_reducer.set_weight(1.5)
    peers.others["0.weight"] = full(model[0].weight, 3.0)
    backward(model)
    local = gradients(model)["0.weight"]
    optimizer.synchronize()
    assert torch.allclose(gradients(model)["0.weight"], (1.5 * local + 3.0) / 2)


def test_an_idle_worker_contributes_nothing_even_if_its_gradient_is_not_finite(peers: Peers) -> None:
    model = network()
    optimizer = distributed(model)
    optimizer.ft_reducer.set_weight(0.0)
    peers.others["0.weight"] = full(model[0].weight, 3.0)
    x, y = batch(0)
    (F.cross_entropy(model(x), y) * float("nan")).backward()
    optimizer.synchronize()
    assert torch.equal(gradients(model)["0.weight"], full(model[0].weight, 1.5))


@pytest.mark.parametrize("weights", [(1.0, 0.5), (0.5, 1.0), (0.0, 2.0), (2.0, 0.0), (0.5, 0.5)])
def test_each_accumulated_batch_keeps_its_own_weight(peers: Peers, weights: tuple[float, float]) -> None:
    model = network()
    optimizer = distributed(model, backward_passes_per_step=2, op=hvd.Sum)
    expected = sum(weight * local_gradients(model, step)["0.weight"] for step, weight in enumerate(weights))
    for step, weight in enumerate(weights):
        optimizer.ft_reducer.set_weight(weight)
        backward(model, step)
    optimizer.synchronize()
    assert torch.allclose(gradients(model)["0.weight"], torch.as_tensor(expected), atol=1e-7)


def test_a_change_of_weight_between_steps_touches_no_gradient() -> None:
    model = network()
    optimizer = distributed(model)
    train(model, optimizer, range(1))
    before = gradients(model)
    optimizer.ft_reducer.set_weight(0.5)
    assert same(gradients(model), before)


def test_clearing_gradients_clears_those_of_earlier_batches_too(peers: Peers) -> None:
    model = network()
    optimizer = distributed(model, backward_passes_per_step=2, op=hvd.Sum)
    backward(model, 0)
    optimizer.ft_reducer.set_weight(2.0)  # moves the first batch's gradients aside
    optimizer.zero_grad()
    backward(model, 1)
    optimizer.synchronize()
    assert torch.allclose(gradients(model)["0.weight"], 2 * local_gradients(model, 1)["0.weight"])


# --- sparse gradients ------------------------------------------------------------------------------------------------


def test_sparse_gradients_of_all_workers_are_gathered_and_averaged(peers: Peers) -> None:
    model = Words()
    optimizer = distributed(model, make("SparseAdam", model.parameters()))
    peers.rows = {
        "table.weight.values": full(torch.empty(1, 3), 4.0),
        "table.weight.indices": torch.tensor([[9]]),
    }
    model.table(torch.tensor([1, 1, 2])).sum().backward()
    optimizer.synchronize()
    gradient = model.table.weight.grad
    assert gradient is not None
    assert gradient.is_sparse
    expected = torch.zeros(10, 3)
    expected[1], expected[2], expected[9] = 1.0, 0.5, 4.0
    assert torch.equal(gradient.to_dense(), expected)


def test_sparse_gradients_are_reduced_as_dense_ones_if_asked_for_and_stay_sparse(peers: Peers) -> None:
    model = Words()
    optimizer = distributed(model, make("SparseAdam", model.parameters()), sparse_as_dense=True)
    peers.others["table.weight"] = torch.eye(10, 3)
    model.table(torch.tensor([5])).sum().backward()
    optimizer.synchronize()
    assert peers.calls == ["table.weight"]
    gradient = model.table.weight.grad
    assert gradient is not None
    assert gradient.is_sparse
    expected = torch.eye(10, 3)
    expected[5] += 1.0
    assert torch.equal(gradient.to_dense(), expected / 2)


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_sparse_gradients_are_weighted(peers: Peers, weight: float, sparse_as_dense: bool) -> None:
    model = Words()
    optimizer = distributed(model, make("SparseAdam", model.parameters()), sparse_as_dense=sparse_as_dense, op=hvd.Sum)
    optimizer.ft_reducer.set_weight(weight)
    model.table(torch.tensor([5, 5])).sum().backward()
    optimizer.synchronize()
    gradient = model.table.weight.grad
    assert gradient is not None
    assert gradient.to_dense()[5].tolist() == [2 * weight] * 3


@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_sparse_gradients_accumulate_each_with_its_weight(peers: Peers, sparse_as_dense: bool) -> None:
    model = Words()
    optimizer = distributed(
        model, make("SparseAdam", model.parameters()), op=hvd.Sum, backward_passes_per_step=2,
        sparse_as_dense=sparse_as_dense,
    )  # fmt: skip
    for row, weight in ((1, 0.5), (2, 2.0)):
        optimizer.ft_reducer.set_weight(weight)
        model.table(torch.tensor([row])).sum().backward()
    optimizer.synchronize()
    gradient = model.table.weight.grad
    assert gradient is not None
    assert gradient.to_dense()[1:3, 0].tolist() == [0.5, 2.0]


@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_a_table_that_only_others_use_in_a_step_still_gets_their_sparse_gradient(
    peers: Peers, sparse_as_dense: bool
) -> None:
    model = Words()
    optimizer = distributed(
        model, make("SparseAdam", model.parameters()), op=hvd.Sum, sparse_as_dense=sparse_as_dense
    )
    model.table(torch.tensor([1])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    peers.rows = {"table.weight.values": torch.ones(1, 3), "table.weight.indices": torch.tensor([[7]])}
    peers.others["table.weight"] = torch.zeros(10, 3).index_fill_(0, torch.tensor([7]), 1.0)
    optimizer.step()
    gradient = model.table.weight.grad
    assert gradient is not None
    assert gradient.is_sparse
    assert gradient.to_dense().sum(1).tolist() == [0.0] * 7 + [3.0, 0.0, 0.0]


def test_sparse_local_gradients_survive_a_failure(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Words()
    optimizer = distributed(model, make("SparseAdam", model.parameters()))
    model.table(torch.tensor([5])).sum().backward()
    local = gradients(model)
    break_everything(monkeypatch)
    with pytest.raises(hvd.HorovodInternalError):
        optimizer.step()
    assert same(gradients(model), local)


# --- layouts and dtypes ----------------------------------------------------------------------------------------------


def convolution() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))


@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_channels_last_models_train_like_with_the_plain_optimizer(weight: float) -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(3):
            images = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            (model(images.contiguous(memory_format=torch.channels_last)).square().mean() * weight).backward()
            optimizer.step()

    ours, plain = (convolution().to(memory_format=torch.channels_last) for _ in range(2))
    optimizer = distributed(ours)
    run(ours, optimizer)
    run(plain, make("SGD", plain.parameters()))
    assert same(copy_of(ours), copy_of(plain))
    gradient = ours[0].weight.grad
    assert gradient is not None
    assert gradient.is_contiguous(memory_format=torch.channels_last)


def test_a_gradient_in_another_memory_order_is_brought_into_the_parameters(peers: Peers) -> None:
    model = convolution()
    optimizer = distributed(model)
    weight = model[0].weight
    values = torch.randn(4, 3, 3, 3)
    peers.others["0.weight"] = values
    model(torch.ones(1, 3, 4, 4)).sum().backward()
    local = gradients(model)["0.weight"]
    weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    optimizer.ft_reducer.discard()
    weight.grad = local  # still contiguous in the usual order
    peers.others["0.weight"] = torch.zeros(())
    optimizer.synchronize()
    assert torch.allclose(gradients(model)["0.weight"], local / 2)


def test_a_parameter_that_is_a_view_with_holes_is_reduced() -> None:
    class Holes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 6)[:, ::2])
            self.transposed = nn.Parameter(torch.randn(3, 4).t())
            self.empty = nn.Parameter(torch.empty(0, 3))
            self.scalar = nn.Parameter(torch.tensor(2.0))

    model = Holes()
    optimizer = distributed(model)
    for _ in range(2):
        optimizer.zero_grad()
        (model.weight.square().sum() + model.transposed.square().sum() + model.empty.sum() + model.scalar).backward()
        local = gradients(model)
        optimizer.synchronize()
        assert same(gradients(model), local)
        optimizer.step()


def test_bfloat16_is_reduced_in_single_precision(peers: Peers) -> None:
    model = network().bfloat16()
    optimizer = distributed(model)
    peers.others["0.weight"] = torch.full((6, 4), 0.001)
    backward(model, dtype=torch.bfloat16)
    local = gradients(model)["0.weight"]
    optimizer.synchronize()
    assert torch.equal(gradients(model)["0.weight"], ((local.float() + 0.001) / 2).bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_models_of_any_precision_train(dtype: torch.dtype) -> None:
    ours, plain = network().to(dtype), network().to(dtype)
    optimizer, reference = distributed(ours), make("SGD", plain.parameters())
    for step in range(3):
        for model, one in ((ours, optimizer), (plain, reference)):
            one.zero_grad()
            backward(model, step, dtype)
            one.step()
    assert same(copy_of(ours), copy_of(plain))


@pytest.mark.parametrize(
    ("before", "after"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float32, torch.float64)],
    ids=str,
)
def test_a_model_can_be_moved_to_another_dtype(before: torch.dtype, after: torch.dtype) -> None:
    model = network().to(before)
    optimizer = distributed(model, make("SGD", model.parameters(), momentum=0.0, nesterov=False))
    backward(model, 0, before)
    optimizer.step()
    model.to(after)
    optimizer.zero_grad()
    backward(model, 1, after)
    local = gradients(model)
    optimizer.synchronize()
    assert same(gradients(model), local)


def test_a_model_that_is_moved_in_the_middle_of_a_step_gets_no_garbage() -> None:
    model = network()
    optimizer = distributed(model)
    backward(model)
    model.double()
    with pytest.raises(RuntimeError, match=r"dtype|type of"):
        optimizer.step()


def test_what_horovod_is_reading_does_not_change_under_it(monkeypatch: pytest.MonkeyPatch) -> None:
    handed_over: list[torch.Tensor] = []
    really = mpi_ops._allreduce_async

    def recorded(tensor: torch.Tensor, *arguments: Any, **options: Any) -> int:
        handed_over.append(tensor)
        handle: int = really(tensor, *arguments, **options)
        return handle

    monkeypatch.setattr(mpi_ops, "_allreduce_async", recorded)
    model = network()
    optimizer = distributed(model)
    backward(model)
    before = [(tensor.dtype, tensor.data_ptr()) for tensor in handed_over]
    optimizer.ft_reducer.drain()  # or Horovod's thread may be reading still, should this fail
    model.double()
    assert [(tensor.dtype, tensor.data_ptr()) for tensor in handed_over] == before


# --- unused and frozen parameters ------------------------------------------------------------------------------------


def test_what_no_worker_used_gets_a_gradient_of_zero_as_with_horovod(peers: Peers) -> None:
    model: Any = nn.Sequential(network(), nn.Linear(3, 3, bias=False))
    optimizer = distributed(model)
    backward(model[0])
    optimizer.synchronize()
    gradient = model[1].weight.grad
    assert gradient is not None
    assert not gradient.any()


def test_what_only_others_used_gets_their_gradient(peers: Peers) -> None:
    model: Any = nn.Sequential(network(), nn.Linear(3, 3, bias=False))
    optimizer = distributed(model)
    peers.others["1.weight"] = full(model[1].weight, 3.0)
    backward(model[0])
    optimizer.step()
    assert torch.equal(gradients(model)["1.weight"], full(model[1].weight, 1.5))


def test_a_worker_without_any_gradient_takes_part(peers: Peers) -> None:
    model = network()
    optimizer = distributed(model)
    peers.others["0.weight"] = full(model[0].weight, 3.0)
    optimizer.step()
    assert torch.equal(gradients(model)["0.weight"], full(model[0].weight, 1.5))


def test_a_worker_without_any_gradient_takes_part_after_a_step_that_was_given_up(peers: Peers) -> None:
    model = network()
    optimizer = distributed(model)
    backward(model)
    optimizer.synchronize()  # and no step, as a gradient scaler does with infinite gradients
    optimizer.zero_grad()
    peers.calls.clear()
    optimizer.step()
    assert sorted(peers.calls) == ["0.weight", "2.weight"]


def test_what_is_frozen_later_is_left_alone_as_in_torch() -> None:
    def run(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        train(model, optimizer, range(2))
        model[0].requires_grad_(False)
        optimizer.zero_grad()
        train(model, optimizer, range(2, 4))

    ours, plain = network(), network()
    run(ours, distributed(ours))
    run(plain, make("SGD", plain.parameters()))
    assert same(copy_of(ours), copy_of(plain))


@pytest.mark.parametrize("groups", [None, 1])
def test_what_is_frozen_is_not_reduced(peers: Peers, groups: int | None) -> None:
    model = network()
    optimizer = distributed(model, groups=groups)
    model[0].requires_grad_(False)
    train(model, optimizer, range(2))
    assert peers.calls == ["2.weight"] * 2
    assert model[0].weight.grad is None


def test_what_was_frozen_at_first_is_reduced_once_it_is_thawed(peers: Peers) -> None:
    model = network()
    model[0].requires_grad_(False)
    optimizer = distributed(model)
    train(model, optimizer, range(1))
    model[0].requires_grad_(True)
    peers.calls.clear()
    train(model, optimizer, range(1))
    assert peers.calls == ["2.weight", "0.weight"]


def test_wrapping_does_not_thaw_anything() -> None:
    model = network()
    model[0].requires_grad_(False)
    distributed(model)
    assert [p.requires_grad for p in model.parameters()] == [False, True]


# --- failures --------------------------------------------------------------------------------------------------------


def break_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: int) -> Any:
        raise hvd.HorovodInternalError("the peer is gone")

    monkeypatch.setattr(horovod.torch, "synchronize", broken)


def test_a_failure_leaves_gradients_parameters_and_state_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    optimizer = distributed(model)
    train(model, optimizer, range(1))
    optimizer.zero_grad()
    state = copy.deepcopy(optimizer.state_dict())
    backward(model, 1)
    local, weights = gradients(model), copy_of(model)
    with monkeypatch.context() as patch:
        break_everything(patch)
        with pytest.raises(hvd.HorovodInternalError, match="the peer is gone"):
            optimizer.step()
    assert same([gradients(model), copy_of(model), optimizer.state_dict()], [local, weights, state])


@pytest.mark.parametrize("broken", ["0.weight", "2.weight"])
def test_one_lost_gradient_keeps_all_of_them_local(peers: Peers, broken: str) -> None:
    model = network()
    optimizer = distributed(model)
    peers.others = {name: full(p, 3.0) for name, p in model.named_parameters()}
    peers.broken = {broken}
    backward(model)
    local = gradients(model)
    with pytest.raises(hvd.HorovodInternalError):
        optimizer.step()
    assert same(gradients(model), local)


def lost_step(peers: Peers) -> tuple[Any, Any]:
    model = network()
    optimizer = distributed(model)
    peers.broken = {"0.weight"}
    backward(model)
    with pytest.raises(hvd.HorovodInternalError):
        optimizer.step()
    return model, optimizer


def test_whoever_catches_the_failure_gets_it_again_from_the_next_step(peers: Peers) -> None:
    model, optimizer = lost_step(peers)
    before = copy_of(model)
    with pytest.raises(hvd.HorovodInternalError, match="earlier in this step"):
        optimizer.step()
    with pytest.raises(hvd.HorovodInternalError, match="earlier in this step"), optimizer.skip_synchronize():
        optimizer.step()
    with pytest.raises(hvd.HorovodInternalError, match="earlier in this step"):
        optimizer.synchronize()
    assert same(copy_of(model), before)


def test_whoever_catches_the_failure_gets_it_again_from_the_next_backward(peers: Peers) -> None:
    model, optimizer = lost_step(peers)
    optimizer.zero_grad()
    with pytest.raises(hvd.HorovodInternalError, match="earlier in this step"):
        backward(model)


def test_a_failure_while_handing_over_comes_out_of_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> int:
        raise hvd.HorovodInternalError("Horovod has been shut down")

    model = network()
    optimizer = distributed(model)
    with monkeypatch.context() as patch:
        patch.setattr(mpi_ops, "_allreduce_async", refuse)
        with pytest.raises(hvd.HorovodInternalError, match="shut down"):
            backward(model)
    with pytest.raises(hvd.HorovodInternalError, match="earlier in this step"):
        optimizer.step()


def test_the_observer_of_failures_is_told_once(peers: Peers) -> None:
    model = network()
    optimizer = distributed(model)
    told: list[BaseException] = []
    optimizer.ft_reducer.on_failure = told.append
    peers.broken = {"0.weight"}
    backward(model)
    for _ in range(2):
        with pytest.raises(hvd.HorovodInternalError):
            optimizer.step()
    assert len(told) == 1


def test_after_discard_the_step_can_be_computed_again(peers: Peers) -> None:
    model, optimizer = lost_step(peers)
    assert optimizer.ft_reducer.drain() == (1, 2)
    optimizer.ft_reducer.discard()
    assert not gradients(model)
    assert not optimizer.ft_reducer.underway()
    peers.broken = set()
    before = copy_of(model)
    backward(model)
    optimizer.step()
    assert not same(copy_of(model), before)


def test_drain_counts_what_was_reduced_before_the_failure_was_noticed(peers: Peers) -> None:
    model = network()
    optimizer = distributed(model)
    peers.broken = {"2.weight"}
    backward(model)
    assert optimizer.ft_reducer.drain() == (1, 2)
    with pytest.raises(hvd.HorovodInternalError):
        optimizer.step()


def test_drain_of_a_reducer_at_rest_has_nothing_to_count() -> None:
    assert distributed(network()).ft_reducer.drain() == (0, 0)


def test_drain_waits_for_real_handles() -> None:
    model = network()
    optimizer = distributed(model)
    backward(model)
    assert optimizer.ft_reducer.drain() == (2, 2)
    optimizer.ft_reducer.discard()


def test_drain_gives_up_memory_that_horovod_never_lets_go(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    optimizer = distributed(model)
    train(model, optimizer, range(2))
    backward(model, 2)
    stuck = [handle for bucket in optimizer.ft_reducer._submitted for handle in bucket.handles]
    monkeypatch.setattr(mpi_ops, "_handle_map", dict.fromkeys(stuck))
    monkeypatch.setattr(horovod.torch, "poll", lambda _: False)
    monkeypatch.setattr(reducer_module, "DRAIN_S", 0.0)
    assert optimizer.ft_reducer.drain() == (0, 2)
    assert all(slot.result is None for slot in optimizer.ft_reducer._slots)


def test_a_wait_that_was_interrupted_cannot_turn_into_a_wrong_update(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network()
    optimizer = distributed(model)
    backward(model)
    before = copy_of(model)
    working = horovod.torch.synchronize

    def interrupted(handle: int) -> Any:
        working(handle)  # Horovod has cleared its handle, and its output is lost
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(horovod.torch, "synchronize", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    with pytest.raises(hvd.HorovodInternalError, match="cut short"):
        optimizer.step()
    assert same(copy_of(model), before)


def test_an_error_in_between_does_not_lose_what_has_arrived(peers: Peers) -> None:
    model = network()
    optimizer = distributed(model)
    backward(model)
    local = gradients(model)["0.weight"]
    times = iter([ValueError("a fault"), None])

    def probe(handed_over: int) -> None:
        error = next(times, None)
        if error is not None:
            raise error

    optimizer.ft_reducer.probe = probe
    with pytest.raises(ValueError, match="a fault"):
        optimizer.step()
    optimizer.synchronize()
    assert torch.allclose(gradients(model)["0.weight"], local / 2)


def test_the_probe_counts_gradients_before_each_one_and_after_the_last(peers: Peers) -> None:
    model = network()
    optimizer = distributed(model)
    counts: list[int] = []
    optimizer.ft_reducer.probe = counts.append
    backward(model)
    optimizer.step()
    assert counts == [0, 1, 2]
