"""``TorchState``: everything of a training moves together, forwards in a commit and backwards after a failure."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import horovod.torch
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

import horovod_ft.torch as hvd
from horovod_ft.data import Range
from horovod_ft.errors import ConfigurationError, UsageError
from horovod_ft.membership.base import Group
from horovod_ft.torch.elastic import ElasticDataLoader, ElasticSampler, TorchState
from horovod_ft.torch.runtime import current
from tests.unit.torch.tools import Peers, backward, copy_of, distributed, make, network, same, train


class Job:
    """A whole training: batch normalization, dropout, momentum, a scheduler, a loader, a counter."""

    def __init__(self, *, batches: int = 3, passes: int = 1, scaled: bool = False) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 3))
        self.optimizer = distributed(self.model, backward_passes_per_step=passes)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2, enabled=scaled)
        data = TensorDataset(torch.randn(4 * batches, 4), torch.randint(0, 3, (4 * batches,)))
        self.state: Any = TorchState(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=lr_scheduler.StepLR(self.optimizer, 2),
            scaler=self.scaler,
            loader=ElasticDataLoader(data, global_batch_size=4, shuffle=True),
            losses=[],
        )
        self.batches: list[Tensor] = []
        self.faults: dict[tuple[int, str], BaseException] = {}
        self.taken = 0

    def at(self, moment: str) -> None:
        fault = self.faults.pop((self.taken, moment), None)
        if fault is not None:
            raise fault

    def body(self, x: Tensor, y: Tensor) -> None:
        state = self.state
        self.at("start")
        if not self.optimizer.ft_reducer.accumulating():
            self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        self.at("forward")
        self.scaler.scale(loss).backward()
        self.at("backward")
        state.losses.append(loss.item())
        if not self.optimizer.ft_reducer.accumulating():
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.at("update")
            state.scheduler.step()
        self.at("end")

    def train(self, epochs: int = 1) -> Job:
        @hvd.elastic.run
        def loop(state: Any) -> None:
            for _ in state.loader.epochs(epochs):
                for x, y in state.loader:
                    self.taken += 1
                    with state.step():
                        self.batches.append(x)
                        self.body(x, y)

        loop(self.state)
        return self

    def result(self) -> list[Any]:
        state = self.state
        return [
            copy_of(self.model), copy.deepcopy(self.optimizer.state_dict()), state.scheduler.state_dict(),
            state.scaler.state_dict(), state.losses, state.steps, tuple(state.loader.cursor.committed),
        ]  # fmt: skip


@functools.cache
def undisturbed(epochs: int = 1, **options: Any) -> list[Any]:
    """How a run without failures ends."""
    return Job(**options).train(epochs).result()


@pytest.fixture
def reforming(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of one that can be formed anew."""
    membership = current().membership
    monkeypatch.setattr(membership, "_group", Group(0, 1))
    monkeypatch.setattr(membership, "reform", lambda: membership.group)


def gone() -> BaseException:
    error: BaseException = hvd.HorovodInternalError("the peer is gone")
    return error


# --- steps as transactions -------------------------------------------------------------------------------------------


def test_a_clean_step_commits_everything_together() -> None:
    job = Job()
    job.train()
    assert job.state.steps == 3
    assert job.state.loader.cursor.committed == (1, 0)
    assert job.state.scheduler.last_epoch == 3
    assert len(job.state.losses) == 3


MOMENTS = ["start", "forward", "backward"]


@pytest.mark.usefixtures("reforming")
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("batch", [1, 3])
def test_after_a_failure_the_run_ends_bitwise_like_one_without(batch: int, moment: str, scaled: bool) -> None:
    job = Job(scaled=scaled)
    job.faults = {(batch, moment): gone()}
    assert same(job.train(epochs=2).result(), undisturbed(epochs=2, scaled=scaled))
    assert not job.faults
    assert len(job.batches) == 7


@pytest.mark.usefixtures("reforming")
@pytest.mark.parametrize("moment", ["update", "end"])
def test_an_update_that_was_applied_before_the_failure_is_not_applied_twice(moment: str) -> None:
    job = Job()
    job.faults = {(2, moment): gone()}
    job.train()
    expected = Job().train()
    assert same(list(job.model.parameters()), list(expected.model.parameters()))
    assert same(job.optimizer.state_dict(), expected.optimizer.state_dict())
    assert job.state.steps == expected.state.steps


