"""Random access to samples by their ids, whatever they are kept in: arrays, a ``tf.data.Dataset``, a function.

A batch is a tuple as Keras takes it: inputs, then targets if there are any, then weights of samples if there are any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from horovod_ft.data import Ids
from horovod_ft.errors import ConfigurationError

#: Samples of a ``tf.data.Dataset`` that are read at a time.
READ = 1024

#: What a ``tf.data.Dataset`` is called that makes something else of the samples.
BATCHES = ("Batch", "Window")
SINGLES = ("Unbatch", "FlatMap", "Interleave", "Generator")

Batch = tuple[Any, ...]


class Samples(Protocol):
    """Samples with the ids 0..length-1, the same on all workers."""

    length: int

    def __call__(self, ids: Ids) -> Batch:
        """The batch of these samples, in this order."""


class Rows:
    """Rows of arrays.

    Args:
        arrays: a tuple of arrays, or of structures of them.

    Raises:
        ConfigurationError: something in it is no array, or their lengths differ.
    """

    def __init__(self, arrays: Batch) -> None:
        self._arrays = keras.tree.map_structure(_array, arrays)
        lengths = [len(array) for array in keras.tree.flatten(self._arrays)]
        if len(set(lengths)) != 1:
            raise ConfigurationError(f"the arrays of an ElasticDataset have different lengths: {lengths}")
        self.length = lengths[0]

    def __call__(self, ids: Ids) -> Batch:
        batch: Batch = keras.tree.map_structure(lambda array: array[ids], self._arrays)
        return batch


def _array(value: Any) -> np.ndarray[Any, Any]:
    array = np.asarray(value)
    if array.ndim == 0 or (array.dtype == object and not all(isinstance(one, str | bytes) for one in array.flat)):
        raise ConfigurationError(
            f"ElasticDataset needs arrays, a tf.data.Dataset, or a function of sample ids with length=...; "
            f"{type(value).__name__} is none of them. A generator cannot be dealt out again when a worker is lost"
        )
    return array


class Computed:
    """What a function of sample ids returns.

    Args:
        function: of int64 ids, shape ``(n,)``; returns inputs, or a tuple of inputs, targets and weights.
        length: how many samples there are.
    """

    def __init__(self, function: Callable[[Ids], Any], length: int) -> None:
        self._function = function
        self.length = length

    def __call__(self, ids: Ids) -> Batch:
        return _as_batch(self._function(ids))


def _as_batch(value: Any) -> Batch:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def samples_of(x: Any, y: Any, sample_weight: Any, length: int | None) -> Samples:
    """Samples from what the user has given. Reads a ``tf.data.Dataset`` from its beginning to its end.

    Raises:
        ConfigurationError: they cannot be dealt.
    """
    alone = isinstance(x, tf.data.Dataset) or callable(x)
    if alone and (y is not None or sample_weight is not None):
        raise ConfigurationError("y and sample_weight go with arrays only: let x give them too")
    if isinstance(x, tf.data.Dataset):
        _only_for_functions(length)
        return Rows(_read(x))
    if callable(x):
        if length is None:
            raise ConfigurationError("with a function of sample ids, length=... says how many samples there are")
        return Computed(x, length)
    _only_for_functions(length)
    if sample_weight is not None and y is None:
        raise ConfigurationError("sample_weight has a meaning with y only")
    return Rows(tuple(part for part in (x, y, sample_weight) if part is not None))


def _only_for_functions(length: int | None) -> None:
    if length is not None:
        raise ConfigurationError(
            "length=... goes with a function of sample ids only. Samples that come one after the other, as from a "
            "generator, cannot be dealt out again when a worker is lost"
        )


# --- tf.data ---------------------------------------------------------------------------------------------------------


def _read(dataset: Any) -> Batch:
    """All samples of a dataset, as arrays.

    Raises:
        ConfigurationError: there are infinitely many or it is not known how many; they are batches, or in random
            order; or they have different shapes.
    """
    cardinality = int(dataset.cardinality())
    if cardinality < 0:
        known = "is infinite" if cardinality == tf.data.INFINITE_CARDINALITY else "has an unknown number of samples"
        raise ConfigurationError(
            f"the tf.data.Dataset {known}, so its samples cannot be dealt. If you know how many there are, use "
            "dataset.take(n), or dataset.apply(tf.data.experimental.assert_cardinality(n))"
        )
    if cardinality == 0:
        raise ConfigurationError("the dataset is empty: there is nothing to train on")
    _check_pipeline(dataset)
    specs = tf.nest.flatten(dataset.element_spec)
    try:
        if not all(isinstance(spec, tf.TensorSpec) for spec in specs):
            raise TypeError(f"there are {sorted({type(spec).__name__ for spec in specs})} among them")
        pieces = [_as_batch(piece) for piece in dataset.batch(READ).as_numpy_iterator()]
    except (tf.errors.InvalidArgumentError, TypeError) as error:
        raise ConfigurationError(
            "the samples of the tf.data.Dataset cannot be put together: all must have one shape, and be dense"
        ) from error
    whole: Batch = keras.tree.map_structure(lambda *parts: np.concatenate(parts), *pieces)
    return whole


def _check_pipeline(dataset: Any) -> None:
    """
    Raises:
        ConfigurationError: its elements are batches, as far as can be told, or it shuffles.
    """
    kinds = list(_kinds(dataset))
    for kind in kinds:
        if any(word in kind for word in SINGLES):
            break
        if any(word in kind for word in BATCHES):
            raise ConfigurationError(
                "the elements of the tf.data.Dataset are batches. An ElasticDataset makes them itself: leave out "
                ".batch(), or put .unbatch() after it"
            )
    if any("Shuffle" in kind for kind in kinds):
        raise ConfigurationError(
            "the tf.data.Dataset shuffles, so that a number stands for another sample on each worker: leave out "
            ".shuffle(), and give shuffle=True to ElasticDataset"
        )


def _kinds(dataset: Any) -> Iterator[str]:
    """The names of the classes of a pipeline, the last first."""
    yield type(dataset).__name__
    for source in dataset._inputs():
        yield from _kinds(source)


def as_tensors(batch: Batch) -> Batch:
    """A batch as a training step takes it: tensors, and None for what is left out."""

    def one(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return tf.constant(value)
        if value is None or isinstance(value, tf.experimental.Optional):
            return None
        return value if tf.is_tensor(value) else tf.convert_to_tensor(value)

    made: Batch = keras.tree.map_structure(one, batch)  # in half the time of TensorFlow's, in each step
    return made
