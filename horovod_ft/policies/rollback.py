"""Immediate mini-batch rollback: discard the failed mini-batch on all workers and compute it again.

The idea is from *Towards Low-Overhead Resilience for Data Parallel Deep Learning* (Nicolae, Hobson, Yildiz, Peterka,
Morozov; CCGrid 2022). Here no copy of the weights is needed for it: the update runs locally after all its gradients
have arrived, so the parameters of every survivor are at a step boundary when a reduction fails.
"""

from __future__ import annotations

from dataclasses import dataclass

from horovod_ft.policy import Budget, Decision, Failure, Policy, Replay


@dataclass(frozen=True)
class MiniBatchRollback(Policy):
    """Replay the mini-batch, unless it keeps failing.

    A replay that fails although no worker was lost has a cause that a replay cannot mend, such as workers that submit
    different tensors. Losing workers is different: that ends by itself, at the latest with the last of them.

    Args:
        max_consecutive: how many failures in a row, without a committed step between them, are replayed when no
            worker was lost. At least 1.
        at_most, within: replay only if there were at most so many failures, this one included, in so many seconds;
            default: any number.
    """

    max_consecutive: int = 3
    at_most: int | None = None
    within: float | None = None

    def __post_init__(self) -> None:
        Budget(self.max_consecutive, self.at_most, self.within)

    @property
    def decisions(self) -> frozenset[type]:
        return frozenset({Replay})

    def __call__(self, failure: Failure) -> Decision | None:
        budget = Budget(None if failure.lost else self.max_consecutive, self.at_most, self.within)
        return None if budget.spent(failure) else Replay()
