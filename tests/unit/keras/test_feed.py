"""What ``fit`` goes by while training is fault tolerant: every batch once, whatever is undone inside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from horovod_ft.errors import RecoveryError
from horovod_ft.keras import feed as module
from horovod_ft.keras.feed import Feed, PlainSource, Position
from horovod_ft.recovery import Restarted

BATCHES = 4


class State:
    """A training state whose steps are undone as a test says.

    Attributes:
        trained: positions that were trained on, those that were undone included.
        undone: positions of which the first try is undone.
        back: position -> where training goes back to, once, instead of its end.
        entered: how often training was entered again.
    """

    def __init__(self, model: Any) -> None:
        self.epoch = self.batch = self.steps = self.told = 0
        self.logs: dict[str, float] = {}
        self.trained: list[Any] = []
        self.undone: set[Position] = set()
        self.back: dict[Position, Position] = {}
        self.entered = 0
        self.ft_update = SimpleNamespace(train=self._train)
        self.engine = SimpleNamespace(begin=lambda: None, enter=self._enter)
        self._model = model

    def _train(self, batch: Any) -> Any:
        self.trained.append(batch)
        return {"loss": float(len(self.trained))}

    def _enter(self) -> None:
        self.entered += 1

    @contextmanager
    def step(self) -> Iterator[None]:
        at, told = (self.epoch, self.batch), self.told
        yield
        if at in self.undone:
            self.undone.remove(at)
            (self.epoch, self.batch), self.told = at, told
        elif at in self.back:
            self.epoch, self.batch = self.back.pop(at)
            self.told, self.steps = told, self.epoch * BATCHES + self.batch
            self._model.optimizer.learning_rate = 0.5  # as the checkpoint has it
            raise Restarted
        else:
            self.steps += 1

    def taking(self) -> None:
        pass

    def accumulating(self) -> bool:
        return False

    def ft_metrics_values(self) -> list[Any]:
        return [tf.constant(value) for value in self._model.sums]

    def ft_set_metrics(self, values: list[Any]) -> None:
        self._model.sums = [np.array(value) for value in values]


class Positions:
    """A source whose batches are their positions."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.begun: list[int] = []

    def begin_epoch(self, epoch: int) -> None:
        self.begun.append(epoch)

    def executions(self, length: int, plain: Callable[[], Iterable[Any]]) -> Iterator[tuple[int, int]]:
        while self._state.batch < BATCHES:
            begin = self._state.batch // length * length
            yield begin, begin + length - 1

    def next(self, at: Position) -> Any:
        if at[1] >= BATCHES:
            raise StopIteration
        return tf.constant(at)


class Model:
    """As much of a model as is needed.

    Attributes:
        sums: of its metric: a total, and a count.
    """

    def __init__(self) -> None:
        self.sums: list[Any] = [np.float32(56.0), np.int32(8)]
        self.optimizer = keras.optimizers.SGD(0.5)
        self.resets = 0
        self._loss_tracker: Any = SimpleNamespace(count=8.0)

    def get_metrics_result(self) -> dict[str, float]:
        total, count = self.sums
        return {"loss": total / count}

    def reset_metrics(self) -> None:
        self.resets += 1


class Rig:
    """A ``fit`` of two epochs that goes by a feed.

    Args:
        length: batches in a call of the training function.
    """

    def __init__(self, length: int = 1, source: Callable[[State], Any] = Positions) -> None:
        self.model = Model()
        self.state = State(self.model)
        self.source = source(self.state)
        self.feed = Feed(self.state, self.model, self.source, length)
        self.seen: list[tuple[int, int]] = []
        self.logs: list[Any] = []

    def run(self, plain: Callable[[], Iterable[Any]] = tuple, epochs: int = 2) -> Rig:
        """As Keras does it."""
        for epoch in range(epochs):
            self.feed.begin_epoch(epoch)
            for begin, _, feed in self.feed.executions(plain):
                self.seen.append((epoch, begin))
                self.logs.append(feed.train())
        return self

    @property
    def trained(self) -> list[Position]:
        return [tuple(batch.numpy().tolist()) for batch in self.state.trained]


ALL = [(epoch, batch) for epoch in range(2) for batch in range(BATCHES)]


def test_each_batch_of_each_epoch_is_trained_on_once() -> None:
    rig = Rig().run()
    assert rig.trained == rig.seen == ALL
    assert [logs["loss"] for logs in rig.logs] == [float(number + 1) for number in range(8)]


