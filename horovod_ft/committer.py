"""The per-step committer: at which step this worker is, and the small state that a step touches.

A commit costs microseconds because it copies no weights: in synchronous data parallelism every survivor's parameters
are at a step boundary when a reduction fails. What a step changes before its update (buffers, random generators,
counters) is *light*: each piece is a Part that remembers its value when the step begins. No framework here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol


class Part(Protocol):
    """A piece of light state.

    ``begin`` is on the hot path: it must be cheap and should reuse its storage. A replicated part is the same on all
    workers; ``export`` and ``adopt`` bring it to those who are behind or new. What they do for the others serves the
    full copies that a worker keeps for itself.
    """

    replicated: bool

    def begin(self) -> None:
        """A step begins: remember the present value."""

    def commit(self) -> None:
        """The step is final."""

    def rollback(self) -> None:
        """The step is discarded: return to the value of the last ``begin``."""

    def export(self) -> Any:
        """The present value, picklable."""

    def adopt(self, value: Any) -> None:
        """Take over what another worker exported, or this one earlier."""


class Frontier(NamedTuple):
    """How far a worker's parameters are; the greater one is newer.

    Attributes:
        step: committed steps.
        updates: optimizer updates already applied in the step that is open. A step with two optimizers, say, can fail
            between them: then its replay skips the first update, which is in the parameters already.
    """

    step: int
    updates: int


class Committer:
    """Counts steps and keeps the light state of the last commit.

    Attributes:
        frontier: how far the parameters are.
        fresh: this process has not received the group's state yet.
        torn: a transfer into this worker was cut off; its parameters are of no step at all.
        computed_by: generation of the group that computed the open step's first update; None before that.
        committed: values of the replicated parts at the last commit, in order; None before the first. What a script
            does between two steps, such as to count epochs, has changed the present values since. A worker that is
            brought forward to that commit is still to do it, so it must get these.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = list(parts)
        self.frontier = Frontier(0, 0)
        self.fresh = True
        self.torn = False
        self.computed_by: int | None = None
        self.committed: list[Any] | None = None
        self.open = False
        self._asked = 0

    def begin(self) -> None:
        """Open a step, unless it is open already (gradient accumulation over several batches)."""
        if not self.open:
            for part in self.parts:
                part.begin()
            self.open = True

    def admit_update(self) -> bool:
        """Whether the optimizer may apply the update it is about to apply: False if a replay did so before."""
        self._asked += 1
        return self._asked > self.frontier.updates

    def update_applied(self, generation: int) -> None:
        """An admitted update is in the parameters."""
        if self.computed_by is None:
            self.computed_by = generation
        self.frontier = Frontier(self.frontier.step, self.frontier.updates + 1)

    def commit(self) -> None:
        """Close the step: counter, cursor and light state move together."""
        for part in self.parts:
            part.commit()
        self.committed = self.export()
        self._close(Frontier(self.frontier.step + 1, 0))

    def save(self) -> None:
        """Let the present be what ``rollback`` returns to, without counting a step."""
        for part in self.parts:
            part.commit()
            part.begin()

    def rollback(self) -> None:
        """Discard what the open step did to the light state. Updates that are in the parameters stay counted."""
        if self.open:
            for part in self.parts:
                part.rollback()
        self.open = False
        self._asked = 0
        if not self.frontier.updates:
            self.computed_by = None

    @property
    def asked(self) -> int:
        """Updates of the open step that its body has come to, those that a replay leaves out included."""
        return self._asked

    def went_back(self, step: int) -> None:
        """The parameters and all parts were set to what they were after an earlier step."""
        self.committed = self.export()
        self._close(Frontier(step, 0))
        self.fresh = self.torn = False

    def export(self) -> list[Any]:
        """Present values of the replicated parts, in order."""
        return [part.export() for part in self.parts if part.replicated]

    def adopt(
        self, values: Sequence[Any] | None, committed: list[Any] | None, frontier: Frontier, computed_by: int | None
    ) -> None:
        """Stand where another worker stands.

        Args:
            values: for the replicated parts, in order; None if they are right as they are.
            committed, frontier, computed_by: of the other worker.
        """
        if values is not None:
            for part, value in zip((part for part in self.parts if part.replicated), values, strict=True):
                part.adopt(value)
        self.committed = committed
        self._close(frontier)
        self.computed_by = computed_by if frontier.updates else None
        self.fresh = self.torn = False

    def _close(self, frontier: Frontier) -> None:
        self.frontier = frontier
        self.computed_by = None
        self.open = False
        self._asked = 0
