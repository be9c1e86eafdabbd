"""``hvd.callbacks``: the callbacks that Horovod's users know, for Keras 3. Everything else there is Horovod's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from horovod_ft.errors import ConfigurationError
from horovod_ft.keras.failures import failures
from horovod_ft.keras.operations import HorovodOperations
from horovod_ft.keras.variables import broadcast_variables

Logs = dict[str, Any] | None


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Gives all workers the model and the optimizer of one of them, before the first step.

    If the model is not built by then, after the first batch, as with Horovod. The states of random generators, such as
    those of dropout, stay each worker's own.

    Args:
        root_rank: the worker whose variables count.
        device: where the variables are broadcast; empty: TensorFlow decides.
        local_variables: variables that stay each worker's own.

    With a ``FaultToleranceCallback`` beside it there is nothing left for it to do, and it does nothing.
    """

    ft_not_alone = False

    def __init__(self, root_rank: int, device: str = "", local_variables: Iterable[Any] | None = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done = False
        self._local = {_key(variable) for variable in _listed(local_variables)}

    def register_local_var(self, var: Any) -> None:
        """One more variable that stays each worker's own."""
        self._local.add(_key(var))

    def on_train_begin(self, logs: Logs = None) -> None:
        if not self.model.built:
            return
        optimizer = self.model.optimizer
        if optimizer is not None and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._broadcast()

    def _broadcast(self) -> None:
        if self.broadcast_done or self.ft_not_alone:
            return
        random = {_key(state) for layer in self.model._flatten_layers() for state in _generators(layer)}
        optimizer = [] if self.model.optimizer is None else self.model.optimizer.variables
        everything = {_key(variable): variable for variable in (*self.model.variables, *optimizer)}
        with tf.device(self.device):
            broadcast_variables(
                [variable for key, variable in everything.items() if key not in self._local | random], self.root_rank
            )
        self.broadcast_done = True


def _listed(variables: Any) -> list[Any]:
    if variables is None:
        return []
    return [variables] if isinstance(variables, tf.Variable | keras.Variable) else list(variables)


def _key(variable: Any) -> int:
    return id(variable.value if isinstance(variable, keras.Variable) else variable)


def _generators(layer: Any) -> list[Any]:
    return [value.state for value in vars(layer).values() if isinstance(value, keras.random.SeedGenerator)]


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Averages the metrics of an epoch over all workers. Put it before callbacks that look at them.

    All workers must have the same metrics: validate on all of them, or on none.

    Args:
        device: where the metrics are averaged; empty: TensorFlow decides.

    With a ``FaultToleranceCallback`` beside it metrics are those of all workers already, and it does nothing.
    """

    ft_not_alone = False

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        names = sorted(name for name, value in (logs or {}).items() if _is_number(value))
        if not logs or not names or self.ft_not_alone:
            return
        values = tf.constant([float(logs[name]) for name in names], tf.float64)
        with failures(), tf.device(self.device):
            means = _mean(values).numpy()
        logs.update(zip(names, means.tolist(), strict=True))


def _is_number(value: Any) -> bool:
    return getattr(value, "ndim", 0) == 0 and not isinstance(value, str | dict | list | tuple | None)


def _mean(values: tf.Tensor) -> tf.Tensor:
    average = HorovodOperations().allreduce
    return tf.function(lambda x: average(x, "metrics", hvd.Average, 1.0, 1.0), autograph=False)(values)


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets the learning rate to ``initial_lr * multiplier``, in epochs from ``start_epoch`` up to ``end_epoch``.

    Args:
        initial_lr: learning rate at the start of training.
        multiplier: a function of the epoch, or a number: that to the power of ``epoch - start_epoch``.
        start_epoch, end_epoch: the first epoch, and the one after the last; None: to the end.
        staircase: set it when an epoch begins. Otherwise for each batch, with ``epoch + batch / steps_per_epoch``.
        momentum_correction: let momentum follow the learning rate, as in arXiv:1706.02677, 2.1. In Keras 3 the momentum
            is a constant of the compiled step; so what it has summed up is scaled instead, which comes to the same.
        steps_per_epoch: default: what ``fit`` knows.

    Raises:
        ConfigurationError: no ``initial_lr``; or, when training begins, steps per epoch are needed and not known.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ConfigurationError(f"{type(self).__name__} needs initial_lr")
        self.initial_lr = initial_lr
        self.multiplier = multiplier if callable(multiplier) else _powers(multiplier, start_epoch)
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0

    def on_train_begin(self, logs: Logs = None) -> None:
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ConfigurationError(f"{type(self).__name__} needs steps_per_epoch: fit() does not know it")

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        if self.current_epoch < self.start_epoch or (
            self.end_epoch is not None and self.current_epoch >= self.end_epoch
        ):
            return
        if self.staircase and batch == 0:
            self._set(self.multiplier(self.current_epoch))
        elif not self.staircase:
            assert self.steps_per_epoch is not None
            self._set(self.multiplier(self.current_epoch + batch / self.steps_per_epoch))

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)

    def _set(self, factor: float) -> None:
        optimizer = self.model.optimizer
        old, new = float(optimizer.learning_rate), self.initial_lr * factor
        optimizer.learning_rate = new
        if self.momentum_correction and old > 0.0 and new != old:
            for summed in _momentum_of(optimizer):
                summed.assign(summed * (new / old))


def _powers(base: float, start: int) -> Callable[[float], float]:
    return lambda epoch: float(base ** (epoch - start))


def _momentum_of(optimizer: Any) -> list[Any]:
    """What an optimizer with a momentum has summed up: steps, with the learning rate in them."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if not getattr(optimizer, "momentum", 0.0) or not optimizer.built:
        return []
    sums = getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", None) or []
    return [summed for summed in sums if summed is not None]


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from ``initial_lr / hvd.size()`` to ``initial_lr``, as in arXiv:1706.02677, 2.2.

    Args:
        initial_lr: learning rate after it.
        warmup_epochs: how long it takes.
        momentum_correction, steps_per_epoch: see ``LearningRateScheduleCallback``.
        verbose: 1: the first worker says when it is over.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(
            initial_lr,
            self._multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.warmup_epochs = warmup_epochs
        self.verbose = verbose

    def _multiplier(self, epoch: float) -> float:
        assert self.steps_per_epoch is not None
        reached = epoch + 1.0 / self.steps_per_epoch  # so that it is whole at the end of an epoch
        size = int(hvd.size())
        return (reached * (size - 1) / self.warmup_epochs + 1.0) / size

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        super().on_epoch_end(epoch, logs)
        if epoch == self.warmup_epochs - 1 and self.verbose > 0 and hvd.rank() == 0:
            rate = float(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


def __getattr__(name: str) -> Any:
    """Whatever else ``horovod.tensorflow.keras.callbacks`` offers."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from horovod.tensorflow.keras import callbacks  # noqa: PLC0415  only for what Keras 3 may not have

    return getattr(callbacks, name)
