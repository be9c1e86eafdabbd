"""What an epoch of ``fit`` goes by while training is fault tolerant: batches, each in a transaction of its own.

Keras sees batches as ever: it calls the training function once for each, or for several. A batch that a failure has
undone is computed again inside that call. So is everything between a checkpoint and the present batch, if training has
gone back to one: Keras, its callbacks and its history stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from horovod_ft.errors import RecoveryError
from horovod_ft.keras.metric_sums import totals
from horovod_ft.keras.parts import rates_of, read
from horovod_ft.keras.runtime import current
from horovod_ft.keras.samples import as_tensors
from horovod_ft.recovery import Restarted

#: Batches of an epoch as Keras counts them: the first, the last, and what they are taken from.
Execution = tuple[int, int, Any]
Position = tuple[int, int]


class Source(Protocol):
    """Where batches come from."""

    def begin_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, unless training is in it already."""

    def executions(self, length: int, plain: Callable[[], Iterable[Execution]]) -> Iterator[tuple[int, int]]:
        """The first and the last batch of each call of the training function, from where the state is.

        Args:
            length: batches in a call.
            plain: how Keras would count them.
        """

    def next(self, at: Position) -> Any:
        """The batch at a position, epoch and batch in it, as a training step takes it.

        Raises:
            StopIteration: that epoch has none there.
        """


class DatasetSource:
    """An ``ElasticDataset``, without anything in between: what it deals is for the present group."""

    def __init__(self, dataset: Any, adapter: Any, state: Any) -> None:
        self._dataset = dataset
        self._adapter = adapter
        self._state = state

    def begin_epoch(self, epoch: int) -> None:
        if self._dataset.cursor.epoch != epoch:
            self._dataset.begin_epoch(epoch)

    def executions(self, length: int, plain: Callable[[], Iterable[Execution]]) -> Iterator[tuple[int, int]]:
        while not self._dataset.cursor.exhausted(current().group().size):
            begin = self._state.batch // length * length
            yield begin, begin + length - 1

    def next(self, at: Position) -> Any:
        if getattr(self._adapter, "class_weight", None) is None:
            return self._dataset.next_tensors()
        return as_tensors(self._adapter._standardize_batch(tuple(map(np.asarray, self._dataset.next_batch()))))


class PlainSource:
    """Any other data, by Keras's own iterator. Batches of the open step are kept, in case it is computed again."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self._iterator: Any = None
        self._kept: dict[Position, Any] = {}
        self._newest: Position = (-1, -1)
        self._steps = -1

    def begin_epoch(self, epoch: int) -> None:
        """Keras's iterator does."""

    def executions(self, length: int, plain: Callable[[], Iterable[Execution]]) -> Iterator[tuple[int, int]]:
        passed = self._state.batch  # by the others, before this worker has joined them
        for begin, end, iterator in plain():
            self._iterator = iterator
            for _ in range(begin, min(end + 1, passed)):
                next(iterator, None)
            if end >= passed:
                yield begin, end

    def next(self, at: Position) -> Any:
        if self._steps != self._state.steps:
            self._steps = self._state.steps
            self._kept.clear()
        self._state.taking()
        if at not in self._kept:
            if self._kept and at < max(self._kept):
                raise StopIteration
            if at < self._newest:
                raise RecoveryError(
                    "training has gone back to a checkpoint, but the batches since then are not there any more: give "
                    "model.fit() an ElasticDataset, or start the job again"
                )
            self._kept[at] = as_tensors(next(self._iterator))
            self._newest = at
        return self._kept[at]