def test_several_batches_in_a_call() -> None:
    rig = Rig(length=3).run()
    assert rig.trained == ALL
    assert rig.seen == [(0, 0), (0, 3), (1, 0), (1, 3)]


@pytest.mark.parametrize("at", [(0, 0), (0, 3), (1, 1)])
def test_a_batch_that_is_undone_is_computed_again_in_the_same_call(at: Position) -> None:
    rig = Rig()
    rig.state.undone = {at}
    rig.run()
    assert rig.seen == ALL
    again = ALL.index(at)
    assert rig.trained == [*ALL[: again + 1], *ALL[again:]]
    assert rig.state.steps == len(ALL)


def test_what_lies_behind_a_checkpoint_is_trained_on_again_inside_of_a_call() -> None:
    rig = Rig()
    rig.state.back = {(1, 1): (0, 2)}
    rig.run()
    assert rig.seen == ALL
    assert rig.trained == [*ALL[:6], *ALL[2:]]
    assert (rig.state.entered, rig.model.resets) == (1, 1)
    assert rig.source.begun == [0, 1, 1]


def test_an_epoch_that_is_gone_through_again_has_its_learning_rate() -> None:
    rig = Rig()
    rates: list[float] = []
    train = rig.state.ft_update.train

    def noted(batch: Any) -> Any:
        rates.append(float(rig.model.optimizer.learning_rate))
        return train(batch)

    rig.state.ft_update.train = noted
    rig.state.back = {(1, 2): (0, 3)}
    rig.feed.begin_epoch(0)
    for _, _, feed in rig.feed.executions(tuple):
        feed.train()
    rig.model.optimizer.learning_rate = 0.25  # as a callback does it
    rig.feed.begin_epoch(1)
    for _, _, feed in rig.feed.executions(tuple):
        rig.model.optimizer.learning_rate = 0.25
        feed.train()
    assert rates[-2:] == [0.25, 0.25]
    assert rig.trained[-3:] == [(1, 1), (1, 2), (1, 3)]


def test_where_there_is_nothing_left_keras_is_told() -> None:
    rig = Rig()
    rig.feed.begin_epoch(0)
    rig.state.batch = BATCHES
    with pytest.raises(StopIteration):
        rig.feed.train()


def test_a_worker_that_joins_goes_on_in_the_middle_with_the_metrics_of_the_others() -> None:
    rig = Rig()
    rig.state.epoch, rig.state.batch = 1, 2
    feed = Feed(rig.state, rig.model, rig.source, 1)
    rig.model.sums = [np.float32(0), np.int32(0)]  # as Keras sets them back
    feed.begin_epoch(1)
    assert rig.model.sums == [56.0, 8]
    assert [begin for begin, _, it in feed.executions(tuple) if it.train()] == [2, 3]


# --- data that is no ElasticDataset --------------------------------------------------------------------------------


def keras_own(length: int = 1) -> Callable[[], Iterable[Any]]:
    """Keras's epochs: each a new iterator over numbers that say which batch of all it is."""
    numbers = iter(range(100))

    def plain() -> Iterator[Any]:
        batches = iter([np.array([next(numbers)]) for _ in range(BATCHES)])
        for begin in range(0, BATCHES, length):
            yield begin, begin + length - 1, batches

    return plain


def numbers(rig: Rig) -> list[int]:
    return [int(batch.numpy()[0]) for batch in rig.state.trained]


@pytest.mark.parametrize("length", [1, 2])
def test_plain_batches_come_in_order(length: int) -> None:
    assert numbers(Rig(length, PlainSource).run(keras_own(length))) == list(range(8))


def test_a_plain_batch_that_is_undone_is_the_one_in_hand() -> None:
    rig = Rig(source=PlainSource)
    rig.state.undone = {(0, 1)}
    assert numbers(rig.run(keras_own())) == [0, 1, 1, 2, 3, 4, 5, 6, 7]


def test_plain_batches_from_before_a_checkpoint_are_gone() -> None:
    rig = Rig(source=PlainSource)
    rig.state.back = {(0, 3): (0, 1)}
    with pytest.raises(RecoveryError, match=r"give model\.fit\(\) an ElasticDataset"):
        rig.run(keras_own())


def test_a_worker_that_joins_passes_plain_batches_by() -> None:
    rig = Rig(2, PlainSource)
    rig.state.batch = 3
    rig.feed = Feed(rig.state, rig.model, rig.source, 2)
    assert numbers(rig.run(keras_own(2), epochs=1)) == [3]


