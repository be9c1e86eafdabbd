"""The pieces of light state of a Keras training: what a step changes besides weights and the optimizer's variables.

Each is a ``committer.Part``. ``begin`` runs in every step. A value that was read from a variable of TensorFlow stays
what it was when the variable changes, and shares its memory until then: to remember one costs no copy.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random import seed_generator
from tensorflow.python.ops import stateful_random_ops

from horovod_ft.committer import Part
from horovod_ft.data import Cursor
from horovod_ft.guard import ReplicaGuard
from horovod_ft.parts import Attributes, CursorPart, Remembered

#: Names of parts that look after no attribute: tracked attributes do not begin like this.
RANDOM, LOCAL, METRICS, RATES, VALUES = "_random", "_local", "_metrics", "_rates", "_values"


class Variables(Remembered):
    """The values of some variables.

    Args:
        variables: asked for anew each time; the same ones in the same order on all workers.
        replicated: they are equal on all workers.
    """

    def __init__(self, variables: Callable[[], Sequence[Any]], *, replicated: bool) -> None:
        super().__init__()
        self.replicated = replicated
        self._variables = variables

    def export(self) -> list[Any]:
        return [read(variable) for variable in self._variables()]

    def adopt(self, value: Sequence[Any]) -> None:
        for variable, item in zip(self._variables(), value, strict=True):
            variable.assign(item)


class Known:
    """Variables that are looked for again only when there may be others: to walk through a model takes time.

    Args:
        look: finds them.
        made: a number that changes when there may be others; 0: they have to be looked for each time.
    """

    def __init__(self, look: Callable[[], list[Any]], made: Callable[[], int]) -> None:
        self._look = look
        self._made = made
        self._at = 0
        self._found: list[Any] = []

    def __call__(self) -> list[Any]:
        made = self._made()
        if not made or made != self._at:
            self._at, self._found = made, self._look()
        return self._found

    def forget(self) -> None:
        """There may be others."""
        self._at = 0


def read(variable: Any) -> tf.Tensor:
    """The present value of a variable of Keras or of TensorFlow, in eager mode.

    By the operation itself: each step reads some, and to convert a variable to a tensor takes twice the time.
    """
    resource = variable.value if isinstance(variable, keras.Variable) else variable
    return tf.raw_ops.ReadVariableOp(resource=resource.handle, dtype=resource.dtype)


class RandomState(Remembered):
    """Random generators of Python, numpy, TensorFlow and Keras that belong to no model. Each worker has its own."""

    def export(self) -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state(), [read(state).numpy() for state in _free_generators()]

    def adopt(self, value: tuple[Any, ...]) -> None:
        python, numpy, states = value
        random.setstate(python)
        np.random.set_state(numpy)
        for generator, state in zip(_free_generators(), states, strict=False):  # one may have come since
            generator.assign(state)


def _free_generators() -> Iterator[Any]:
    """States of the generators that TensorFlow and Keras have for whoever brings none; as far as there are any."""
    of_tensorflow = stateful_random_ops.global_generator
    if of_tensorflow is not None:
        yield of_tensorflow.state
    of_keras = global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
    if of_keras is not None:
        yield of_keras.state.value


def seed_newcomer(generators: Sequence[Any], generation: int, rank: int) -> None:
    """Give a process that joins a running job random streams that no other worker has.

    Args:
        generators: states of the models' own: variables of two numbers, of which the first is the seed.
    """
    base = [int(item) for generator in generators for item in read(generator).numpy().astype(np.int64) % 2**31]
    sequence = np.random.SeedSequence((generation, rank, *base))
    python, numpy, tensorflow, *own = sequence.generate_state(3 + len(generators))
    random.seed(int(python))
    np.random.seed(int(numpy))
    tf.random.set_seed(int(tensorflow))
    for generator, seed in zip(generators, own, strict=True):
        generator.assign([int(seed) % 2**31, 0])


def generators_of(model: Any) -> list[Any]:
    """States of a model's own random generators, such as those of dropout."""
    return [generator.state for layer in model._flatten_layers() for generator in layer._seed_generators]


def rates_of(optimizer: Any) -> list[Any]:
    """The variables that hold an optimizer's learning rates; none if it follows a schedule."""
    every = (optimizer, getattr(optimizer, "inner_optimizer", None))
    found = [one._learning_rate for one in every if one is not None and hasattr(one, "_learning_rate")]
    return [rate for rate in found if isinstance(rate, keras.Variable)]


def is_part(value: Any) -> bool:
    """Whether a value is a ``committer.Part`` itself."""
    methods = ("begin", "commit", "rollback", "export", "adopt")
    return hasattr(value, "replicated") and all(hasattr(value, name) for name in methods)


def kind_of(value: Any) -> str:
    """What a tracked attribute is to a training state."""
    if isinstance(value, keras.Model):
        return "model"
    if isinstance(value, keras.optimizers.Optimizer):
        return "optimizer"
    if isinstance(value, ReplicaGuard):
        return "guard"
    if isinstance(getattr(value, "cursor", None), Cursor):
        return "dataset"
    return "part" if is_part(value) else "value"


def parts_of(owner: Any, kinds: dict[str, str]) -> dict[str, Part]:
    """What looks after each tracked attribute, by its name; after plain values, all of them together, ``VALUES``."""
    named: dict[str, Part] = {}
    for name, kind in kinds.items():
        if kind == "dataset":
            named[name] = CursorPart(lambda name=name: getattr(owner, name).cursor)  # type: ignore[misc]
        elif kind == "part":
            named[name] = getattr(owner, name)
    return {**named, VALUES: Attributes(owner, [name for name, kind in kinds.items() if kind == "value"])}
