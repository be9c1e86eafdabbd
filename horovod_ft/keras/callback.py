"""``FaultToleranceCallback``: a ``model.fit`` that goes on when workers die or join.

It puts together what does the work: the state and its engine, the stages of a step, and the feed of batches.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import keras
import tensorflow as tf

from horovod_ft.choices import Where, asked_place, asked_policy, chosen
from horovod_ft.data import Cursor
from horovod_ft.errors import ConfigurationError
from horovod_ft.guard import ReplicaGuard
from horovod_ft.keras import fit_hooks
from horovod_ft.keras.callback_states import CallbackStates
from horovod_ft.keras.feed import DatasetSource, Feed, PlainSource, Source
from horovod_ft.keras.one_writer import OneWriter
from horovod_ft.keras.optimizer import distributed_in
from horovod_ft.keras.plain_fit import set_weight
from horovod_ft.keras.probes import FaultProbes
from horovod_ft.keras.runtime import current
from horovod_ft.keras.stages import Stages
from horovod_ft.keras.state import TensorFlowState
from horovod_ft.policy import RecoveryPolicy

PLAIN_DATA = (
    "model.fit() got data that is no ElasticDataset: after a failure its workers train on the batch that they have in "
    "hand once more, but the samples of a lost worker's share are not dealt out again, nor those that it would have had"
)

ONE_PLACE = (
    "this fit goes on from step {step}, from the checkpoint in {place} that an earlier fit of this script has saved: "
    "what comes before that is not trained. If it is a training of its own, give each fit a place of its own: "
    "FaultToleranceCallback(checkpoint=...)"
)


class _Active:
    """The callback of the ``fit`` that runs, and its epoch iterator. After an error, until another begins.

    Attributes:
        saved_in: where the fits of this process that have ended have left checkpoints.
    """

    callback: FaultToleranceCallback | None = None
    iterator: weakref.ref[Any] | None = None
    saved_in: ClassVar[set[str]] = set()


class FaultToleranceCallback(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Makes ``model.fit`` recover inside when the group of workers breaks, and take in workers that join.

    Each batch is a transaction. If the group breaks in it, no variable of model or optimizer has been touched, and the
    policy decides: by default the same global batch is dealt out anew and computed again. No batch, epoch or entry of
    the history is lost or doubled. Metrics are those of all workers, so that callbacks decide alike on all of them.
    Give it to ``fit`` on all workers, alone or among other callbacks, wherever in the list. Of those, each
    ``ModelCheckpoint`` writes on the worker that is rank 0 at that time.

    Args:
        policy: what to do after a failure: a policy, or its name as in ``HOROVOD_FT_POLICY``. Default: the environment,
            else ``MiniBatchRollback()``, and where that has no answer ``CheckpointRestart()`` if there are checkpoints.
        checkpoint: where durable checkpoints are saved: a folder that all hosts share, a URL, or ``Checkpoints(...)``.
            Default: ``HOROVOD_FT_CHECKPOINT``, else nowhere.
        data: the ``ElasticDataset`` that ``fit`` gets, if it gets it inside of something else.
        guard: a ``ReplicaGuard`` that compares the workers' replicas from time to time.

    Raises:
        PolicyError: there is no such policy.
        ConfigurationError: ``checkpoint`` names no place, or ``guard`` is something else; and when training begins: a
            model, an optimizer or a list of callbacks with which it cannot work.
    """

    def __init__(
        self,
        policy: RecoveryPolicy | str | None = None,
        checkpoint: Where | None = None,
        data: Any = None,
        guard: ReplicaGuard | None = None,
    ) -> None:
        super().__init__()
        fit_hooks.install()
        self._policy = asked_policy(policy)
        self._place = asked_place(checkpoint)
        self._data = data
        if not isinstance(guard, ReplicaGuard | None):
            raise ConfigurationError(f"guard is {guard!r}; it must be an hvd.elastic.ReplicaGuard(every=...)")
        self._guard = {} if guard is None else {"guard": guard}
        self._state: TensorFlowState | None = None
        self._feed: Feed | None = None
        self._states: CallbackStates | None = None
        self._writer = OneWriter(())
        self._kept: tuple[Any, Any] = (None, None)
        self._saves_in: str | None = None

    @property
    def state(self) -> TensorFlowState | None:
        """What is kept of the training, while ``fit`` runs."""
        return self._state

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._feed is not None and self._states is not None:
            self._states.changed()
            self._feed.begin_epoch(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._states is not None:
            self._states.changed()

    # --- what ``fit_hooks`` calls ------------------------------------------------------------------------------------

    def ft_check(self, callbacks: Sequence[Any]) -> None:
        """Training is about to begin, and no callback knows yet.

        Raises:
            ConfigurationError: see the class.
        """
        iterator = fit_hooks.newest_iterator()
        if iterator is None or self.model is None:
            raise ConfigurationError("FaultToleranceCallback works inside of model.fit() only")
        if sum(isinstance(one, FaultToleranceCallback) for one in callbacks) > 1:
            raise ConfigurationError("there is more than one FaultToleranceCallback in this fit: give it one")
        if any(isinstance(one, keras.callbacks.BackupAndRestore) for one in callbacks):
            raise ConfigurationError(
                "give FaultToleranceCallback(checkpoint=...) in place of BackupAndRestore: it does the same, and "
                "goes on when workers die"
            )
        running = None if _Active.iterator is None else _Active.iterator()
        if running is not None and fit_hooks.is_running(running):
            raise ConfigurationError(
                "a fit with a FaultToleranceCallback began inside of another one: train one model after the other"
            )
        check_model(self.model)
        left = _Active.callback
        if left is not None:  # its fit has ended by an error
            left._stop()
            left.ft_over()
        for callback in callbacks:
            if hasattr(callback, "ft_not_alone"):
                callback.ft_not_alone = True
        self._writer = OneWriter(callbacks)

    def ft_begin(self, callbacks: Sequence[Any]) -> None:
        """All other callbacks know that training begins: bring the group to one state. Blocks."""
        runtime, iterator = current(), fit_hooks.newest_iterator()
        build(self.model, iterator)
        dataset = self._data if self._data is not None else dataset_of(iterator)
        check_data(dataset, iterator)
        self._states = CallbackStates(callbacks)
        state = TensorFlowState(
            model=self.model, dataset=dataset, epoch=0, batch=0, told=0, logs={}, callbacks=self._states, **self._guard
        )
        self._state = state
        probes = FaultProbes(runtime.injector, lambda: state.steps + 1)
        binding = runtime.binding
        stages = Stages(
            self.model, state.ft_metrics, stopped=binding.stopped, probes=probes, taken_along=binding.taken_along
        )
        stages.forget()
        state.ft_update.use(stages)
        _Active.callback, _Active.iterator = self, weakref.ref(iterator)
        binding.riding = True
        policy, place = chosen(self._policy, self._place, runtime.settings)
        state.engine.start(policy, place)
        state.engine.enter()
        self._saves_in = None if place is None else str(place.url)
        if state.steps and self._saves_in in _Active.saved_in:
            warnings.warn(ONE_PLACE.format(step=state.steps, place=self._saves_in), stacklevel=2)
        self._states.open = False
        self._follow(state, dataset, iterator)

    def _follow(self, state: Any, dataset: Any, iterator: Any) -> None:
        """Let ``fit`` go by the state from now on."""
        source: Source
        if dataset is None:
            if current().group().size > 1:
                warnings.warn(PLAIN_DATA, stacklevel=2)
            source = PlainSource(state)
        else:
            source = DatasetSource(dataset, iterator.data_adapter, state)
        feed = self._feed = Feed(state, self.model, source, iterator.steps_per_execution)
        plain_iterator, plain_function = iterator._enumerate_iterator, self.model.train_function
        self._kept = plain_function, self.model._initial_epoch
        if state.steps:
            self.model._initial_epoch = state.epoch
        iterator._enumerate_iterator = lambda: feed.executions(plain_iterator)
        self.model.train_function = lambda taken: taken.train() if taken is feed else plain_function(taken)

    def ft_epoch_end(self, epoch: int, logs: Any) -> None:
        """An epoch has ended, and no callback knows yet: let all workers have the same logs. Blocks."""
        if self._feed is not None:
            self._feed.agree(epoch, logs)

    def ft_end(self) -> None:
        """``fit`` has come to its end: wait for all other workers. Blocks. No callback knows yet."""
        if self._state is None or self._feed is None:
            return
        while not self._state.engine.finished():
            self._state.engine.enter()
            self._feed.catch_up()
        if self._saves_in is not None:
            _Active.saved_in.add(self._saves_in)
        self.model.train_function, self.model._initial_epoch = self._kept
        self._stop()

    def ft_over(self) -> None:
        """Training is over, and all callbacks know; or it could not begin."""
        self._writer.end()

    def _stop(self) -> None:
        _Active.callback = _Active.iterator = None
        current().binding.riding = False
        if self._state is not None:
            self._state.engine.stop()
            set_weight(self.model, 1.0)  # what trains next is no slice
        self._state = self._feed = self._states = None


def check_model(model: Any) -> None:
    """
    Raises:
        ConfigurationError: its training cannot be made fault tolerant.
    """
    optimizer = model.optimizer
    if distributed_in(optimizer) is None:
        raise ConfigurationError(
            "the model's optimizer is not distributed, so that workers would train on their own: compile it with "
            f"optimizer=hvd.DistributedOptimizer(keras.optimizers.{type(optimizer).__name__}(...))"
        )
    if model._distribute_strategy is not None:
        raise ConfigurationError("the model was made under a tf.distribute strategy: Horovod takes the place of that")
    if model.jit_compile:
        raise ConfigurationError("XLA cannot compile Horovod's operations: compile the model with jit_compile=False")


def dataset_of(iterator: Any) -> Any:
    """The ``ElasticDataset`` that ``fit`` got; None if it got something else."""
    dataset = getattr(iterator.data_adapter, "py_dataset", None)
    return dataset if isinstance(getattr(dataset, "cursor", None), Cursor) else None


def check_data(dataset: Any, iterator: Any) -> None:
    """
    Raises:
        ConfigurationError: an argument of ``fit`` has no meaning with an ElasticDataset.
    """
    if dataset is not None and iterator.steps_per_epoch:
        raise ConfigurationError(
            "steps_per_epoch has no meaning with an ElasticDataset: an epoch visits each of its samples once"
        )


def build(model: Any, iterator: Any) -> None:
    """Let a model, its metrics and its optimizer have their variables, as Keras does from the first batch.

    Raises:
        ConfigurationError: that cannot be done without a batch.
    """
    spec = iterator._distributed_dataset.element_spec
    try:
        model._symbolic_build(data_batch=_as_keras_has_it(spec))
    except Exception as error:
        if model.built and model.optimizer.built:
            return
        raise ConfigurationError(
            "the model is not built, and cannot be from the shapes of its data alone: call it on a batch before "
            f"model.fit() ({type(error).__name__}: {error})"
        ) from error
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def _as_keras_has_it(spec: Any) -> Any:
    if isinstance(spec, tuple | list):
        return type(spec)(_as_keras_has_it(item) for item in spec)
    if isinstance(spec, dict):
        return {key: _as_keras_has_it(item) for key, item in spec.items()}
    return None if isinstance(spec, tf.OptionalSpec | tf.experimental.Optional) else _Shaped(spec)


class _Shaped:
    """What Keras looks at: a shape whose first length is not known, and a dtype."""

    def __init__(self, spec: Any) -> None:
        self.shape = tuple(spec.shape)
        self.dtype = spec.dtype
