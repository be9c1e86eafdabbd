"""Stable names for what workers reduce and broadcast: made from the paths of variables, the same on all workers.

Keras numbers models and layers as a process makes them (``sequential_2/dense_5/kernel``), an optimizer takes that into
the names of its variables (``sgd/sequential_2_dense_5_kernel_momentum``), and a worker that has joined late has made
fewer. So the numbers are left out, and names that are equal then are told apart by their order.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

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
