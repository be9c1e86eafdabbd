"""``DistributedGradientTape``: a gradient tape whose gradients are reduced over all workers."""

from __future__ import annotations

import functools
from typing import Any, ClassVar, TypeVar

import horovod.tensorflow as hvd
import tensorflow as tf

from horovod_ft.errors import ConfigurationError
from horovod_ft.keras.arguments import check_reduction
from horovod_ft.keras.names import names_of
from horovod_ft.keras.optimizer import refuse_if_collecting
from horovod_ft.keras.reducer import GradientReducer
from horovod_ft.keras.same_names import formations

TapeT = TypeVar("TapeT")


class DistributedTape(tf.GradientTape):  # type: ignore[misc]  # TensorFlow has no types
    """The method in front of the user's tape. Made by ``DistributedGradientTape``, never by itself."""

    ft_reducer: GradientReducer

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
    ) -> Any:
        """As in TensorFlow, reduced over all workers. All of them call it with the same sources. Blocks in eager mode.

        Args:
            use_generic_names: of no effect: names are always the same on all workers.

        Raises:
            HorovodInternalError: in eager mode: the group broke.
            ConfigurationError: it is part of a ``fit`` with ``FaultToleranceCallback``.
        """
        refuse_if_collecting("a DistributedGradientTape")
        local = super().gradient(target, sources, output_gradients, unconnected_gradients)
        reduced = self.ft_reducer.reduce(tf.nest.flatten(local), names_of(tf.nest.flatten(sources)))
        return tf.nest.pack_sequence_as(sources, reduced)


class _Made:
    """The reducers of all tapes of this process, and the weight that they have."""

    reducers: ClassVar[list[GradientReducer]] = []
    weight = 1.0


def set_weight(factor: float) -> None:
    """From now on the gradients of all tapes of this worker count by this: it has a slice of a batch of that size."""
    _Made.weight = factor
    for reducer in _Made.reducers:
        reducer.set_weight(factor)


@functools.cache
def _reducer(**options: Any) -> GradientReducer:
    """The same for equal options: a training loop makes a tape in each step, and TensorFlow compiles the reduction."""
    reducer = GradientReducer("tape", formed=formations(), **options)
    with tf.init_scope():  # a tape may be made while a function is compiled
        reducer.set_weight(_Made.weight)
    _Made.reducers.append(reducer)
    return reducer


@functools.cache
def _distributed_class(base: type[Any]) -> type[Any]:
    bases = (DistributedTape,) if base is tf.GradientTape else (DistributedTape, base)
    return type(base.__name__, bases, {"__module__": base.__module__, "__doc__": base.__doc__})


def DistributedGradientTape(  # noqa: N802  Horovod's name
    gradtape: TapeT,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = hvd.Compression.none,
    sparse_as_dense: bool = False,
    op: Any = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = hvd.global_process_set,
    scale_local_gradients: bool = True,
) -> TapeT:
    """Make a ``tf.GradientTape`` reduce its gradients over all workers. Horovod's arguments, in order.

    An optimizer that applies them must be a plain one: a distributed one would reduce them once more. Call it outside
    of the ``tf.function`` that has the tape: inside, it counts an iteration before it is known that the group broke.

    Args:
        gradtape: **the same object is returned**, with another class.
        device_dense, device_sparse, compression, sparse_as_dense, op, gradient_predivide_factor, num_groups, groups,
            process_set, scale_local_gradients: see ``DistributedOptimizer``.

    Raises:
        ConfigurationError: an argument is wrong, or has no meaning in an elastic job.
    """
    if isinstance(gradtape, DistributedTape):
        raise ConfigurationError("this tape is distributed already: DistributedGradientTape was applied to it twice")
    if not isinstance(gradtape, tf.GradientTape):
        raise ConfigurationError(f"DistributedGradientTape needs a tf.GradientTape, not {type(gradtape).__name__}")
    check_reduction(op, gradient_predivide_factor, process_set)
    same: Any = gradtape
    same.ft_reducer = _reducer(
        compression=compression,
        op=op,
        predivide=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        device_dense=device_dense,
        device_sparse=device_sparse,
    )
    its_class: Any = type(gradtape)
    same.__class__ = _distributed_class(its_class)
    return gradtape
