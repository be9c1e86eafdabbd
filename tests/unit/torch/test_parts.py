"""The pieces of light state: each returns to the value it had when the step began, bitwise."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from horovod_ft.data import BatchSize, Cursor, EpochOrder, Place
from horovod_ft.parts import Attributes, BasePart, CursorPart, copied
from horovod_ft.torch.parts import (
    Buffers,
    Options,
    RandomState,
    Scaler,
    Snapshot,
    Stateful,
    seed_newcomer,
)
from horovod_ft.torch.replica import TorchReplica
from tests.unit.torch.tools import copy_of, make, network, same, train


def test_a_part_does_nothing_by_default() -> None:
    part = BasePart()
    part.begin()
    part.commit()
    part.rollback()
    part.adopt(part.export())
    assert part.replicated is False


# --- random generators -----------------------------------------------------------------------------------------------


def draws() -> list[float]:
    return [random.random(), float(np.random.random()), float(torch.rand(()))]


def test_random_streams_return_to_where_they_were() -> None:
    part = RandomState()
    part.begin()
    first = draws()
    draws()
    part.rollback()
    assert draws() == first


def test_each_newcomer_gets_streams_of_its_own() -> None:
    part = RandomState()
    part.begin()
    seen = []
    for generation, rank in ((1, 0), (1, 1), (2, 0)):
        torch.manual_seed(7)
        seed_newcomer(generation, rank)
        seen.append(draws())
    part.rollback()
    assert len({tuple(one) for one in seen}) == 3


def test_a_newcomers_streams_follow_from_its_seed_and_place() -> None:
    part = RandomState()
    part.begin()
    seen = []
    for _ in range(2):
        torch.manual_seed(7)
        seed_newcomer(1, 2)
        seen.append(draws())
    part.rollback()
    assert seen[0] == seen[1]


# --- buffers ---------------------------------------------------------------------------------------------------------


class Moody(nn.Module):
    """Does to its buffers what modules do."""

    total: Tensor
    replaced: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(3))
        self.register_buffer("cache", None)

    def forward(self) -> None:
        self.total += 1.0
        self.replaced = torch.ones(3)
        self.cache = torch.ones(4)


def test_running_statistics_return_bitwise() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    part = Buffers(lambda: {"model": model})
    model(torch.randn(4, 2))
    part.begin()
    before = copy_of(model)
    model(torch.randn(4, 2))
    part.rollback()
    assert same(copy_of(model), before)


@pytest.mark.parametrize("rounds", [1, 2])
def test_replaced_and_new_buffers_are_undone(rounds: int) -> None:
    model = Moody()
    part = Buffers(lambda: {"model": model})
    for _ in range(rounds):
        part.begin()
        model()
        part.rollback()
        assert model.total.tolist() == [0.0, 0.0]
        assert model.replaced.tolist() == [0.0, 0.0, 0.0]
        assert model.cache is None


def test_a_buffer_that_changed_its_shape_is_restored() -> None:
    model = Moody()
    part = Buffers(lambda: {"model": model})
    part.begin()
    model.total = torch.ones(5)
    part.rollback()
    assert model.total.tolist() == [0.0, 0.0]


def test_a_buffer_that_went_away_comes_back() -> None:
    model = Moody()
    part = Buffers(lambda: {"model": model})
    part.begin()
    model.total = None  # type: ignore[assignment]
    part.rollback()
    assert model.total.tolist() == [0.0, 0.0]


def test_a_model_moved_to_double_precision_loses_no_digit() -> None:
    model = Moody()
    part = Buffers(lambda: {"model": model})
    part.begin()
    model.double()
    model.total += 0.1
    part.begin()
    model.total += 1.0
    part.rollback()
    assert model.total.tolist() == [0.1, 0.1]


def test_the_storage_of_saved_buffers_is_kept_from_step_to_step() -> None:
    model = Moody()
    part = Buffers(lambda: {"model": model})
    part.begin()
    places = [saved.data_ptr() for saved in part._saved]
    part.begin()
    assert [saved.data_ptr() for saved in part._saved] == places


def test_a_model_that_takes_the_place_of_another_is_looked_after() -> None:
    models = {"model": Moody()}
    part = Buffers(lambda: models)
    part.begin()
    models["model"] = Moody()
    part.begin()
    models["model"]()
    part.rollback()
    assert models["model"].total.tolist() == [0.0, 0.0]


def test_buffers_registered_after_the_state_was_made_are_looked_after() -> None:
    model: Any = nn.Module()
    part = Buffers(lambda: {"model": model})
    part.begin()
    model.register_buffer("late", torch.zeros(1))
    part.begin()
    model.late += 1.0
    part.rollback()
    assert model.late.item() == 0.0


def test_buffers_are_known_by_their_place_in_the_model() -> None:
    models = {"model": nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), "other": Moody()}
    part = Buffers(lambda: models)
    assert part.modules() == {
        "model": "Sequential", "model.0": "Linear", "model.1": "BatchNorm1d", "other": "Moody"
    }  # fmt: skip
    assert part.owners() == ["model.1", "other"]
    assert list(part.export()) == [
        ("model.1", "running_mean"),
        ("model.1", "running_var"),
        ("model.1", "num_batches_tracked"),
        ("other", "total"),
        ("other", "replaced"),
    ]


def test_buffers_stay_on_their_device() -> None:
    model = Moody()
    part = Buffers(lambda: {"model": model})
    exported = part.export()
    model.to("meta")
    model.replaced = torch.zeros(1, device="meta")
    total = model.total
    part.adopt(exported)
    assert model.total is total
    assert (model.replaced.device.type, model.replaced.shape) == ("meta", (3,))


def test_models_without_buffers_cost_nothing() -> None:
    part = Buffers(lambda: {"model": network()})
    part.begin()
    part.rollback()


# --- optimizers, schedulers, scalers ---------------------------------------------------------------------------------


def test_options_of_all_groups_return() -> None:
    one, two = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [one], "lr": 0.1}, {"params": [two], "lr": 0.2}], momentum=0.9)
    part = Options(lambda: optimizer)
    part.begin()
    for group in optimizer.param_groups:
        group["lr"] = 9.0
        group["momentum"] = 0.0
    part.rollback()
    assert [(group["lr"], group["momentum"]) for group in optimizer.param_groups] == [(0.1, 0.9), (0.2, 0.9)]
    assert optimizer.param_groups[0]["params"] == [one]


def test_an_option_that_is_a_tensor_is_copied() -> None:
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.5))
    part = Options(lambda: optimizer)
    part.begin()
    optimizer.param_groups[0]["lr"].mul_(2.0)
    part.rollback()
    optimizer.param_groups[0]["lr"].mul_(2.0)
    part.rollback()
    assert optimizer.param_groups[0]["lr"].item() == 0.5


def test_an_option_that_is_a_tensor_stays_on_its_device() -> None:
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.5))
    part = Options(lambda: optimizer)
    exported = part.export()
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1, device="meta")
    part.adopt(exported)
    assert optimizer.param_groups[0]["lr"].device.type == "meta"


def test_options_are_handed_on_to_another_worker() -> None:
    mine, theirs = (torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr) for lr in (0.1, 0.7))
    Options(lambda: mine).adopt(Options(lambda: theirs).export())
    assert mine.param_groups[0]["lr"] == 0.7


@pytest.mark.parametrize(
    "kind",
    [
        lambda o: lr_scheduler.StepLR(o, 1),
        lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=9),
        lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch),
        lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
        ),
    ],
    ids=["StepLR", "OneCycleLR", "LambdaLR", "ReduceLROnPlateau", "SequentialLR"],
)
def test_a_scheduler_repeats_its_step_after_a_rollback(kind: Any) -> None:
    model = network()
    optimizer = make("SGD", model.parameters())
    scheduler = kind(optimizer)
    metrics = (1.0,) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else ()
    parts = [Stateful(lambda: scheduler), Options(lambda: optimizer)]

    def advance() -> float:
        train(model, optimizer, range(1))
        scheduler.step(*metrics)
        return float(optimizer.param_groups[0]["lr"])

    advance()
    for part in parts:
        part.begin()
    first = [advance(), advance()]
    for _ in range(2):
        for part in parts:
            part.rollback()
        assert [advance(), advance()] == first


def test_a_scheduler_is_handed_on_to_another_worker() -> None:
    optimizer = make("SGD", network().parameters())
    mine, theirs = lr_scheduler.StepLR(optimizer, 1), lr_scheduler.StepLR(optimizer, 1)
    theirs.last_epoch = 5
    Stateful(lambda: mine).adopt(Stateful(lambda: theirs).export())
    assert mine.last_epoch == 5


def test_a_scaler_returns_from_the_middle_of_a_step() -> None:
    model = network()
    optimizer = make("SGD", model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    part = Scaler(lambda: scaler)

    def half_a_step() -> None:
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        scaler.unscale_(optimizer)

    half_a_step()
    scaler.step(optimizer)
    scaler.update()
    part.begin()
    half_a_step()
    scaler.update(2.0)
    half_a_step()
    part.rollback()
    half_a_step()  # torch would refuse to unscale twice
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("enabled", [True, False])
def test_a_scaler_that_was_never_used_returns(enabled: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=enabled)
    part = Scaler(lambda: scaler)
    part.begin()
    part.rollback()
    assert scaler.is_enabled() is enabled


def test_a_scaler_keeps_its_scale_if_the_other_one_was_off() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    Scaler(lambda: scaler).adopt(torch.amp.GradScaler("cpu", enabled=False).state_dict())
    assert scaler.get_scale() == 4.0


def test_a_scale_is_handed_on_to_another_worker() -> None:
    mine, theirs = torch.amp.GradScaler("cpu", init_scale=4.0), torch.amp.GradScaler("cpu", init_scale=64.0)
    Scaler(lambda: mine).adopt(Scaler(lambda: theirs).export())
    assert mine.get_scale() == 64.0


class Losses:
    """A metric that keeps the very list that it is given."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def test_what_was_exported_can_be_adopted_more_than_once() -> None:
    losses = Losses()
    part = Stateful(lambda: losses)
    exported = part.export()
    for _ in range(2):
        part.adopt(exported)
        assert losses.seen == []
        losses.seen.append(1.0)


