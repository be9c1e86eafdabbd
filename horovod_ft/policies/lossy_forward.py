"""Lossy forward recovery: the survivors finish the mini-batch without those who are gone.

The idea is from *Towards Low-Overhead Resilience for Data Parallel Deep Learning* (Nicolae, Hobson, Yildiz, Peterka,
Morozov; CCGrid 2022): a mini-batch gradient is an estimate anyway, and one over fewer samples is only a noisier one, so
it may be cheaper to go on than to compute again. Unlike there, the survivors agree on every gradient before they apply
it, so that replicas stay bitwise equal.
"""

from __future__ import annotations

from dataclasses import dataclass

from horovod_ft.policy import Budget, Decision, Failure, Forward, Policy, Replay


@dataclass(frozen=True)
class LossyForward(Policy):
    """Go forward with what the survivors have of the mini-batch; the training loop does not notice.

    A gradient that at least one survivor has in its reduced form is used as it is: nothing is lost of it. For all
    others, with weight ``w_i`` of worker i's samples (1 each without a tracked loader) and its local gradient ``g_i``:

    ==================  ==============================================  ===========================================
    ``missing``         the gradient, ``rescale=True``                  ``rescale=False``
    ==================  ==============================================  ===========================================
    ``reduce_again``    mean over the samples that are left:            those who are gone count as zero:
                        ``sum(w_i g_i) / sum(w_i)`` over survivors      ``sum(w_i g_i) / workers before``
    ``local``           ``g_j`` of the survivor j with the most         ``w_j g_j / workers before``
                        samples
    ``skip``            none: the parameter, its momentum and its weight decay stay as they are in this step
    ==================  ==============================================  ===========================================

    With ``op=hvd.Sum`` the same values are multiplied by the number of workers before the failure.

    Where there is nothing to carry forward (a survivor had finished the step already, a worker joins in the same
    moment, the failure came outside of ``optimizer.step()``; see ``Failure.closed``) it replays, which loses nothing.
    So it does under ``skip`` when no survivor has any reduced gradient.

    Args:
        missing: what becomes of a gradient that no survivor has: ``reduce_again``, ``local`` or ``skip``.
        rescale: see the table.
        max_consecutive: failures without a committed step between them; None for any number.
        at_most, within: go forward only if there were at most so many failures, this one included, in so many seconds.
    """

    missing: str = "reduce_again"
    rescale: bool = True
    max_consecutive: int | None = 3
    at_most: int | None = None
    within: float | None = None

    def __post_init__(self) -> None:
        self._budget()
        self._forward()

    def _forward(self) -> Forward:
        return Forward(self.missing, self.rescale)

    def _budget(self) -> Budget:
        return Budget(self.max_consecutive, self.at_most, self.within)

    @property
    def decisions(self) -> frozenset[type]:
        return frozenset({Replay, Forward})

    def __call__(self, failure: Failure) -> Decision | None:
        if self._budget().spent(failure):
            return None
        forward = self._forward()
        return Replay() if failure.closed or forward.leaves_nothing(failure) else forward
