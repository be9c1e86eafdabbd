"""What a worker asks all others while it trains, see ``changes.py``, on its way through TensorFlow.

A question is an operation with a name, whether it has a function of TensorFlow to itself or is part of a step's graph:
workers that do not do the same still hear each other. A function of its own takes the time of another thread in each
step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from horovod_ft.keras.flight import Flight
from horovod_ft.membership.counts import fields_of, flags_of

#: Of the operation. All workers' fields are summed up in it.
NAME = "horovod_ft.changed"


class Question:
    """Yes-or-no questions to all workers at once: a ``membership.base.Pending``.

    Args:
        flags: what this worker says, bit by bit.
        ask: begins to sum up fields over all workers, by an operation of its own; its result is an array of one sum.

    Attributes:
        fields: what this worker says, see ``membership.counts``.
    """

    def __init__(self, flags: int, ask: Callable[[int], Flight]) -> None:
        self.fields = fields_of(flags)
        self._ask = ask
        self._flight: Flight | None = None
        self._counts: int | None = None

    def ask(self) -> None:
        """Let it have an operation of its own. Returns at once."""
        self._flight = self._ask(self.fields)

    def answered(self, counts: Any) -> None:
        """A step's graph has taken the question along.

        Args:
            counts: the fields of all workers, summed up: one number.
        """
        self._counts = int(counts)

    def result(self) -> int:
        """See ``membership.base.Pending``. What no step has taken along is asked now."""
        if self._counts is None:
            if self._flight is None:
                self.ask()
            assert self._flight is not None
            self._flight.wait(math.inf)
            self.answered(self._flight.result()[0])
        assert self._counts is not None
        return flags_of(self._counts)
