"""What one worker remembers of the run: failures since its last commit, when earlier ones were, how long a step takes.

It knows no other worker, and draws no conclusions: what the group makes of it is agreed on in ``agreement.py``.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable

#: Steps over which the time of one is taken.
STEPS_TIMED = 21
#: Failures whose moments are kept; budgets of policies count over them.
FAILURES_KEPT = 1000


class History:
    """Failures and commits of this worker, in order as they are told.

    Attributes:
        mono: the clock, in seconds.
        consecutive: failures since the last commit.
        restarts: how often training has gone back to a copy without getting further than before.
    """

    def __init__(self, mono: Callable[[], float]) -> None:
        self.mono = mono
        self.consecutive = 0
        self.restarts = 0
        self._furthest = 0
        self._last_commit = mono()
        self._decided_at: deque[float] = deque(maxlen=FAILURES_KEPT)
        self._step_s: deque[float] = deque(maxlen=STEPS_TIMED)
        self._resuming = False

    def broke(self) -> float:
        """The group broke. Returns seconds since the last commit."""
        self.consecutive += 1
        return self.mono() - self._last_commit

    def decided(self) -> None:
        """The policy has decided on a failure; from now on it is an earlier one."""
        self._decided_at.append(self.mono())

    def recovered(self) -> None:
        """Training goes on after a failure; the next commit ends the gap."""
        self._resuming = True

    def resized(self) -> None:
        """A training begins, or workers came or went and nothing broke: the time that took belongs to no step."""
        self._last_commit = self.mono()

    def went_back(self, step: int) -> None:
        """Training goes back to a copy, from a step."""
        self.restarts += 1
        self._furthest = max(self._furthest, step)

    def committed(self, step: int) -> float | None:
        """A step is final. Returns seconds since the commit before it if a recovery lies between, else None."""
        now = self.mono()
        took = now - self._last_commit
        gap = took if self._resuming else None
        if gap is None:
            self._step_s.append(took)
        self._resuming = False
        self._last_commit = now
        self.consecutive = 0
        if step > self._furthest:
            self.restarts = 0
        return gap

    def ages_s(self) -> tuple[float, ...]:
        """Seconds since each earlier failure that was decided on, newest first."""
        return tuple(self.mono() - moment for moment in reversed(self._decided_at))

    def step_s(self) -> float:
        """How long a step takes; 0.0 if not known yet."""
        return statistics.median(self._step_s) if self._step_s else 0.0
