"""Do workers come or go? Merged over all workers in the background, so that all hear of it at the same step.

The launcher tells whom it likes when it likes. So every worker asks all others, at the same place of its loop, and
looks at the answer one step later: nobody waits for it. What follows from a yes is not decided here.
"""

from __future__ import annotations

from horovod_ft.membership.base import Membership, Pending


class Changes:
    """The question, at most one at a time. Raises a failure type of the membership if the group breaks meanwhile."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._pending: Pending | None = None

    @property
    def asked(self) -> bool:
        """The question is open."""
        return self._pending is not None

    def ask(self) -> None:
        """Tell the others what this worker has heard. Returns at once."""
        self._pending = self._membership.comm.any_async(self._membership.changed())

    def heard(self) -> bool:
        """Whether any worker had heard of a change before it was asked last. Blocks until that is known."""
        pending, self._pending = self._pending, None
        return pending is not None and pending.result()

    def forget(self) -> None:
        """The group is no more, and its question with it."""
        self._pending = None