@pytest.mark.usefixtures("reforming")
@pytest.mark.parametrize("batch", [1, 2, 3, 4])
@pytest.mark.parametrize("moment", MOMENTS)
def test_accumulated_batches_are_replayed_together(batch: int, moment: str) -> None:
    job = Job(batches=4, passes=2)
    job.faults = {(batch, moment): gone()}
    assert same(job.train().result(), undisturbed(batches=4, passes=2))
    assert len(job.batches) == 4 + (1 if batch % 2 else 2)


@pytest.mark.usefixtures("reforming")
def test_several_failures_in_a_row_are_all_recovered() -> None:
    job = Job()
    job.faults = {(2, "backward"): gone(), (3, "forward"): gone(), (5, "start"): gone()}
    assert same(job.train().result(), undisturbed())
    assert not job.faults


@pytest.mark.usefixtures("reforming")
def test_a_lost_reduction_is_recovered(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    working, calls = horovod.torch.synchronize, iter(range(10**6))

    def broken(handle: int) -> Any:
        output = working(handle)
        if next(calls) == 13:
            raise gone()
        return output

    monkeypatch.setattr(horovod.torch, "synchronize", broken)
    assert same(job.train().result(), undisturbed())
    assert len(job.batches) == 4


def test_batches_of_a_step_with_accumulation_commit_at_its_end_only() -> None:
    job = Job(batches=4, passes=2)
    job.train()
    assert job.state.steps == 2


def test_a_body_that_fails_by_itself_is_not_recovered_and_its_step_stays_open() -> None:
    job = Job()
    job.faults = {(2, "forward"): ValueError("a bad sample")}
    with pytest.raises(ValueError, match="a bad sample"):
        job.train()
    assert job.state.steps == 1
    assert job.state.loader.cursor.committed == (0, 4)


def test_whoever_catches_an_error_of_the_body_goes_on_and_the_next_step_takes_its_batch_along() -> None:
    job = Job()
    job.faults = {(2, "forward"): ValueError("a bad sample")}

    @hvd.elastic.run
    def loop(state: Any) -> None:
        for x, y in state.loader:
            job.taken += 1
            try:
                with state.step():
                    job.body(x, y)
            except ValueError:
                continue

    loop(job.state)
    assert job.state.steps == 2
    assert job.state.loader.cursor.committed == (0, 12)


def test_a_step_outside_run_is_refused() -> None:
    with pytest.raises(UsageError, match=r"outside elastic\.run"), Job().state.step():
        pass


def test_a_step_inside_a_step_is_refused() -> None:
    job = Job()

    @hvd.elastic.run
    def loop(state: Any) -> None:
        with state.step(), state.step():
            pass

    with pytest.raises(UsageError, match=r"inside another state\.step"):
        loop(job.state)


def test_weights_of_the_loaders_shares_reach_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current().membership, "_group", Group(1, 2))
    data = TensorDataset(torch.arange(3.0))
    model = network()
    optimizer = distributed(model)
    state: Any = TorchState(model=model, optimizer=optimizer, loader=ElasticDataLoader(data, global_batch_size=3))
    for (x,) in state.loader:
        assert x.tolist() == [2.0]
        assert optimizer.ft_reducer.weight == pytest.approx(2 / 3)
        assert state.open_ranges() == ((0, 0, 3),)


def test_global_batches_of_an_applied_update_are_dealt_again_as_they_were() -> None:
    state: Any = TorchState(loader=ElasticDataLoader(TensorDataset(torch.arange(12.0)), batch_size=2))
    state.repeat((Range(0, 0, 6),))
    (first,) = next(iter(state.loader))
    assert first.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert state.open_ranges() == ((0, 0, 6),)


def test_without_a_loader_there_are_no_open_ranges() -> None:
    state = TorchState(epoch=0)
    state.repeat((Range(0, 0, 6),))
    assert state.open_ranges() == ()


# --- commit, restore, save, sync -------------------------------------------------------------------------------------


