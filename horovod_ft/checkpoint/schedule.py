"""When the next checkpoint is due: by steps, by seconds, or by cost and failure rate. Saves nothing.

Clocks differ between workers. So with seconds and ``auto`` one worker has to decide for all, or all have to save if any
of them says that it is due.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from horovod_ft.errors import ConfigurationError

#: A failure a day, until the run knows better.
PRIOR_MTBF_S = 86400.0
#: Seconds that a save holds up training, until one was measured.
PRIOR_COST_S = 1.0
#: Saves whose median counts: one that met a busy disk does not.
REMEMBERED = 5


def best_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Seconds of training between two saves that lose the least time to saves and to failures together.

    To first order it is ``sqrt(2 C M)``, with C the seconds that a save holds up training and M the mean time between
    failures (J. W. Young, *A first order approximation to the optimum checkpoint interval*, Communications of the ACM
    17(9), 1974). This is the higher-order form, which also holds when C is not small against M (J. T. Daly, *A higher
    order estimate of the optimum checkpoint interval for restart dumps*, Future Generation Computer Systems 22(3),
    2006): with ``x = sqrt(C / 2M)`` it is ``sqrt(2 C M) (1 + x/3 + x^2/9) - C`` for ``C < 2M``, else M.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    x = math.sqrt(cost_s / (2 * mtbf_s))
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + x / 3 + x * x / 9) - cost_s


def mtbf_s(observed_s: float, failures: int, prior_s: float = PRIOR_MTBF_S) -> float:
    """Mean time between failures, after so many failures in so many seconds.

    The prior counts as one failure in ``prior_s`` seconds that went before. So it is the inverse of the expected rate
    of a Poisson process whose rate has, before anything is observed, the exponential distribution with mean
    ``1 / prior_s``.
    """
    return (prior_s + observed_s) / (1 + failures)


class Every(NamedTuple):
    """What ``every=...`` means: one of the two is given, or neither for ``auto``."""

    steps: int | None = None
    seconds: float | None = None


def parse_every(every: str | float) -> Every:
    """``"auto"``, a whole number of steps, or a float of seconds.

    Raises:
        ConfigurationError: it is none of these.
    """
    if every == "auto":
        return Every()
    if isinstance(every, int) and not isinstance(every, bool) and every > 0:
        return Every(steps=every)
    if isinstance(every, float) and 0 < every < math.inf:
        return Every(seconds=every)
    raise ConfigurationError(
        f'every is {every!r}; it must be "auto", a whole number of steps such as 500, or seconds as a float such as '
        "600.0"
    )


@dataclass(frozen=True)
class History:
    """What a worker that joins takes over from another, so that its schedule is the same.

    Attributes:
        observed_s: seconds of the run so far.
        failures: seen in them.
        costs_s: of the last saves.
        saved_step: of the last save.
        since_s: seconds since it.
    """

    observed_s: float
    failures: int
    costs_s: tuple[float, ...]
    saved_step: int
    since_s: float


class Schedule:
    """Says when the next save is due.

    Args:
        every: ``"auto"``, a whole number of steps, or a float of seconds.
        step: at which the run starts, or was restored.
        now: a monotonic clock, in seconds. All other moments are of the same one.
        prior_mtbf_s: mean time between failures to begin with, for ``auto``.
        prior_cost_s: seconds that a save is expected to hold up training, until one was measured.

    Raises:
        ConfigurationError: an argument is wrong.
    """

    def __init__(
        self,
        every: str | float = "auto",
        *,
        step: int,
        now: float,
        prior_mtbf_s: float = PRIOR_MTBF_S,
        prior_cost_s: float = PRIOR_COST_S,
    ) -> None:
        self._every = parse_every(every)
        for name, value in (("prior_mtbf_s", prior_mtbf_s), ("prior_cost_s", prior_cost_s)):
            if not 0 < value < math.inf:
                raise ConfigurationError(f"{name} is {value!r}; it must be a positive number of seconds")
        self._prior_mtbf_s = prior_mtbf_s
        self._prior_cost_s = prior_cost_s
        self._began = now
        self._failures = 0
        self._costs: deque[float] = deque(maxlen=REMEMBERED)
        self._saved_step = step
        self._saved_at = now

    def due(self, step: int, now: float) -> bool:
        """Whether to save, with ``step`` steps committed. With steps: when a multiple of them was passed since the last
        save, so that a save that came late does not shift all others.
        """
        if step <= self._saved_step:
            return False
        if self._every.steps is not None:
            return step // self._every.steps > self._saved_step // self._every.steps
        return now - self._saved_at >= self.interval_s(now)

    def interval_s(self, now: float) -> float:
        """Seconds between saves as they are now; infinite if it goes by steps."""
        if self._every.steps is not None:
            return math.inf
        if self._every.seconds is not None:
            return self._every.seconds
        cost_s = median(self._costs) if self._costs else self._prior_cost_s
        return best_interval_s(cost_s, mtbf_s(now - self._began, self._failures, self._prior_mtbf_s))

    def saved(self, step: int, now: float, cost_s: float) -> None:
        """A save of that step has just let training go on, which it had held up for ``cost_s`` seconds."""
        self._costs.append(cost_s)
        self._saved_step, self._saved_at = step, now

    def restored(self, step: int, now: float) -> None:
        """Training goes on from the checkpoint of that step."""
        self._saved_step, self._saved_at = step, now

    def failed(self) -> None:
        """A failure was seen, whichever way it was recovered."""
        self._failures += 1

    def export(self, now: float) -> History:
        """For ``adopt`` on another worker, or in a later run."""
        return History(
            now - self._began, self._failures, tuple(self._costs), self._saved_step, now - self._saved_at
        )

    def adopt(self, history: History, now: float) -> None:
        """Go on where another one was; ``now`` is of this worker's clock."""
        self._began, self._failures = now - history.observed_s, history.failures
        self._costs = deque(history.costs_s, maxlen=REMEMBERED)
        self._saved_step, self._saved_at = history.saved_step, now - history.since_s

    def __repr__(self) -> str:
        return f"Schedule({self._every}, failures={self._failures}, saved_step={self._saved_step})"