# --- plain values and the cursor -------------------------------------------------------------------------------------


def test_plain_values_return_even_if_they_were_changed_in_place() -> None:
    owner = SimpleNamespace(epoch=1, history=[1, 2], table=np.zeros(2), other="kept")
    part = Attributes(owner, ["epoch", "history", "table"])
    part.begin()
    for _ in range(2):
        owner.epoch = 5
        owner.history.append(3)
        owner.table += 1
        owner.other = "changed"
        part.rollback()
        assert (owner.epoch, owner.history, owner.table.tolist()) == (1, [1, 2], [0.0, 0.0])
    assert owner.other == "changed"


def test_plain_values_are_handed_on_as_copies() -> None:
    mine, theirs = SimpleNamespace(history=[]), SimpleNamespace(history=[1])
    exported = Attributes(theirs, ["history"]).export()
    Attributes(mine, ["history"]).adopt(exported)
    theirs.history.append(2)
    assert mine.history == [1]


def test_only_what_can_change_is_copied() -> None:
    text, values = "a" * 100, [1]
    assert copied(text) is text
    assert copied(values) is not values


def test_a_cursor_moves_with_commits_and_returns_with_rollbacks() -> None:
    cursor = Cursor(EpochOrder(10, shuffle=False, seed=0), BatchSize(2))
    part = CursorPart(lambda: cursor)
    cursor.taken = Place(0, 2)
    part.commit()
    cursor.taken = Place(0, 4)
    part.rollback()
    assert cursor.taken == (0, 2)