def plain_state(**values: Any) -> tuple[nn.Sequential, Any, Any]:
    model = network()
    optimizer = distributed(model, make("Adam", model.parameters()))
    return model, optimizer, TorchState(model=model, optimizer=optimizer, **values)


@pytest.mark.parametrize("save", ["save", "commit"])
def test_restore_goes_back_to_the_last_commit(save: str) -> None:
    model, optimizer, state = plain_state(epoch=0, history=[])
    train(model, optimizer, range(2))
    state.epoch, state.history = 1, [1]
    getattr(state, save)()
    before = copy_of(model), copy.deepcopy(optimizer.state_dict())
    for _ in range(2):
        train(model, optimizer, range(2, 4))
        optimizer.param_groups[0]["lr"] = 9.0
        state.epoch += 1
        state.history.append(2)
        state.restore()
        assert same((copy_of(model), optimizer.state_dict()), before)
        assert (state.epoch, state.history) == (1, [1])


def test_restore_before_any_commit_goes_back_to_the_beginning_as_with_horovod() -> None:
    model, optimizer, state = plain_state(epoch=3)
    before = copy_of(model)
    train(model, optimizer, range(2))
    state.epoch = 4
    state.restore()
    assert same(copy_of(model), before)
    assert not optimizer.state
    assert state.epoch == 3


def test_a_state_of_plain_values_only_commits_and_restores() -> None:
    state: Any = TorchState(batch=0)
    for _ in range(2):
        state.batch += 1
        state.commit()
    state.batch = 7
    state.restore()
    assert state.batch == 2


def test_sync_with_one_worker_makes_the_present_values_the_committed_ones() -> None:
    model, optimizer, state = plain_state(epoch=0)
    train(model, optimizer, range(1))
    state.epoch = 5
    before = copy_of(model)
    state.sync()
    train(model, optimizer, range(1, 2))
    state.epoch = 6
    state.restore()
    assert same(copy_of(model), before)
    assert state.epoch == 5


def test_commits_are_counted() -> None:
    _, _, state = plain_state()
    state.commit()
    state.commit()
    assert state.steps == 2


def explicit(job: Job, every: int) -> Callable[[], None]:
    """A training function of a script that commits itself, with a tracked loader."""

    @hvd.elastic.run
    def loop(state: Any) -> None:
        for _ in state.loader.epochs(2):
            for x, y in state.loader:
                job.taken += 1
                job.body(x, y)
                if job.taken % every == 0:
                    state.commit()

    return lambda: loop(job.state)


@pytest.mark.usefixtures("reforming")
@pytest.mark.parametrize(("batch", "moment"), [(1, "end"), (2, "backward"), (4, "end"), (5, "forward")])
def test_a_script_that_commits_itself_loses_nothing_between_commits(batch: int, moment: str) -> None:
    expected = Job()
    explicit(expected, 4)()
    job = Job()
    job.faults = {(batch, moment): gone()}
    explicit(job, 4)()
    assert same(copy_of(job.model), copy_of(expected.model))
    assert job.state.losses == expected.state.losses


def test_the_copy_of_the_weights_is_given_back_once_training_goes_by_steps() -> None:
    model, optimizer, state = plain_state()

    @hvd.elastic.run
    def loop(state: Any) -> None:
        assert state._snapshot._saved is not None
        with state.step():
            train(model, optimizer, range(1))
        assert state._snapshot._saved is None

    loop(state)


def test_a_tracked_loader_means_no_copy_of_the_weights() -> None:
    assert Job().state._snapshot._saved is None


# --- what is tracked -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["step", "steps", "commit", "engine", "blocks", "repeat", "_names", "on_reset"])
def test_a_name_that_the_state_uses_itself_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"uses the names \['{name}'\] itself"):
        TorchState(**{name: 1})


def test_two_loaders_are_refused() -> None:
    data = TensorDataset(torch.zeros(4))
    with pytest.raises(ConfigurationError, match="tracks one ElasticDataLoader"):
        TorchState(loader=ElasticDataLoader(data, 2), other=ElasticDataLoader(data, 2))


def test_a_loader_may_have_another_name() -> None:
    state: Any = TorchState(batches=ElasticDataLoader(TensorDataset(torch.zeros(4)), 2))
    assert state.batches.watcher is state


