"""``with state.step():`` one training step as a transaction: committed when its body is left in order, else recovered.

It finds out whether the group's failure is why the body ended, and catches that failure where the step itself meets it,
on its way in and while it commits. What is done about it then is ``regroup.py``'s: nothing here forms a group or asks
the policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import NoReturn

from horovod_ft.agreement import DIVERGED, Resume
from horovod_ft.changes import Changes, Heard
from horovod_ft.errors import DivergenceError, UsageError
from horovod_ft.events import EventBus
from horovod_ft.faults.inject import Injector
from horovod_ft.healing import heal_if_due
from horovod_ft.membership.base import Membership
from horovod_ft.open_step import OpenStep
from horovod_ft.policy import Forward
from horovod_ft.regroup import Regrouping, Restarted
from horovod_ft.saving import Saving


class Steps:
    """The steps of one training state, one after the other.

    Attributes:
        running: the training function runs; there is no step outside of it.
        keeping: a failure in the backward pass is kept until the update, because the policy may go forward from there.
        may_restart: the policy may go back to a copy, which mends replicas that differ.
        inside: a step's body is running.
    """

    def __init__(
        self,
        membership: Membership,
        bus: EventBus,
        injector: Injector,
        open_step: OpenStep,
        changes: Changes,
        regrouping: Regrouping,
        saving: Saving,
    ) -> None:
        self.running = False
        self.keeping = False
        self.may_restart = False
        self.inside = False
        self._membership = membership
        self._bus = bus
        self._injector = injector
        self._open = open_step
        self._trainee = open_step.trainee
        self._committer = open_step.committer
        self._changes = changes
        self._regrouping = regrouping
        self._saving = saving
        #: Its failure has been recovered inside, by a replay or by giving up, and its body is on its way out.
        self._leaving = False
        #: Why the body cannot simply be left: what it was recovered with did not end in this step.
        self._fatal: BaseException | None = None

    # --- the borders -----------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Open a step.

        Raises:
            UsageError: outside ``elastic.run``, or inside another step.
        """
        if not self.running:
            raise UsageError(
                "state.step() was used outside elastic.run: call it inside a function that is decorated with "
                "@hvd.elastic.run and was called with this state"
            )
        if self.inside:
            raise UsageError("state.step() was used inside another state.step()")
        if not self._open.stepping:
            self._trainee.stepping()
            self._open.stepping = True
            self._committer.open = False
        self._open.begin()
        if not self._changes.asked:
            try:
                self._changes.ask(self._open.number)
            except self._membership.failure_types as error:
                self.note(error)
        self.inside = True

    def leave(self, error: BaseException | None) -> bool:
        """Close a step: commit, or recover. Returns whether the body's exception has been dealt with."""
        self.inside = False
        if self._leaving:
            return self._left(error)
        failure = self._failure_behind(error)
        if failure is not None:
            self._regrouping.recover(failure, Resume.IN_PLACE, "step")
            return True
        if error is not None:
            return False
        if not self._trainee.accumulating():
            self._commit()
        return False

    def _commit(self) -> None:
        try:
            self._injector.at("commit", self._open.number)
            self._open.commit(self._membership.group)
            heard = self._changes.heard()
            heal_if_due(self._membership, self._trainee, self._committer, self._bus, also=Heard.SAVE in heard)
            self._saving.committed(heard)
            if Heard.CHANGED not in heard:
                self._changes.ask(self._open.number)  # and look at the answer when the next step ends: nobody waits
        except self._membership.failure_types as error:
            self._regrouping.recover(error, Resume.IN_PLACE, "commit")
            return
        except DivergenceError as error:
            if not self.may_restart:
                raise
            self._regrouping.recover(error, Resume.IN_PLACE, DIVERGED)
            return
        if Heard.CHANGED in heard:
            self._regrouping.resize(Resume.IN_PLACE)

    # --- a failure inside ------------------------------------------------------------------------------------------

    def note(self, error: BaseException) -> None:
        """The group broke inside the step. Kept, in case the user's code catches the exception."""
        if self._open.noted is None:
            self._open.noted = error
            if self.keeping:  # it may take a while until this worker comes to its update; the others wait for it
                self._membership.abort()

    def broken_update(self, error: BaseException) -> bool:
        """The gradients of an update cannot be waited for any longer, because the group broke. Recovers it. Blocks.

        Returns:
            True if the reduced gradients are there now, and the update is to be applied. False if the failure is to be
            raised: either nothing has been done about it yet, or the step is to be computed anew.

        Raises:
            RecoveryError, Restarted: see ``Regrouping.recover``.
        """
        if not (self.inside and self._open.stepping and self.keeping) or self._leaving:
            return False
        try:
            outcome = self._regrouping.recover(error, Resume.IN_PLACE, "update")
        except BaseException as up:
            self._lead_out(error, up)
            raise
        if isinstance(outcome.decision, Forward):
            return True
        self._lead_out(error, None)
        return False

    def go_back(self) -> NoReturn:
        """Take all workers back to a copy of the state. Blocks.

        Raises:
            Restarted: that is done.
            RecoveryError: see ``Regrouping.go_back``.
            UsageError: outside ``elastic.run``.
        """
        if not self.running:
            raise UsageError("state.restore() takes all workers back, and there are none outside elastic.run")
        if self._fatal is not None and not isinstance(self._fatal, Restarted):
            raise self._fatal  # training has ended, and the body does not know yet
        try:
            self._regrouping.go_back("step" if self.inside else "outside")
        except BaseException as up:
            if self.inside:
                self._lead_out(up, up)
            raise
        raise AssertionError("unreachable")

    def _lead_out(self, error: BaseException, up: BaseException | None) -> None:
        """The body of the step has to end. Unless training does: what it still does on its way out will be undone.

        Args:
            error: what gradients and updates raise from now on.
            up: what goes on up when the body is left, whatever it makes of it; None if the loop goes on.
        """
        self._leaving = True
        self._fatal = up
        if up is None or isinstance(up, Restarted):
            self._committer.begin()
            self._trainee.refuse(error)

    def _left(self, error: BaseException | None) -> bool:
        """The body of a step is left whose failure ``broken_update`` has dealt with."""
        self._leaving = False
        fatal, self._fatal = self._fatal, None
        if fatal is not None and not isinstance(fatal, Restarted):  # it could not be recovered
            if error is None or isinstance(error, self._membership.failure_types):
                raise fatal
            return False
        self._trainee.discard()
        self._committer.rollback()
        if isinstance(fatal, Restarted):
            if error is None or isinstance(error, Exception):  # nor can the body change that the state is another
                raise fatal
            return False
        return error is None or self._failure_behind(error) is not None

    def _failure_behind(self, error: BaseException | None) -> BaseException | None:
        """The group's failure, if that is why the body ended: raised, wrapped by the user's code, or swallowed."""
        if error is None or isinstance(error, self._membership.failure_types):
            return error or self._open.noted
        if not isinstance(error, Exception):  # the user wants to leave: sys.exit(), Ctrl-C
            return None
        return next((seen for seen in _behind(error) if isinstance(seen, self._membership.failure_types)), None)


def _behind(error: BaseException) -> Iterator[BaseException]:
    """An exception and all those that it was raised from, or while they were handled."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting += [one.__cause__, one.__context__]


class StepContext:
    """What ``state.step()`` returns."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def __enter__(self) -> None:
        self._steps.enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self._steps.leave(error)