def test_a_cursor_is_handed_on_as_it_was_committed() -> None:
    mine, theirs = (Cursor(EpochOrder(10, shuffle=False, seed=0), BatchSize(2)) for _ in range(2))
    theirs.taken = Place(1, 2)
    theirs.commit()
    theirs.taken = Place(1, 4)
    CursorPart(lambda: mine).adopt(CursorPart(lambda: theirs).export())
    assert mine.taken == mine.committed == (1, 2)


# --- full snapshots --------------------------------------------------------------------------------------------------


def snapshot_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Snapshot:
    replica = TorchReplica(lambda: {"model": model}, lambda: {"optimizer": optimizer})
    return Snapshot(replica.replicated_tensors, replica.structure, replica.prepare)


def test_a_snapshot_brings_parameters_and_optimizer_state_back() -> None:
    model = network()
    optimizer = make("Adam", model.parameters())
    train(model, optimizer, range(2))
    snapshot = snapshot_of(model, optimizer)
    snapshot.begin()
    train(model, optimizer, range(2, 4))
    after = copy_of(model)
    for _ in range(2):
        snapshot.rollback()
        train(model, optimizer, range(2, 4))
        assert same(copy_of(model), after)


def test_state_that_did_not_exist_is_removed() -> None:
    model = network()
    optimizer = make("SGD", model.parameters())
    snapshot = snapshot_of(model, optimizer)
    snapshot.begin()
    train(model, optimizer, range(1))
    snapshot.rollback()
    assert not optimizer.state


def test_the_storage_of_a_snapshot_is_kept_from_commit_to_commit() -> None:
    model = network()
    snapshot = snapshot_of(model, make("SGD", model.parameters(), momentum=0.0, nesterov=False))
    snapshot.begin()
    assert snapshot._saved is not None
    places = [saved.data_ptr() for saved in snapshot._saved]
    snapshot.begin()
    assert [saved.data_ptr() for saved in snapshot._saved] == places


def test_a_snapshot_of_nothing_works() -> None:
    snapshot = Snapshot(list, lambda: None, lambda _: None)
    snapshot.begin()
    snapshot.begin()
    snapshot.rollback()


def test_a_snapshot_that_is_off_changes_nothing() -> None:
    model = network()
    optimizer = make("SGD", model.parameters())
    snapshot = snapshot_of(model, optimizer)
    snapshot.begin()
    snapshot.drop()
    train(model, optimizer, range(1))
    after = copy_of(model)
    snapshot.begin()
    snapshot.rollback()
    assert same(copy_of(model), after)
