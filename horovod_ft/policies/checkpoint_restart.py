"""Checkpoint-restart: go back to the last checkpoint, on all workers, and compute the steps since then again.

What most trainings do today, and the third of the ways out that are compared in *Towards Low-Overhead Resilience for
Data Parallel Deep Learning* (Nicolae, Hobson, Yildiz, Peterka, Morozov; CCGrid 2022). Here the workers that are left do
it in place: no process is started again, and the state comes from the newest copy there is, on disk or in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from horovod_ft.checkpoint.options import Checkpoints
from horovod_ft.checkpoint.schedule import PRIOR_MTBF_S, Schedule
from horovod_ft.policy import Budget, Decision, Escalation, Failure, Policy, RecoveryPolicy, Restart


@dataclass(frozen=True)
class CheckpointRestart(Policy):
    """Go back to the last checkpoint. Needs ``elastic.run(checkpoint=...)``.

    Args:
        every: when checkpoints are saved. ``"auto"``: as often as loses the least time to saves and failures together,
            from the measured cost of a save and the failures seen so far (Young, Daly: see
            ``checkpoint.schedule.best_interval_s``); a whole number: after each step that it divides; a float: seconds.
        max_consecutive: failures without a committed step between them that are answered so; None for any number.
        at_most, within: as in ``MiniBatchRollback``.
        prior_mtbf_s: seconds between failures that ``"auto"`` expects to begin with.

    Raises:
        ConfigurationError: an argument is wrong.
    """

    every: str | float = "auto"
    max_consecutive: int | None = None
    at_most: int | None = None
    within: float | None = None
    prior_mtbf_s: float = PRIOR_MTBF_S

    def __post_init__(self) -> None:
        self._budget()
        self.schedule(0, 0.0)

    def _budget(self) -> Budget:
        return Budget(self.max_consecutive, self.at_most, self.within)

    @property
    def decisions(self) -> frozenset[type]:
        return frozenset({Restart})

    def schedule(self, step: int, now: float) -> Schedule:
        """When to save, for a training that begins at a step."""
        return Schedule(self.every, step=step, now=now, prior_mtbf_s=self.prior_mtbf_s)

    def __call__(self, failure: Failure) -> Decision | None:
        return None if failure.checkpoint_step is None or self._budget().spent(failure) else Restart()


def checkpoint_restart_in(policy: RecoveryPolicy) -> CheckpointRestart | None:
    """The CheckpointRestart that a policy is, or escalates to."""
    parts = policy.policies if isinstance(policy, Escalation) else (policy,)
    return next((part for part in parts if isinstance(part, CheckpointRestart)), None)


def as_often_as(checkpoints: Checkpoints) -> CheckpointRestart:
    """One that saves when ``checkpoints`` says."""
    return CheckpointRestart("auto" if checkpoints.every is None else checkpoints.every)
