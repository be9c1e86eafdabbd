"""Full copies of the state at user-chosen steps, to go back to; and ``StateCommitter``, by which a user asks for them.

Replicas make copies unnecessary while the state is worth keeping. These are for when it is not: a loss that has become
NaN, an exception of the user's own, replicas that differ. No framework here, no files and no collectives: where the
numbers of a copy lie is an Arena's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from horovod_ft.committer import Part
from horovod_ft.errors import ConfigurationError

Keep = Literal["replica", "copy"]
#: While one copy is being written the other is whole, and workers that are a copy apart still have one in common.
ARENAS = 2


class Arena(Protocol):
    """Memory for one copy of parameters and optimizer state, kept from copy to copy.

    Attributes:
        nbytes: its size.
    """

    nbytes: int

    def fits(self) -> bool:
        """Whether what was copied belongs to the present model and optimizers."""

    def reserve(self) -> None:
        """Make room for what there is now, so that the first ``write`` need not."""

    def write(self) -> None:
        """Copy the present values in. May return before that is done."""

    def settle(self) -> None:
        """Parameters are about to change: let that happen after the copy, if one is still under way."""

    def read(self) -> None:
        """Let the present values be what was copied."""


@dataclass
class _Copy:
    """One arena and the light state that goes with it.

    Attributes:
        step: committed steps when it was taken; None while it holds nothing whole.
        light: what each part exported, in order.
        taken_at: by the clock of the Copies.
    """

    arena: Arena
    step: int | None = None
    light: list[Any] = field(default_factory=list)
    taken_at: float = 0.0


class Copies:
    """The copies of one worker.

    Args:
        arenas: where they lie; there are as many copies at most.
        parts: the light state.
        every: steps between two copies; None if they are taken on request only.

    Attributes:
        seconds: how long the last copy has held up training; 0.0 before the first.
    """

    def __init__(
        self,
        arenas: Sequence[Arena],
        parts: Sequence[Part],
        every: int | None,
        mono: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seconds = 0.0
        self._copies = [_Copy(arena) for arena in arenas]
        self._parts = parts
        self._every = every
        self._mono = mono
        for arena in arenas:
            arena.reserve()

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps that this worker has a copy of which fits, the newest first."""
        usable = (copy.step for copy in self._copies if copy.step is not None and copy.arena.fits())
        return tuple(sorted(usable, reverse=True))

    @property
    def nbytes(self) -> int:
        return sum(copy.arena.nbytes for copy in self._copies)

    def age_s(self, step: int) -> float:
        """Seconds since a copy was taken."""
        return self._mono() - self._of(step).taken_at

    def committed(self, step: int) -> None:
        """A step was committed: take a copy if one is due."""
        if self._every is not None and step % self._every == 0:
            self.take(step)

    def take(self, step: int) -> None:
        """Copy the present state, in place of the oldest copy. Until that is done there is one copy less."""
        began = self._mono()
        copy = min(self._copies, key=lambda copy: -1 if copy.step is None else copy.step)
        for one in self._copies:
            if one.step == step and one is not copy:
                one.step = None  # what it holds is not what training goes on from
        copy.step = None
        copy.arena.write()
        copy.light = [part.export() for part in self._parts]
        copy.step, copy.taken_at = step, self._mono()
        self.seconds = copy.taken_at - began

    def settle(self) -> None:
        """Parameters are about to change."""
        for copy in self._copies:
            copy.arena.settle()

    def go_back(self, step: int) -> None:
        """Let the present state be that of a step in ``steps``."""
        copy = self._of(step)
        copy.arena.read()
        for part, value in zip(self._parts, copy.light, strict=True):
            part.adopt(value)

    def forget_after(self, step: int) -> None:
        """Training goes on from a step: copies of later ones are of a future that does not come."""
        for copy in self._copies:
            if copy.step is not None and copy.step > step:
                copy.step = None

    def _of(self, step: int) -> _Copy:
        return next(copy for copy in self._copies if copy.step == step)


class CanCopy(Protocol):
    """A training state whose parameters can be copied: a ``TorchState``."""

    def keep_copies(self, every: int | None) -> Copies:
        """From now on, take full copies. Raises ConfigurationError if it does so already."""


class StateCommitter:
    """How much a training state remembers at the commit that ends each ``with state.step()``.

    ``keep="replica"``, which is what a state does without a StateCommitter: the light state of every step only. That is
    enough for every failure that leaves a replica of the parameters, and costs microseconds.

    ``keep="copy"``: besides, a full copy of parameters and optimizer state every so many steps. The last two copies are
    kept, in memory that is set aside for them and used again. ``state.restore()``, called by one worker or by several,
    takes all of them back to the newest copy they have, and each enters its training function again, from the top. So
    does a policy that answers ``Restart()``. From host memory a copy is taken at once; from a GPU on a stream of its
    own, while training goes on.

    In scripts that commit themselves every ``state.commit()`` is a full copy already, and a StateCommitter changes
    nothing.

    Args:
        state: a state such as ``TorchState``.
        every: copies are taken after each step whose number it divides; None: only when the script calls
            ``state.save()`` between two steps, which all workers have to do at the same ones. ``replica`` remembers
            every step and takes 1 only.
        keep: ``replica`` or ``copy``.

    Raises:
        ConfigurationError: an argument is wrong, or the state takes copies already.
    """

    def __init__(self, state: CanCopy, every: int | None = 1, keep: Keep = "replica") -> None:
        if keep not in ("replica", "copy"):
            raise ConfigurationError(f"keep is {keep!r}; it must be 'replica' or 'copy'")
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ConfigurationError(f"every is {every!r}; it must be a whole number of steps, at least 1, or None")
        if keep == "replica" and every != 1:
            raise ConfigurationError(
                f"every is {every!r}, but without a copy of the parameters the light state has to be remembered in "
                "every step: they would not fit together. Use keep='copy', or leave every out"
            )
        self.every = every
        self.keep = keep
        self._copies = state.keep_copies(every) if keep == "copy" else None

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps that this worker can go back to, the newest first; empty for ``replica``."""
        return () if self._copies is None else self._copies.steps

    @property
    def nbytes(self) -> int:
        """Memory that is set aside for copies on this worker, in bytes."""
        return 0 if self._copies is None else self._copies.nbytes

    @property
    def seconds(self) -> float:
        """How long the last copy has held up training on this worker; 0.0 before the first."""
        return 0.0 if self._copies is None else self._copies.seconds
