"""How often a job may be started again, and how long to wait before. It starts nothing, and it is given its clock."""

from __future__ import annotations

from collections.abc import Callable


class Budget:
    """Restarts within a span of time, with pauses that double. When it is spent, the job is given up.

    Args:
        restarts: at most so many within any ``within_s`` seconds.
        within_s: in seconds; restarts longer ago are forgotten, by the budget and by the pauses.
        pause_s: before the first restart, in seconds.
        longest_pause_s: bound of the pauses.
        mono: the clock, in seconds.
    """

    def __init__(
        self, restarts: int, *, within_s: float, pause_s: float, longest_pause_s: float, mono: Callable[[], float]
    ) -> None:
        self.restarts = restarts
        self.within_s = within_s
        self._pause_s = pause_s
        self._longest_pause_s = longest_pause_s
        self._mono = mono
        self._taken: list[float] = []

    @property
    def used(self) -> int:
        """Restarts that still count."""
        now = self._mono()
        return sum(now - moment < self.within_s for moment in self._taken)

    def take(self) -> float | None:
        """Use up one restart. Returns the seconds to wait before it; None if there is none left."""
        used = self.used
        if used >= self.restarts:
            return None
        self._taken.append(self._mono())
        return min(self._pause_s * 2.0 ** min(used, 64), self._longest_pause_s)  # a float has its bounds
