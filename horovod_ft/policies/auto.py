"""Take the cheapest way out, by what this run has measured."""

from __future__ import annotations

from dataclasses import dataclass

from horovod_ft.errors import PolicyError
from horovod_ft.policies.lossy_forward import LossyForward
from horovod_ft.policy import Decision, Failure, Forward, Policy, Replay, Restart


@dataclass(frozen=True)
class Auto(Policy):
    """Replay the mini-batch or carry it forward, whichever is expected to take less time.

    A replay costs a step's time on fewer workers, and loses nothing. Going forward costs the reduction of what is
    missing, and loses the share of those who are gone in that part; ``max_loss`` bounds it. On equal costs it replays.
    Where only going back to a copy helps, because the workers' replicas differ, it does that.

    Args:
        max_loss: largest part of an update that may be lost: the part of its elements that no survivor has, times the
            part of the workers' shares that are gone. Between 0 and 1.
        missing, rescale: as in ``LossyForward``.
        max_consecutive, at_most, within: as in ``LossyForward``.
    """

    max_loss: float = 0.25
    missing: str = "reduce_again"
    rescale: bool = True
    max_consecutive: int | None = 3
    at_most: int | None = None
    within: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.max_loss <= 1:
            raise PolicyError(f"max_loss is {self.max_loss!r}; it must be between 0 and 1")
        self._forward()

    def _forward(self) -> LossyForward:
        return LossyForward(self.missing, self.rescale, self.max_consecutive, self.at_most, self.within)

    @property
    def decisions(self) -> frozenset[type]:
        return self._forward().decisions | {Restart}

    def __call__(self, failure: Failure) -> Decision | None:
        if failure.diverged:
            return None if failure.checkpoint_step is None else Restart()
        answer = self._forward()(failure)
        forward_s = failure.costs.forward_s
        worth_it = forward_s is not None and forward_s < failure.costs.replay_s and loss(failure) <= self.max_loss
        return Replay() if isinstance(answer, Forward) and not worth_it else answer


def loss(failure: Failure) -> float:
    """The part of the update that going forward would lose, between 0 and 1."""
    if not failure.elements:
        return 0.0
    return (1 - failure.elements_done / failure.elements) * failure.shares_lost / failure.shares