# --- logs of an epoch ----------------------------------------------------------------------------------------------


@pytest.fixture
def two_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one has validated on 24 samples, and has twice the values."""

    def total(mine: Any, name: str) -> Any:
        if name.startswith("metrics of "):
            return mine + np.array([mine[0] * 6 if mine.dtype == np.float32 else 24], mine.dtype)
        count = mine[0]
        return mine + np.array([24.0, *(24 * 2 * value / count for value in mine[1:])])

    monkeypatch.setattr(module, "current", lambda: SimpleNamespace(binding=SimpleNamespace(total=total)))


@pytest.mark.usefixtures("two_workers")
def test_logs_that_are_not_of_all_workers_become_their_mean() -> None:
    rig = Rig()
    rig.feed.begin_epoch(0)
    logs = {"loss": 3.0, "seconds": 4.0, "said": "so"}
    rig.feed.agree(0, logs)
    assert logs == {"loss": 3.0, "seconds": (4 + 3 * 8) / 4, "said": "so"}
    assert (rig.state.told, rig.state.steps) == (1, 1)


@pytest.mark.usefixtures("two_workers")
def test_metrics_of_a_validation_come_from_the_sums_of_all_workers() -> None:
    rig = Rig()
    rig.feed.begin_epoch(0)
    logs = {"loss": 3.0, "val_loss": 7.0}
    rig.feed.agree(0, logs)
    assert logs == {"loss": 3.0, "val_loss": (56 + 6 * 56) / (8 + 24)}
    assert rig.model.sums == [56.0, 8]


@pytest.mark.usefixtures("two_workers")
def test_a_validation_that_was_not_taken_from_metrics_becomes_a_mean() -> None:
    rig = Rig()
    rig.feed.begin_epoch(0)
    logs = {"val_loss": 4.0, "val_of_its_own": 1.0}
    rig.feed.agree(0, logs)
    assert logs == {"val_loss": 7.0, "val_of_its_own": 1.75}


@pytest.mark.usefixtures("two_workers")
def test_a_failure_meanwhile_lets_them_agree_again() -> None:
    rig = Rig()
    rig.feed.begin_epoch(0)
    rig.state.undone = {(0, 0)}
    logs = {"seconds": 4.0, "val_loss": 7.0}
    rig.feed.agree(0, logs)
    assert (logs["val_loss"], rig.state.told, rig.state.steps) == (12.25, 1, 1)


@pytest.mark.usefixtures("two_workers")
def test_training_that_goes_back_meanwhile_catches_up_and_agrees_again() -> None:
    rig = Rig()
    rig.run(epochs=1)
    rig.state.back = {(0, BATCHES): (0, 2)}
    train = rig.state.ft_update.train

    def metered(batch: Any) -> Any:
        rig.model.sums = [np.float32(1), np.int32(1)]
        return train(batch)

    rig.state.ft_update.train = metered
    logs = {"val_loss": 7.0}
    rig.feed.agree(0, logs)
    assert rig.trained == [*ALL[:4], (0, 2), (0, 3)]
    assert (logs["val_loss"], rig.state.told, rig.state.entered) == (12.25, 1, 1)


@pytest.mark.usefixtures("two_workers")
def test_one_that_has_joined_after_the_last_batch_has_the_logs_of_training() -> None:
    rig = Rig()
    rig.state.batch = BATCHES
    rig.feed = Feed(rig.state, rig.model, rig.source, 1)
    rig.feed.begin_epoch(0)
    logs = {"seconds": 4.0}
    rig.feed.agree(0, logs)
    assert logs == {"loss": 7.0, "seconds": 7.0}


def test_one_that_has_failed_alone_gets_what_the_others_have() -> None:
    rig = Rig()
    rig.feed.begin_epoch(0)
    rig.state.told, rig.state.logs = 1, {"loss": 3.0, "val_loss": 9.0}
    logs = {"val_loss": 4.0}
    rig.feed.agree(0, logs)
    assert logs == {"loss": 3.0, "val_loss": 9.0}
    assert rig.state.steps == 0


def test_where_all_logs_are_those_of_all_there_is_nothing_to_agree_on() -> None:
    rig = Rig()
    rig.feed.begin_epoch(0)
    rig.feed.agree(0, {"loss": 3.0})
    assert (rig.state.told, rig.state.steps) == (0, 0)
