"""Stable names for what workers reduce and broadcast: made from the paths of variables, the same on all workers.

Keras numbers models and layers as a process makes them (``sequential_2/dense_5/kernel``), an optimizer takes that into
the names of its variables (``sgd/sequential_2_dense_5_kernel_momentum``), and a worker that has joined late has made
fewer. So the numbers are left out, and names that are equal then are told apart by their order.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops as framework
from tensorflow.python.framework.func_graph import FuncGraph

#: What TensorFlow takes in the name of an operation, but for "/": Horovod drops what is before it.
FORBIDDEN = re.compile(r"[^A-Za-z0-9_.\-]")
NUMBER = re.compile(r"_\d+(?=[_/]|$)")


def name_of(variable: Any) -> str:
    """Path of a Keras variable, or name of one of TensorFlow's, as a part of an operation's name. No numbers."""
    name = getattr(variable, "path", None) or getattr(variable, "name", None) or "tensor"
    return FORBIDDEN.sub("_", NUMBER.sub("", name.removesuffix(":0")).replace("/", "."))


def names_of(variables: Iterable[Any]) -> tuple[str, ...]:
    """Unique names, in order; those of equal ones end with ``.1``, ``.2`` and so on from the second on."""
    seen: Counter[str] = Counter()
    names = []
    for variable in variables:
        name = name_of(variable)
        names.append(f"{name}.{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return tuple(names)


def own_prefix(owner: Any, wanted: str) -> str:
    """What comes before the names of an owner's operations in the graph that is being made: the same each time.

    As wanted, or with ``-2``, ``-3`` and so on behind it if that is another owner's there. No name of a variable looks
    like this number: those come after a dot.
    """
    # Owners are counted by graph, not by process. All workers make the graph of a step from the same lines, so they
    # meet its owners in the same order. What a process has made before differs: one that joins has not made the models
    # of an earlier training, nor those of a function that the others have entered again. The graph is the outermost
    # one: TensorFlow renames no operation of a branch or of a function inside, and these may run at the same time.
    # There is a limit. A tf.function that was called first by itself, and then inside of another one, keeps the names
    # that it had by itself. Users who do that with two optimizers give them names.
    if tf.executing_eagerly():
        return wanted
    graph = _outermost(framework.get_default_graph())
    if not hasattr(graph, "ft_prefixes"):
        graph.ft_prefixes = {}
    taken: dict[str, Any] = graph.ft_prefixes
    prefixes = itertools.chain([wanted], (f"{wanted}-{number}" for number in itertools.count(2)))
    return next(prefix for prefix in prefixes if taken.setdefault(prefix, owner) is owner)


def _outermost(graph: Any) -> Any:
    """The graph that a graph is inside of, after all: that of the function that is called in eager mode."""
    outer = getattr(graph, "outer_graph", None)
    return _outermost(outer) if isinstance(outer, FuncGraph) else graph
