"""``DistributedOptimizer`` for Keras 3 on TensorFlow: gradients are reduced in ``apply``, before anything else is done.

So clipping, weight decay, averages of weights and loss scales see reduced gradients, the same on all workers. The
optimizer that is passed in is given a class of its own that puts a few methods in front of the user's class. It stays
what it was for Keras, which serializes it as the plain optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from horovod_ft.errors import ConfigurationError
from horovod_ft.keras import hooks
from horovod_ft.keras.accumulation import Accumulation
from horovod_ft.keras.arguments import check_reduction
from horovod_ft.keras.names import names_of
from horovod_ft.keras.reducer import GradientReducer, after
from horovod_ft.keras.same_names import formations

OptimizerT = TypeVar("OptimizerT")
Update = Callable[[list[Any]], None]
#: Takes a reduction, and what its ``apply`` got.
Collector = Callable[["Reduction", Sequence[Any], Sequence[str], Sequence[int], Update], None]
#: In the thread that takes a training step apart. One for all optimizers: a step may apply some that are not expected.
COLLECTOR: ContextVar[Collector | None] = ContextVar("COLLECTOR", default=None)


@contextmanager
def collecting(collector: Collector) -> Iterator[None]:
    """Inside, no distributed optimizer reduces or applies anything: the collector gets it."""
    token = COLLECTOR.set(collector)
    try:
        yield
    finally:
        COLLECTOR.reset(token)


def refuse_if_collecting(what: str) -> None:
    """
    Raises:
        ConfigurationError: a training step is being taken apart, and it uses this beside its distributed optimizer.
    """
    if COLLECTOR.get() is not None:
        raise ConfigurationError(
            f"the model's train_step uses {what} beside the model's distributed optimizer. Under "
            "FaultToleranceCallback the gradients of that optimizer alone are reduced, once, and undone if the group "
            "breaks: let it apply all gradients, and take them by a tf.GradientTape"
        )


class Reduction:
    """What a distributed optimizer does with its gradients before it applies them.

    Attributes:
        reducer: over all workers.
        accumulation: over backward passes, on this worker; None if each pass is an update.
        done: the gradients that are being applied are reduced.
    """

    def __init__(self, reducer: GradientReducer, accumulation: Accumulation | None) -> None:
        self.reducer = reducer
        self.accumulation = accumulation
        self.done = False

    def build(self, variables: Sequence[Any]) -> None:
        """The variables that have gradients are known."""
        if self.accumulation is not None:
            self.accumulation.build(variables)

    def apply(self, gradients: Sequence[Any], names: Sequence[str], places: Sequence[int], update: Update) -> None:
        """Reduce the gradients and apply the update; with several passes, after the last one only.

        Args:
            names: of the gradients, unique and equal on all workers.
            places: of their variables among all that the optimizer was built for.
            update: gets the reduced gradients.
        """
        collector = COLLECTOR.get()
        if collector is not None:
            collector(self, gradients, names, places, update)
            return

        if self.accumulation is None:
            self.update(self.reducer.reduce(gradients, names), update)
            return
        weighted = self.reducer.weighted([None if one is None else self.reducer.prepared(one) for one in gradients])
        self.accumulation.add(
            weighted, places, lambda sums: self.update(self.reducer.reduce(sums, names, weigh=False), update)
        )

    def update(self, reduced: Sequence[Any], update: Update) -> None:
        """Apply the update, with gradients that are reduced, once all of them are there."""
        self.done = True
        try:
            # In a graph nothing else holds up what does not look at gradients, such as the count of iterations.
            with after([gradient for gradient in reduced if gradient is not None]):
                update(list(reduced))
        finally:
            self.done = False


if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object


class Distributed(_Base):  # type: ignore[misc]  # its base is known when the user's optimizer is
    """The methods in front of the user's optimizer class. Made by ``DistributedOptimizer``, never by itself."""

    ft_reduction: Reduction

    def build(self, variables: list[Any]) -> None:
        super().build(variables)
        self.ft_reduction.build(variables)

    def apply(self, grads: Iterable[Any], trainable_variables: Iterable[Any] | None = None) -> None:
        """Reduce the gradients over all workers, then apply them as the user's optimizer does.

        Raises:
            HorovodInternalError: the group broke; no variable was touched. In eager mode only: inside a ``tf.function``
                the call of that function raises TensorFlow's ``UnknownError``, see ``failures``.
        """
        gradients = list(grads)
        variables = None if trainable_variables is None else list(trainable_variables)
        if self.ft_reduction.done or not gradients or (variables is None and not self.built):
            super().apply(gradients, variables)  # which raises the error, if it is one
            return
        apply_through(self, gradients, variables, super().apply)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a distributed optimizer cannot be pickled or copied; use get_config() and its variables")


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def apply_through(
    optimizer: Any, gradients: list[Any], variables: list[Any] | None, apply: Callable[..., None]
) -> None:
    """Apply gradients by a function that takes reduced ones, and variables, as ``optimizer.apply`` does.

    Args:
        optimizer: the distributed one, or one of Keras around it.
    """
    reduction: Reduction = distributed_in(optimizer).ft_reduction
    if not optimizer.built:
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(variables)
        optimizer.built = True
    everything = optimizer._trainable_variables
    if variables is None:
        variables = everything
    optimizer._check_variables_are_known(variables)
    places = [optimizer._get_variable_index(variable) for variable in variables]
    if len(gradients) != len(variables):
        raise ValueError(f"{len(gradients)} gradients for {len(variables)} variables")
    names = names_of(everything)
    named = [names[place] for place in places]
    reduction.apply(gradients, named, places, lambda reduced: apply(reduced, variables))


