"""Horovod's callbacks that commit a state, and count in it what is done."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from horovod_ft.errors import ConfigurationError
from horovod_ft.keras.elastic import CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback


class Noted:
    """A state that remembers where it was committed."""

    def __init__(self, epoch: int = 0) -> None:
        self.epoch, self.batch = epoch, 0
        self.commits: list[tuple[int, int]] = []

    def commit(self) -> None:
        self.commits.append((self.epoch, self.batch))


def fit(*callbacks: Any, epochs: int = 1, batches: int = 5, **more: Any) -> None:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.zeros((batches, 1), np.float32)
    model.fit(x, x, batch_size=1, epochs=epochs, verbose=0, callbacks=list(callbacks), **more)


def test_a_state_is_committed_after_so_many_batches_and_at_the_end_of_an_epoch() -> None:
    state = Noted()
    fit(UpdateBatchStateCallback(state), CommitStateCallback(state, 2))
    assert state.commits == [(0, 1), (0, 3), (0, 0)]


def test_a_state_is_committed_after_each_batch_unless_something_else_is_said() -> None:
    state = Noted()
    fit(CommitStateCallback(state), batches=3)
    assert len(state.commits) == 4


def test_batches_to_the_next_commit_are_counted_anew_in_each_fit() -> None:
    state = Noted()
    callback = CommitStateCallback(state, 3)
    for _ in range(2):
        fit(callback, batches=2)
    assert len(state.commits) == 2  # at the ends of epochs


@pytest.mark.parametrize("before", [0, 4])
def test_epochs_are_counted_over_all_fits(before: int) -> None:
    state = Noted(before)
    callback = UpdateEpochStateCallback(state)
    for _ in range(2):
        fit(callback, epochs=2, batches=1)
    assert state.epoch == before + 4


def test_epochs_are_counted_once_where_fit_begins_at_the_states_epoch() -> None:
    state = Noted()
    callback = UpdateEpochStateCallback(state)
    for epochs in (2, 5):
        fit(callback, epochs=epochs, initial_epoch=state.epoch, batches=1)
        assert state.epoch == epochs


@pytest.mark.parametrize("batches", [0, -1])
def test_commits_after_no_batches_are_refused(batches: int) -> None:
    with pytest.raises(ConfigurationError, match=f"batches_per_commit is {batches}; it must be at least 1"):
        CommitStateCallback(Noted(), batches)


def test_between_two_epochs_no_batch_is_done() -> None:
    state = Noted()
    fit(UpdateBatchStateCallback(state))
    assert state.batch == 0
