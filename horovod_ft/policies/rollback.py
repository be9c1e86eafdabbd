"""Immediate mini-batch rollback: discard the failed mini-batch on all workers and compute it again.

The idea is from *Towards Low-Overhead Resilience for Data Parallel Deep Learning* (Nicolae, Hobson, Yildiz, Peterka,
Morozov; CCGrid 2022). Here no copy of the weights is needed for it: the update runs locally after all its gradients
have arrived, so the parameters of every survivor are at a step boundary when a reduction fails.
"""

from __future__ import annotations

from dataclasses import dataclass

from horovod_ft.errors import PolicyError
from horovod_ft.policy import Abort, Decision, Failure, Replay


@dataclass(frozen=True)
class MiniBatchRollback:
    """Replay the mini-batch, unless it keeps failing.

    A replay that fails although no worker was lost has a cause that a replay cannot mend, such as workers that submit
    different tensors. Losing workers is different: that ends by itself, at the latest with the last of them.

    Args:
        max_consecutive: how many failures in a row, without a committed step between them, are replayed when no
            worker was lost. One more aborts the job. At least 1.
    """

    max_consecutive: int = 3

    def __post_init__(self) -> None:
        if self.max_consecutive < 1:
            raise PolicyError(f"max_consecutive is {self.max_consecutive}; it must be at least 1")

    def __call__(self, failure: Failure) -> Decision:
        if failure.lost or failure.consecutive <= self.max_consecutive:
            return Replay()
        return Abort(
            f"step {failure.step + 1} failed {failure.consecutive} times in a row although no worker was lost; "
            "the cause is in the step itself (see the first error in the log), and replaying it cannot mend that"
        )