def distributed_in(optimizer: Any) -> Any:
    """The distributed optimizer: the given one, or the one inside of it; None if there is none."""
    while optimizer is not None and not isinstance(optimizer, Distributed):
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return optimizer


@functools.cache
def _distributed_class(base: type[Any]) -> type[Any]:
    def from_config(_: type[Any], *args: Any, **options: Any) -> Any:
        """The plain optimizer, as for any saved one."""
        return base.from_config(*args, **options)

    # Keras looks up what an object is by ``__class__`` when it serializes it, and finds the user's class.
    names = {"__module__": base.__module__, "__doc__": base.__doc__, "__class__": property(lambda _: base)}
    return type(base.__name__, (Distributed, base), {**names, "from_config": classmethod(from_config)})


def DistributedOptimizer(  # noqa: N802  Horovod's name
    optimizer: OptimizerT,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = hvd.Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = hvd.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = hvd.global_process_set,
    scale_local_gradients: bool = True,
) -> OptimizerT:
    """Make a Keras optimizer reduce its gradients over all workers before each update. Horovod's arguments, in order.

    A saved model holds the plain optimizer; ``hvd.load_model`` makes it distributed again.

    Args:
        optimizer: any of Keras 3, built or not, a ``LossScaleOptimizer`` too. **The same object is returned**, with
            another class.
        name: comes before the names of the operations; default: ``gradient``. Optimizers of one step may have the same.
        device_dense, device_sparse: where dense and sparse gradients are reduced; empty: TensorFlow decides.
        compression: ``hvd.Compression.none`` or ``fp16``, or a class with ``compress`` and ``decompress``.
        sparse_as_dense: reduce sparse gradients as dense ones.
        gradient_predivide_factor: divide by this before the sum and by ``size / factor`` after it; Average only.
        op: ``hvd.Average`` or ``hvd.Sum``.
        backward_passes_per_step: sum gradients locally over so many calls of ``apply``; the last one reduces and
            applies them. ``iterations``, and with it schedules, count updates (Horovod counts calls).
        average_aggregated_gradients: divide these sums by their number.
        num_groups, groups: hints, of no effect: Horovod puts small gradients together by itself.
        process_set: the global one; Horovod cannot form others anew after a failure.
        scale_local_gradients: of no effect: there are no local variables.

    Raises:
        ConfigurationError: an argument is wrong, or has no meaning in an elastic job.
    """
    _check_optimizer(optimizer)
    check_reduction(op, gradient_predivide_factor, process_set)
    if backward_passes_per_step < 1:
        raise ConfigurationError(f"backward_passes_per_step is {backward_passes_per_step}; it must be at least 1")
    reducer = GradientReducer(
        name or "gradient",
        compression=compression,
        op=op,
        predivide=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        device_dense=device_dense,
        device_sparse=device_sparse,
        formed=formations(),
    )
    several = backward_passes_per_step > 1
    accumulation = Accumulation(backward_passes_per_step, average=average_aggregated_gradients) if several else None
    same: Any = optimizer
    hooks.install(distributed_in, apply_through, refuse_if_collecting)
    same.__dict__["ft_reduction"] = Reduction(reducer, accumulation)  # not by setattr, with which Keras tracks it
    its_class: Any = type(optimizer)
    object.__setattr__(same, "__class__", _distributed_class(its_class))
    if same.built:
        same.ft_reduction.build(same._trainable_variables)
    return optimizer


def _check_optimizer(optimizer: Any) -> None:
    if isinstance(optimizer, type):
        raise ConfigurationError(f"DistributedOptimizer needs an optimizer, not its class: {optimizer.__name__}(...)")
    if _wrapped_by_horovod(optimizer):
        raise ConfigurationError(
            "this optimizer is wrapped already, by Horovod's own DistributedOptimizer, which averages nothing on Keras "
            "3: import horovod_ft.keras as hvd in place of Horovod's module, and wrap the plain optimizer once"
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigurationError(
            f"DistributedOptimizer needs a keras.optimizers.Optimizer of Keras 3, not {type(optimizer).__name__}"
        )
    if distributed_in(optimizer) is not None:
        raise ConfigurationError("this optimizer is distributed already: DistributedOptimizer was applied to it twice")


def _wrapped_by_horovod(optimizer: Any) -> bool:
    """Whether it, or one inside of it, has a class that stock Horovod has made."""
    while optimizer is not None:
        if any(base.__module__.partition(".")[0] == "horovod" for base in type(optimizer).__mro__):
            return True
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return False
