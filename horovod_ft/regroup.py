"""Form the next group and let it come to one state: at the start, after a failure, and when workers come or go.

Here alone a recovery that breaks is caught: all of it starts over with whoever is left, a bounded number of times. What
the workers agree on and what is done about it is ``reconcile.py``'s; where this worker goes on afterwards is its
caller's.
"""

from __future__ import annotations

import logging

from horovod_ft.agreement import Agreement, Resume
from horovod_ft.changes import Changes
from horovod_ft.errors import CheckpointError, DivergenceError, JobLostError, RecoveryError
from horovod_ft.events import EventBus
from horovod_ft.faults.inject import Injector
from horovod_ft.history import History
from horovod_ft.membership.base import Membership
from horovod_ft.open_step import OpenStep
from horovod_ft.policy import RecoveryPolicy, Restart
from horovod_ft.reconcile import Outcome, Reconciler
from horovod_ft.saving import Saving

log = logging.getLogger("horovod_ft")

#: Groups that may break one after the other while one recovery tries to form them.
MAX_ATTEMPTS = 20


class GoingBack(Exception):  # noqa: N818  a reason, no error
    """Why the group breaks up when a worker's script wants all to go back."""


class Restarted(BaseException):
    """The state is that of an earlier step: leave the training function, and enter it again from the top."""


class Regrouping:
    """One worker's way from one group to the next. Each method blocks until training can go on."""

    def __init__(
        self,
        membership: Membership,
        bus: EventBus,
        injector: Injector,
        open_step: OpenStep,
        changes: Changes,
        history: History,
        saving: Saving,
        attempt: int,
    ) -> None:
        self._membership = membership
        self._bus = bus
        self._injector = injector
        self._open = open_step
        self._changes = changes
        self._history = history
        self._reconciler = Reconciler(membership, bus, injector, open_step, history, saving, attempt)

    def start(self, policy: RecoveryPolicy) -> None:
        """A training function is about to run, in the group that stands already."""
        self._reconciler.policy = policy
        self._assemble(Resume.REENTER, "outside", failed=False, formed=True)
        self._history.resized()

    def recover(self, error: BaseException, resume: Resume, phase: str) -> Outcome:
        """The group broke: form the next one, agree, and bring everybody to the same step.

        Args:
            error: how that showed here.
            resume: where this worker goes on.
            phase: where it was, as in ``policy.Failure``.

        Raises:
            RecoveryError: the policy gave up, or no group can be formed; on every survivor.
            CheckpointError: there are durable checkpoints to go back to, and none of them can be used.
            DivergenceError: the workers do not train the same thing.
            Restarted: ``resume`` is IN_PLACE, and there is no going on in that place.
        """
        self._broken(error, during="training")
        done, asked = self._open.trainee.drain()
        self._bus.emit("drained", gradients_done=done, gradients_asked=asked)
        try:
            outcome = self._assemble(resume, phase, failed=True, formed=False)
        except (RecoveryError, CheckpointError) as fatal:
            self._bus.emit("aborted", reason=str(fatal))
            if isinstance(error, DivergenceError):
                raise error from fatal
            raise fatal from error
        self._history.recovered()
        return _in_place(outcome, resume)

    def go_back(self, phase: str) -> None:
        """The script wants all workers to go back to a copy: as in ``recover``, without asking the policy.

        Raises:
            Restarted: always, when that is done.
            RecoveryError: as in ``recover``; or there is no copy.
        """
        self._reconciler.back = True
        try:
            self.recover(GoingBack("this worker has called state.restore()"), Resume.IN_PLACE, phase)
        finally:
            self._reconciler.back = False

    def resize(self, resume: Resume) -> None:
        """Workers come or go, and nothing broke.

        Raises:
            RecoveryError, DivergenceError, Restarted: as in ``recover``.
        """
        self._bus.emit("resizing")
        self._changes.forget()
        outcome = self._assemble(resume, "outside", failed=False, formed=False)
        self._bus.emit("resized", newcomers=len(outcome.agreement.newcomers), lost=outcome.agreement.lost)
        self._history.resized()
        _in_place(outcome, resume)

    def _assemble(self, resume: Resume, phase: str, *, failed: bool, formed: bool) -> Outcome:
        """Form a group and bring its state together, as often as it takes.

        Args:
            resume, phase: as in ``recover``.
            failed: a failure is behind it, so the policy is asked.
            formed: the group stands already (at the start of a process).
        """
        began = self._history.mono()
        new = self._open.committer.fresh
        for _ in range(MAX_ATTEMPTS):
            try:
                if not formed:
                    self._reform()
                outcome = self._reconciler.reconcile(resume, phase, failed=failed)
                kind = _kind(outcome.agreement, new=new, failed=failed)
                self._bus.emit(kind, duration_s=self._history.mono() - began)
                return outcome
            except self._membership.failure_types as error:
                self._broken(error, during="recovery")
                failed, formed = True, False
        raise JobLostError(f"{MAX_ATTEMPTS} groups in a row broke before training could go on in one of them")

    def _reform(self) -> None:
        began = self._history.mono()
        self._injector.at("reform", self._open.number_for_faults)
        group = self._membership.reform()
        self._bus.position.rank, self._bus.position.size = group.rank, group.size
        self._bus.emit("reformed", duration_s=self._history.mono() - began)

    def _broken(self, error: BaseException, during: str) -> None:
        """Put it on record, and let it reach the others now."""
        self._bus.emit(
            "failure_detected", error=str(error), during=during, since_last_commit_s=self._history.broke()
        )
        told = str(error).split(". ", 1)[0]  # Horovod goes on with causes that are none of these
        log.warning("horovod_ft: the group broke during %s: %s", during, told)
        began = self._history.mono()
        sockets = self._membership.abort()
        self._changes.forget()
        self._open.noted = None
        self._bus.emit("sockets_cut", sockets=sockets, duration_s=self._history.mono() - began)


def _in_place(outcome: Outcome, resume: Resume) -> Outcome:
    """The outcome, if whoever is inside its training function can go on there."""
    if isinstance(outcome.decision, Restart) and resume is Resume.IN_PLACE:
        raise Restarted
    return outcome


def _kind(agreement: Agreement, *, new: bool, failed: bool) -> str:
    if agreement.start:
        return "formed"
    if new:
        return "joined"
    return "recovered" if failed else "regrouped"
