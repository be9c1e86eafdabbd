"""Horovod's callbacks for a ``fit`` that is entered again after a failure. They commit, and count what is done."""

from __future__ import annotations

from typing import Any

import keras

from horovod_ft.errors import ConfigurationError

Logs = dict[str, Any] | None


class CommitStateCallback(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Commits a state after every so many batches, and at the end of each epoch.

    Give it to ``fit`` behind the callbacks that change the state: a commit has what they have done by then.

    Args:
        state: a ``KerasState``.
        batches_per_commit: at least 1.

    Raises:
        ConfigurationError: ``batches_per_commit`` is less.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        if batches_per_commit < 1:
            raise ConfigurationError(f"batches_per_commit is {batches_per_commit}; it must be at least 1")
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Logs = None) -> None:
        self.batches_remaining = self.batches_per_commit  # a worker that has joined counts like the others

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.batches_remaining = self.batches_per_commit
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps in ``state.batch`` the number of the last batch of the epoch, and 0 between two epochs.

    A ``fit`` that is entered again counts from 0. Keras lets no callback leave out batches: to leave out those that are
    done is the data's business.

    Args:
        state: with an attribute ``batch``.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps in ``state.epoch`` how many epochs are done, over all calls of ``fit``: whether they count from 0 each time
    or begin at ``initial_epoch=state.epoch``.

    Args:
        state: with an attribute ``epoch``.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self.state.epoch += 1