def test_what_is_none_is_tracked_if_it_was_named() -> None:
    state: Any = TorchState(best=None)
    state.best = 0.5
    state.save()
    state.best = 0.7
    state.restore()
    assert state.best == 0.5
    assert not hasattr(state, "model")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model", 1, "tracked as model and cannot become a int"),
        ("optimizer", None, "tracked as optimizer and cannot become a NoneType"),
        ("epoch", network(), "tracked as value and cannot become a Sequential"),
    ],
)
def test_a_tracked_value_cannot_become_one_of_another_kind(name: str, value: Any, message: str) -> None:
    _, _, state = plain_state(epoch=0)
    with pytest.raises(ConfigurationError, match=message):
        setattr(state, name, value)


def test_a_model_and_an_optimizer_can_be_replaced() -> None:
    _, _, state = plain_state()
    model = nn.Sequential(network(2), nn.BatchNorm1d(3))
    optimizer = distributed(model)
    state.model, state.optimizer = model, optimizer
    assert optimizer.ft_gate is state
    state.save()
    before = copy_of(model)
    train(model, optimizer, range(2))
    state.restore()
    assert same(copy_of(model), before)


def test_a_loader_can_be_replaced() -> None:
    data = TensorDataset(torch.arange(8.0))
    state: Any = TorchState(loader=ElasticDataLoader(data, 2))
    state.loader = ElasticDataLoader(data, 4)
    assert state.loader.watcher is state
    for _ in state.loader:
        state.commit()
        break
    assert state.loader.cursor.committed == (0, 4)


def test_attributes_that_are_not_tracked_are_left_alone() -> None:
    _, _, state = plain_state()
    state.note = 1
    state.restore()
    assert state.note == 1


def test_several_optimizers_get_names_of_their_own(peers: Peers) -> None:
    one, two = network(0), network(1)
    first, second = distributed(one), distributed(two)
    TorchState(generator=first, critic=second, a=one, b=two)
    backward(one)
    backward(two)
    first.step()
    second.step()
    assert sorted(peers.calls) == ["critic.0.weight", "critic.2.weight", "generator.0.weight", "generator.2.weight"]


def test_one_optimizer_keeps_the_names_of_its_parameters(peers: Peers) -> None:
    model, optimizer, _ = plain_state()
    train(model, optimizer, range(1))
    assert sorted(peers.calls) == ["0.weight", "2.weight"]


@pytest.mark.parametrize(("size", "warned"), [(1, False), (2, True)])
def test_an_optimizer_that_is_not_distributed_is_pointed_out(
    monkeypatch: pytest.MonkeyPatch, size: int, warned: bool
) -> None:
    model = network()
    state = TorchState(model=model, optimizer=make("SGD", model.parameters()))
    monkeypatch.setattr(current().membership, "_group", Group(0, size))
    if warned:
        with pytest.warns(UserWarning, match=r"state\.optimizer is not made by hvd\.DistributedOptimizer"):
            state.stepping()
    else:
        state.stepping()


def test_a_sampler_is_dealt_anew_for_every_group(monkeypatch: pytest.MonkeyPatch) -> None:
    state: Any = TorchState(sampler=ElasticSampler(range(8), shuffle=False))
    monkeypatch.setattr(horovod.torch, "size", lambda: 2)
    state.regrouped(Group(0, 2))
    assert list(state.sampler) == [0, 2, 4, 6]


def test_reset_callbacks_run_for_every_new_group() -> None:
    _, _, state = plain_state()
    calls: list[str] = []
    state.register_reset_callbacks([lambda: calls.append("first"), lambda: calls.append("second")])
    state.regrouped(Group(0, 1))
    assert calls == ["first", "second"]


def test_drain_counts_over_all_optimizers(peers: Peers) -> None:
    one, two = network(0), network(1)
    first, second = distributed(one), distributed(two)
    state = TorchState(first=first, second=second)
    peers.broken = {"second.0.weight"}
    backward(one)
    backward(two)
    assert state.drain() == (3, 4)
    state.discard()
    assert state.drain() == (0, 0)
    state.discard()


def test_a_state_before_init_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horovod_ft.runtime._Process.runtime", None)
    with pytest.raises(UsageError, match=r"call hvd\.init\(\) first"):
        TorchState(epoch=0)
