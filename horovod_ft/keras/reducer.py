"""Reduction of gradients over all workers, in eager mode and in the graph of a step.

It is out of place: the local gradients are as they were. No reduced gradient is passed on before all of them have
arrived, so that a group that breaks leaves every variable untouched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from tensorflow.python.framework import ops as framework
from tensorflow.python.ops import control_flow_util
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from horovod_ft.errors import ConfigurationError
from horovod_ft.keras.failures import failures
from horovod_ft.keras.names import own_prefix
from horovod_ft.keras.operations import HorovodOperations, Operations
from horovod_ft.keras.same_names import SameNames

#: A dense tensor, ``tf.IndexedSlices``, or None.
Gradient = Any


class GradientReducer:
    """Averages or sums gradients, each under its name.

    Args:
        prefix: comes before each name, with a number behind it if another reducer of the graph has the same one.
        compression: ``hvd.Compression.none`` or ``fp16``, or a class with ``compress`` and ``decompress``.
        op: ``hvd.Average`` or ``hvd.Sum``.
        predivide: divide by this before the sum and by ``size / predivide`` after it; Average only.
        sparse_as_dense: reduce sparse gradients as dense ones.
        device_dense, device_sparse: where the operations are placed; empty: TensorFlow decides.
        operations: of the group.
        formed: how often this process has joined a group, see ``same_names``; None: names are not compared.
    """

    def __init__(
        self,
        prefix: str = "gradient",
        *,
        compression: Any = hvd.Compression.none,
        op: Any = hvd.Average,
        predivide: float = 1.0,
        sparse_as_dense: bool = False,
        device_dense: str = "",
        device_sparse: str = "",
        operations: Operations | None = None,
        formed: Any = None,
    ) -> None:
        self._prefix = prefix
        self._compression = compression
        self._op = op
        self._scales = 1.0 / predivide, predivide
        self._sparse_as_dense = sparse_as_dense
        self._device_dense = device_dense
        self._device_sparse = device_sparse
        self._operations = operations or HorovodOperations()
        self._same = None if formed is None else SameNames(self._operations, formed)
        self._set = 1.0  # what the variable holds
        with tf.init_scope(), tf.device("/CPU:0"):  # by its class, or a function that makes a reducer is traced twice
            self._weight = ResourceVariable(1.0, trainable=False, dtype=tf.float64, name="weight")
        # Names of operations reach Horovod from a graph only, and a graph has its operations run side by side.
        self._graph = tf.function(self._reduce, autograph=False, reduce_retracing=True)

    @property
    def average(self) -> bool:
        """The reduction is an average, not a sum."""
        return bool(self._op == hvd.Average)

    def set_weight(self, factor: float) -> None:
        """From now on local gradients are multiplied by this before they are reduced; 1.0 changes no bit of them.

        With 0.0 this worker adds nothing, whatever its gradients are. Read when a graph runs.
        """
        if self._set != factor:
            self._set = factor
            self._weight.assign(factor)

    def weighted(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Local gradients that are prepared, times the present weight; None stays None."""
        places = [place for place, gradient in enumerate(gradients) if gradient is not None]
        values = [values_of(gradients[place]) for place in places]
        if not values:
            return list(gradients)
        weight = tf.convert_to_tensor(self._weight)
        by_dtype = {dtype: tf.cast(weight, dtype) for dtype in {value.dtype for value in values}}

        def products() -> list[tf.Tensor]:
            # With a weight of 0.0 nothing is added, whatever the gradient is.
            return [tf.math.multiply_no_nan(value, by_dtype[value.dtype]) for value in values]

        # One condition for all: in a graph one for each would take longer than the reduction of a small gradient.
        scaled = tf.cond(tf.equal(weight, 1.0), lambda: values, products)
        result = list(gradients)
        for place, value in zip(places, scaled, strict=True):
            result[place] = with_values(gradients[place], value)
        return result

    def reduce(self, gradients: Sequence[Gradient], names: Sequence[str], *, weigh: bool = True) -> list[Gradient]:
        """The reduced gradients, each dense or sparse as the local one is. Blocks in eager mode.

        A gradient that is None stays None, and takes no part: it must be None on all workers, as it is where all run
        the same model. If it is not, all workers are told, in the first reduction of a group; see ``same_names``.

        Args:
            names: of the gradients, unique and equal on all workers.
            weigh: by the present weight; not what is weighted already.

        Raises:
            HorovodInternalError: in eager mode: the group broke.
            ConfigurationError: the step is being compiled with XLA.
            InvalidArgumentError: of TensorFlow: the workers have gradients for different variables.
        """
        places = [place for place, gradient in enumerate(gradients) if gradient is not None]
        if not places:
            return list(gradients)
        reduced: list[Gradient] = [None] * len(gradients)
        for place, gradient in zip(places, self._present(gradients, names, places, weigh), strict=True):
            reduced[place] = gradient
        return reduced

    def _present(
        self, gradients: Sequence[Gradient], names: Sequence[str], places: Sequence[int], weigh: bool
    ) -> Sequence[Gradient]:
        present = [gradients[place] for place in places]
        named = tuple(names[place] for place in places)
        if tf.executing_eagerly():
            with failures():
                result: Sequence[Gradient] = self._graph(present, named, weigh)
                return result
        if control_flow_util.GraphOrParentsInXlaContext(framework.get_default_graph()):
            raise ConfigurationError(
                "the training step is being compiled with XLA, which cannot compile Horovod's operations: give "
                "jit_compile=False to model.compile() or tf.function()"
            )
        return self._reduce(present, named, weigh)

    def _reduce(self, gradients: Sequence[Gradient], names: Sequence[str], weigh: bool) -> list[Gradient]:
        prepared = [self.prepared(gradient) for gradient in gradients]
        weighted = self.weighted(prepared) if weigh else prepared
        with self.compared(weighted, names):
            reduced: list[Gradient] = together(
                [self.one(gradient, name) for gradient, name in zip(weighted, names, strict=True)]
            )
        return reduced

    def compared(self, gradients: Sequence[Gradient], names: Sequence[str]) -> AbstractContextManager[None]:
        """What is made inside, in a graph, runs after the check that all workers have these prepared gradients."""
        if self._same is None or not gradients:
            return nullcontext()
        sparse = [isinstance(gradient, tf.IndexedSlices) for gradient in gradients]
        compared = [f"{name}.values" if s else name for name, s in zip(names, sparse, strict=True)]
        return self._same.checked(compared, own_prefix(self, self._prefix))

    def prepared(self, gradient: Gradient) -> Gradient:
        """A local gradient in the form in which it is reduced: dense or sparse."""
        if isinstance(gradient, tf.IndexedSlices) and not self._sparse_as_dense:
            return gradient
        return tf.convert_to_tensor(gradient)

    def one(self, gradient: Gradient, name: str) -> Gradient:
        """Reduce one prepared gradient, in a graph, as soon as it is there."""
        name = f"{own_prefix(self, self._prefix)}.{name}"
        if isinstance(gradient, tf.IndexedSlices):
            return self._sparse(gradient, name)
        return self._dense(gradient, name)

    def _dense(self, gradient: tf.Tensor, name: str) -> tf.Tensor:
        with tf.device(self._device_dense):
            wire, context = self._compression.compress(gradient)
            carried = tf.cast(wire, tf.float32) if wire.dtype == tf.bfloat16 else wire  # Horovod has no bfloat16
            before, after = self._scales
            reduced = self._operations.allreduce(carried, name, self._op, before, after)
            return self._compression.decompress(tf.cast(reduced, wire.dtype), context)

    def _sparse(self, gradient: tf.IndexedSlices, name: str) -> tf.IndexedSlices:
        """The rows of all workers. A row that several have touched is there several times, and counts as their sum."""
        with tf.device(self._device_sparse):
            wire, context = self._compression.compress(gradient.values)
            carried = tf.cast(wire, tf.float32) if wire.dtype == tf.bfloat16 else wire
            gathered = self._operations.allgather(carried, f"{name}.values")
            indices = self._operations.allgather(gradient.indices, f"{name}.indices")
            values = self._compression.decompress(tf.cast(gathered, wire.dtype), context)
            if self._op == hvd.Average:
                values = values / tf.cast(self._operations.size(), values.dtype)
            return tf.IndexedSlices(values, indices, gradient.dense_shape)


def values_of(gradient: Gradient) -> tf.Tensor:
    """Its numbers: of a sparse one the rows."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def with_values(gradient: Gradient, values: tf.Tensor) -> Gradient:
    """A gradient with other numbers, dense or sparse as the given one is."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return values


def together(tensors: Any) -> Any:
    """The same tensors, in any structure, none of which is there before all of them are."""
    with after(tensors):
        return tf.nest.map_structure(tf.identity, tensors, expand_composites=True)


@contextmanager
def after(tensors: Any) -> Iterator[None]:
    """What is made inside, in a graph, runs when all of the tensors are there.

    It waits for one operation, and that for the tensors: hundreds of operations that wait for hundreds of tensors each
    would take longer than the reduction of a small model.
    """
    with tf.control_dependencies(tf.nest.flatten(tensors, expand_composites=True)):
        arrived = tf.no_op()
    with tf.control_dependencies([] if arrived is None else [arrived]):  # None in eager mode: they are there
        yield
