"""Do workers come or go, is a checkpoint due? Merged over all workers in the background, so that all hear of it at the
same step.

The launcher tells whom it likes when it likes, and clocks differ. So every worker asks all others, at the same place of
its loop, and looks at the answer one step later: nobody waits for it. What follows from a yes is not decided here.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntFlag

from horovod_ft.membership.base import Membership, Pending


class Heard(IntFlag):
    """What at least one worker has said.

    ``CHANGED``: workers come or go. ``SAVE``: a checkpoint of the step is due. ``BUSY``: one is still being written.
    ``END``: training has to end after the step. ``FAILED``: its part of an earlier checkpoint could not be written.
    """

    NOTHING = 0
    CHANGED = 1
    SAVE = 2
    BUSY = 4
    END = 8
    FAILED = 16


class Changes:
    """The question, at most one at a time. Raises a failure type of the membership if the group breaks meanwhile.

    Args:
        wishes: what else this worker has to say, about the step with this number.
    """

    def __init__(self, membership: Membership, wishes: Callable[[int], Heard]) -> None:
        self._membership = membership
        self._wishes = wishes
        self._pending: Pending | None = None

    @property
    def asked(self) -> bool:
        """The question is open."""
        return self._pending is not None

    def ask(self, step: int) -> None:
        """Tell the others what this worker has to say about a step. Returns at once."""
        changed = Heard.CHANGED if self._membership.changed() else Heard.NOTHING
        self._pending = self._membership.comm.any_async(int(changed | self._wishes(step)))

    def heard(self) -> Heard:
        """What the workers had to say when they were asked last. Blocks until that is known."""
        pending, self._pending = self._pending, None
        return Heard.NOTHING if pending is None else Heard(pending.result())

    def forget(self) -> None:
        """The group is no more, and its question with it."""
        self._pending = None
