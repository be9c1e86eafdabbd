"""``StateCommitter`` with a PyTorch training: ``state.restore()`` brings everything back to the last copy, bitwise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import horovod_ft.torch as hvd
from horovod_ft.errors import ConfigurationError, UsageError
from horovod_ft.torch.elastic import StateCommitter
from tests.unit.torch.test_state import Job, reforming, undisturbed
from tests.unit.torch.tools import distributed, network, same, train

__all__ = ["reforming"]  # a fixture


def poison(job: Job) -> None:
    with torch.no_grad():
        for parameter in job.model.parameters():
            parameter.fill_(math.nan)


def and_restore(job: Job, after: int, disturb: Callable[[Job], None], *, epochs: int = 2) -> Job:
    """Train; after so many batches disturb the training and restore it, once."""

    @hvd.elastic.run
    def loop(state: Any) -> None:
        for _ in state.loader.epochs(epochs):
            for x, y in state.loader:
                job.taken += 1
                with state.step():
                    job.batches.append(x)
                    job.body(x, y)
                if job.taken == after:
                    disturb(job)
                    state.restore()

    loop(job.state)
    return job


@pytest.mark.usefixtures("reforming")
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("after", [3, 4, 5])
def test_after_a_restore_the_run_ends_bitwise_like_one_without(after: int, every: int, scaled: bool) -> None:
    job = Job(scaled=scaled)
    committer = StateCommitter(job.state, every, keep="copy")
    and_restore(job, after, poison)
    assert same(job.result(), undisturbed(epochs=2, scaled=scaled))
    assert len(job.batches) == 6 + after % every
    assert len(committer.steps) == 2


@pytest.mark.usefixtures("reforming")
def test_a_run_can_be_restored_to_a_point_that_the_script_has_chosen() -> None:
    job = Job()
    StateCommitter(job.state, None, keep="copy")
    saved: list[bool] = []

    @hvd.elastic.run
    def loop(state: Any) -> None:
        for _ in state.loader.epochs(1):
            for x, y in state.loader:
                if state.steps == 1 and not saved:
                    saved.append(True)
                    state.save()
                with state.step():
                    job.batches.append(x)
                    job.body(x, y)
                if len(job.batches) == 3:
                    poison(job)
                    state.restore()

    loop(job.state)
    assert same(job.result(), undisturbed())
    assert len(job.batches) == 5


@pytest.mark.usefixtures("reforming")
def test_an_error_of_the_script_can_be_answered_with_a_restore() -> None:
    job = Job()
    job.faults = {(3, "update"): ValueError("what is half done")}
    StateCommitter(job.state, 2, keep="copy")

    @hvd.elastic.run
    def loop(state: Any) -> None:
        try:
            for _ in state.loader.epochs(1):
                for x, y in state.loader:
                    job.taken += 1
                    with state.step():
                        job.body(x, y)
        except ValueError:
            state.restore()

    loop(job.state)
    assert same(job.result(), undisturbed())


@pytest.mark.usefixtures("reforming")
def test_a_restore_inside_a_step_leaves_its_body() -> None:
    job = Job()
    StateCommitter(job.state, keep="copy")
    asked: list[bool] = []

    @hvd.elastic.run
    def loop(state: Any) -> None:
        for _ in state.loader.epochs(1):
            for x, y in state.loader:
                with state.step():
                    job.body(x, y)
                    if state.steps == 1 and not asked:
                        asked.append(True)
                        state.restore()
                        pytest.fail("goes on after restore()")

    loop(job.state)
    assert same(job.result(), undisturbed())


def in_steps(job: Job, what: Callable[[Any], None], *, inside: bool = False) -> None:
    @hvd.elastic.run
    def loop(state: Any) -> None:
        with state.step():
            if inside:
                what(state)
        what(state)

    loop(job.state)


@pytest.mark.parametrize("called", ["save", "restore"])
def test_without_a_committer_that_keeps_copies_there_is_nothing_to_go_back_to(called: str) -> None:
    job = Job()
    StateCommitter(job.state)
    with pytest.raises(UsageError, match=rf"state\.{called}\(\) in a training that goes by state\.step\(\).*make a"):
        in_steps(job, lambda state: getattr(state, called)())


def test_nothing_is_saved_inside_a_step() -> None:
    job = Job()
    StateCommitter(job.state, keep="copy")
    with pytest.raises(UsageError, match="what is half done cannot be gone back to"):
        in_steps(job, lambda state: state.save(), inside=True)


def test_nothing_is_saved_between_two_batches_of_one_step() -> None:
    job = Job(passes=2)
    StateCommitter(job.state, None, keep="copy")
    with pytest.raises(UsageError, match="while gradients are accumulated: what is half done cannot be gone back to"):
        and_save(job)


def and_save(job: Job) -> None:
    @hvd.elastic.run
    def loop(state: Any) -> None:
        for x, y in state.loader:
            with state.step():
                job.body(x, y)
            state.save()

    loop(job.state)


def test_one_committer_a_state() -> None:
    job = Job()
    StateCommitter(job.state, keep="copy")
    with pytest.raises(ConfigurationError, match="has a StateCommitter that keeps copies already"):
        StateCommitter(job.state, keep="copy")


def test_memory_is_set_aside_at_once_for_two_copies() -> None:
    model = network()
    optimizer = distributed(model)
    train(model, optimizer, range(1))
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer)
    assert StateCommitter(state, keep="copy").nbytes == 2 * 2 * (128 + 128)


def test_a_script_that_commits_itself_is_as_before() -> None:
    model = network()
    optimizer = distributed(model)
    state: Any = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0)
    committer = StateCommitter(state, keep="copy")
    state.batch = 1
    state.commit()
    state.batch = 2
    state.restore()
    assert state.batch == 1
    assert committer.steps == ()


def test_copies_of_a_model_that_was_replaced_are_none() -> None:
    job = Job()
    committer = StateCommitter(job.state, keep="copy")
    job.train()
    assert committer.steps
    job.state.model = nn.Linear(4, 3)
    assert not committer.steps


@pytest.mark.parametrize("replace", ["scheduler", "loader", "scaler"])
def test_copies_of_anything_that_was_replaced_are_none(replace: str) -> None:
    job = Job()
    committer = StateCommitter(job.state, keep="copy")
    job.train()
    setattr(job.state, replace, getattr(job.state, replace))
    assert not committer.steps


def test_copies_from_before_an_optimizer_got_more_parameters_are_none() -> None:
    job = Job()
    committer = StateCommitter(job.state, keep="copy")
    job.train()
    job.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert not committer.steps


def test_a_copy_can_be_saved_before_the_first_step() -> None:
    job = Job()
    committer = StateCommitter(job.state, None, keep="copy")
    job.state.save()
    assert committer.steps == (0,)