class Feed:
    """The batches of one ``fit``.

    Args:
        state: with ``epoch`` and ``batch``, the position in the data, which move with the steps; and with ``logs``,
            those that were agreed on last, and ``told``, one more than the epoch that they are of.
        model: that is trained.
        source: of batches.
        length: batches in a call of the training function, at most.
    """

    def __init__(self, state: Any, model: Any, source: Source, length: int) -> None:
        self._state = state
        self._model = model
        self._source = source
        self._length = length
        self._epoch = state.epoch
        self._end = -1
        self._reached: Position = self._position
        self._metrics = state.ft_metrics_values() if state.batch else None
        self._before: dict[str, float] = {}
        self._rates: dict[int, list[Any]] = {}
        self._logs: Any = None

    @property
    def _position(self) -> Position:
        return self._state.epoch, self._state.batch

    def begin_epoch(self, epoch: int) -> None:
        """Keras begins an epoch, and has set metrics back: right, unless training is in the middle of it."""
        self._epoch = epoch
        if self._state.epoch != epoch:
            self._state.epoch, self._state.batch = epoch, 0
        elif self._metrics is not None:
            self._state.ft_set_metrics(self._metrics)
            self._before = {name: float(value) for name, value in self._model.get_metrics_result().items()}
        self._metrics = None
        self._source.begin_epoch(epoch)

    def executions(self, plain: Callable[[], Iterable[Execution]]) -> Iterator[Execution]:
        """The rest of the epoch, in place of Keras's own."""
        self._rates[self._epoch] = [read(rate) for rate in rates_of(self._model.optimizer)]
        for begin, end in self._source.executions(self._length, plain):
            self._end = end
            yield begin, end, self

    def train(self) -> Any:
        """Train on the batches that were yielded last, through all failures that the policy recovers. Blocks.

        Returns:
            logs.

        Raises:
            StopIteration: there are no more.
            RecoveryError: the policy gave up.
        """
        before = self._position
        self._advance((self._epoch, self._end + 1))
        if self._position == before:
            raise StopIteration
        return self._logs if self._logs is not None else dict(self._model.get_metrics_result())

    def agree(self, epoch: int, logs: Any) -> None:
        """Let logs of an epoch that are not those of all workers yet, such as of a validation, become so. Blocks.

        Metrics of a validation are merged as those of training are, from the sums that they hold. Any other number
        becomes the mean, weighted by the samples that each worker has validated on. It is a step of its own, without a
        batch: a worker that fails in it while others do not gets what they have.

        Args:
            logs: of this worker; changed in place. The same names on all workers.
        """
        logs = {} if logs is None else logs
        for name, value in self._before.items():  # Keras has none if this worker has joined after the last batch
            logs.setdefault(name, value)
        self._before = {}
        merged = self._model.get_metrics_result().keys()
        validated = {name for name in logs if name.startswith("val_") and name not in merged}
        if validated != {f"val_{name}" for name in merged}:
            validated = set()  # Keras has taken them from what the model's test_step returned, not from metrics
        names = sorted(
            name for name, value in logs.items() if _is_number(value) and name not in merged and name not in validated
        )
        if not names and not validated:
            return
        state = self._state
        sums = [value.numpy() for value in state.ft_metrics_values()]
        mine = [float(logs[name]) for name in names]
        others = {name: float(value) for name, value in logs.items() if _is_number(value)}
        while state.told <= epoch:
            try:
                state.engine.begin()
                with state.step():
                    # All of them: metrics hold those of the validation now, and a worker may join after this step.
                    means = dict(zip(names, self._mean(mine), strict=True)) if names else {}
                    state.logs = {**others, **means, **self._validation(validated, sums)}
                    state.told = epoch + 1
            except Restarted:
                state.engine.enter()
                self.catch_up()
        logs.update(state.logs)

    def _validation(self, names: Collection[str], sums: Sequence[Any]) -> dict[str, Any]:
        """Logs of a validation over all workers.

        Args:
            names: of the logs.
            sums: what the metrics of this worker hold after its part; the same ones in the same order on all workers.
        """
        if not names:
            return {}
        present = self._state.ft_metrics_values()
        self._state.ft_set_metrics(totals(sums, current().binding.total))
        results = self._model.get_metrics_result()
        self._state.ft_set_metrics(present)
        values = ((f"val_{name}", np.array(value)) for name, value in results.items())
        return {name: float(value) if value.ndim == 0 else value for name, value in values if name in names}

    def _mean(self, values: list[float]) -> list[float]:
        tracker = self._model._loss_tracker
        count = 1.0 if tracker is None else max(float(tracker.count), 1e-9)
        weighted = np.array([count, *(count * value for value in values)], np.float64)
        total, *sums = current().binding.total(weighted, "logs of an epoch").tolist()
        return [value / total for value in sums]

    def catch_up(self) -> None:
        """Train until training is where it was before it has gone back."""
        self._advance(self._reached)

    def _advance(self, target: Position) -> None:
        while self._position < target:
            try:
                if not self._pass():
                    break
            except Restarted:
                self._state.engine.enter()
        self._reached = max(self._reached, self._position)

    def _pass(self) -> bool:
        """One batch, if it is not undone. Returns False at the end of the epoch."""
        state = self._state
        try:
            batch = self._source.next(self._position)
        except StopIteration:
            if state.epoch >= self._epoch:
                return False
            self._go_on_to(state.epoch + 1)
            return True
        self._logs = None
        with state.step():
            self._logs = state.ft_update.train(batch)
            state.batch += 1
        return True

    def _go_on_to(self, epoch: int) -> None:
        """The next epoch begins, and Keras has seen that already."""
        self._state.epoch, self._state.batch = epoch, 0
        self._source.begin_epoch(epoch)
        if not self._state.accumulating():
            self._model.reset_metrics()
        for rate, value in zip(rates_of(self._model.optimizer), self._rates.get(epoch, ()), strict=False):
            rate.assign(value)


def _is_number(value: Any) -> bool:
    return getattr(value, "ndim", 0) == 0 and not isinstance(value, str | dict | list | tuple | None)
