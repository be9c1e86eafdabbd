"""Do all workers still have the same replica? Who differs is found by majority. No framework, no collectives.

Replicas drift apart by silent corruption (a flipped bit in memory, a faulty core), or by a script that updates
parameters from something that is not the same everywhere. Training goes on as if nothing had happened, so somebody has
to look.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from horovod_ft.errors import ConfigurationError


@dataclass(frozen=True)
class ReplicaGuard:
    """Compare parameters and optimizer state over all workers, and heal who differs. Give it to the state.

    Every so many steps each worker sums up the bits of its replica, and the sums are compared: one pass over the memory
    and one small collective. A single flipped bit is always seen, several with near certainty; elements that changed
    places are not. A worker that differs receives parameters and optimizer state from the majority. Without a majority,
    those count that hold finite numbers only; if that does not settle it, training ends with DivergenceError.

    Args:
        every: steps between two looks; what goes wrong is found within so many steps.

    Raises:
        ConfigurationError: ``every`` is no positive whole number.
    """

    every: int = 100

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ConfigurationError(f"every is {self.every!r}; it must be a whole number of steps, at least 1")


@dataclass(frozen=True)
class Verdict:
    """Which ranks have the replica that counts, and which have another one."""

    healthy: tuple[int, ...]
    differing: tuple[int, ...]


def judge(digests: Sequence[int], finite: Sequence[bool] | None = None) -> Verdict | None:
    """Who differs from the majority.

    Args:
        digests: of the replicas, by rank.
        finite: whether each replica holds finite numbers only; if given, those that do not have no vote.

    Returns:
        None if there is no majority among those who have a vote.
    """
    voters = [rank for rank in range(len(digests)) if finite is None or finite[rank]]
    parties: dict[int, list[int]] = defaultdict(list)
    for rank in voters:
        parties[digests[rank]].append(rank)
    largest = max(parties.values(), key=len, default=[])
    if 2 * len(largest) <= len(voters):
        return None
    return Verdict(tuple(largest), tuple(rank for rank in range(len(digests)) if rank not in largest))
