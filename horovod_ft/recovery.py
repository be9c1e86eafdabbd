"""The engine: takes a training function to its end, through all failures that the policy recovers.

It knows neither the framework (it sees a Trainee) nor how a group is formed (it sees a Membership). The engine alone
catches Horovod's failure signals, each where it has a meaning of its own: this module when one leaves the training
function or comes at its end, ``step.py`` at a step's borders, ``regroup.py`` when one breaks a recovery. Nothing here
forms a group or asks the policy: see ``regroup.py`` and ``reconcile.py``. Adapters import the engine from here only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NoReturn, TypeVar

from horovod_ft.agreement import Resume
from horovod_ft.changes import Changes, Heard
from horovod_ft.checkpoint.options import Checkpoints
from horovod_ft.committer import Committer
from horovod_ft.errors import UsageError
from horovod_ft.events import EventBus
from horovod_ft.faults.inject import Injector
from horovod_ft.healing import heal_if_due
from horovod_ft.history import History
from horovod_ft.ledger import Ledger
from horovod_ft.membership.base import Membership
from horovod_ft.open_step import OpenStep
from horovod_ft.policies.checkpoint_restart import checkpoint_restart_in
from horovod_ft.policy import Forward, RecoveryPolicy, Restart, decisions_of
from horovod_ft.regroup import MAX_ATTEMPTS, Regrouping, Restarted
from horovod_ft.saving import Saving
from horovod_ft.step import StepContext, Steps
from horovod_ft.trainee import Trainee

log = logging.getLogger("horovod_ft")

T = TypeVar("T")


class HostsChanged(Exception):  # noqa: N818  a signal between an adapter and the engine, no error
    """Raised inside the training function, on all workers at once: form the group anew and enter it again."""


class Engine:
    """One training state under one policy. Not thread-safe: all calls come from the training thread.

    Args:
        attempt: how often the job was started before.
        timeout_s: bound of the waits for a checkpoint to be saved, when training ends.
    """

    def __init__(
        self,
        membership: Membership,
        trainee: Trainee,
        committer: Committer,
        bus: EventBus,
        injector: Injector,
        ledger: Ledger,
        mono: Callable[[], float] = time.monotonic,
        *,
        attempt: int = 0,
        timeout_s: float = 600.0,
    ) -> None:
        self.membership = membership
        self.committer = committer
        self.injector = injector
        self._trainee = trainee
        self._bus = bus
        history = History(mono)
        self._open = OpenStep(trainee, committer, ledger, bus, history)
        self._saving = Saving(membership, bus, injector, self._open, mono, timeout_s)
        self._changes = Changes(membership, self._saving.wishes)
        self._regrouping = Regrouping(
            membership, bus, injector, self._open, self._changes, history, self._saving, attempt
        )
        self._steps = Steps(membership, bus, injector, self._open, self._changes, self._regrouping, self._saving)

    # --- the training function -------------------------------------------------------------------------------------

    def run(self, policy: RecoveryPolicy, function: Callable[[], T], checkpoints: Checkpoints | None = None) -> T:
        """Run the training function to its end, through all failures that the policy recovers. Blocks until then.

        Args:
            checkpoints: where durable ones are saved, and restored from when the job begins.

        Raises:
            RecoveryError: the policy gave up, or no group can be formed; on every survivor.
            DivergenceError: the workers do not train the same thing.
            CheckpointError: there are checkpoints, and none can be used; or the state cannot be saved.
            ConfigurationError: the policy needs checkpoints, and there is no place for them.
            SystemExit: the job is about to be ended from outside; see ``Saving.committed``.
        """
        self.start(policy, checkpoints)
        try:
            while True:
                self.enter()
                try:
                    result = function()
                except self.membership.failure_types as error:
                    self._regrouping.recover(error, Resume.REENTER, "outside")
                    continue
                except HostsChanged:
                    self._regrouping.resize(Resume.REENTER)
                    continue
                except Restarted:
                    continue
                if self.finished():
                    return result
        finally:
            self.stop()

    # What ``run`` is made of, for an adapter whose training function is not its own to call.

    def start(self, policy: RecoveryPolicy, checkpoints: Checkpoints | None = None) -> None:
        """Bring the group to one state, from which training goes on. Blocks. ``stop`` has to follow.

        Raises:
            UsageError: it has been started already.
            All that ``run`` raises: it is stopped again.
        """
        if self._steps.running:
            raise UsageError("this state is already inside elastic.run")
        self._saving.start(checkpoints, checkpoint_restart_in(policy))
        self._steps.keeping = Forward in decisions_of(policy)
        self._steps.may_restart = Restart in decisions_of(policy)
        self._trainee.keep_gradients(self._steps.keeping)
        self.membership.watch()
        self._steps.running = True
        try:
            self._open.keep(self.membership.group)
            self._regrouping.start(policy)
        except BaseException:
            self.stop()
            raise
        self._bus.emit("started")

    def enter(self) -> None:
        """The training function is about to run, from its top."""
        self._trainee.reentering()
        self._open.begin_by_hand()

    def finished(self) -> bool:
        """Wait until every worker's training function has returned. Blocks.

        Returns:
            False if it has to run once more, as far as that is not done already.

        Raises:
            RecoveryError: as in ``run``.
        """
        while True:
            try:
                self._changes.heard()  # nobody joins any more
                self.membership.comm.allgather_object(None, "finish")
                if self.durable:
                    self._open.keep(self.membership.group)
                self._saving.last()
                break
            except self.membership.failure_types as error:
                if self._regrouping.recover(error, Resume.FINISHING, "outside").agreement.reenter:
                    return False
        self._bus.emit("finished")
        self._report_unfired()
        return True

    def stop(self) -> None:
        """Training is over, however it has ended."""
        self._steps.running = False
        self._saving.close()

    def _report_unfired(self) -> None:
        for fault in self.injector.waiting:
            self._bus.emit("warning", text=f"the fault plan's entry never fired: {fault}")
            log.warning("the fault plan's entry never fired: %s", fault)

    # --- scripts that commit themselves ----------------------------------------------------------------------------

    def commit_explicitly(self) -> None:
        """The commit of scripts that commit themselves: remember everything, and look for changes of the group.

        Blocks for one small collective.

        Raises:
            HostsChanged: workers come or go; on all workers at once.
        """
        self._open.commit(self.membership.group)
        heard = self._asked()
        if self._steps.running:
            heal_if_due(self.membership, self._trainee, self.committer, self._bus, also=Heard.SAVE in heard)
        self._open.begin_by_hand()
        if self._steps.running:
            self._saving.committed(heard)
        if Heard.CHANGED in heard:
            raise HostsChanged

    def check_for_changes(self) -> None:
        """Like ``commit_explicitly``, without the commit: if workers come or go, all go back to the last one."""
        if Heard.CHANGED in self._asked():
            raise HostsChanged

    def _asked(self) -> Heard:
        """What the workers have to say now. Blocks for one small collective."""
        if not self._steps.running:
            return Heard.NOTHING
        heard = self._changes.heard() & Heard.CHANGED  # a question that ``step`` has left open
        self._changes.ask(self.committer.frontier.step)
        return heard | self._changes.heard()

    # --- scripts that go by steps ----------------------------------------------------------------------------------

    @property
    def stepping(self) -> bool:
        """Training goes by ``step``; False while it goes by explicit commits, or has not begun."""
        return self._open.stepping

    def step(self) -> StepContext:
        """The context manager behind ``state.step()``."""
        return StepContext(self._steps)

    @property
    def durable(self) -> bool:
        """There is a store that checkpoints are saved in and restored from."""
        return self._saving.store is not None

    @property
    def inside_step(self) -> bool:
        return self._steps.inside

    def go_back(self) -> NoReturn:
        """See ``Steps.go_back``."""
        self._steps.go_back()

    # --- what the loader and the optimizer tell --------------------------------------------------------------------

    def begin(self) -> None:
        """See ``OpenStep.begin``."""
        self._open.begin()

    def admit_update(self) -> bool:
        """See ``OpenStep.admit_update``."""
        return self._open.admit_update()

    def update_applied(self) -> None:
        """See ``OpenStep.update_applied``."""
        self._open.update_applied(self.membership.group)

    def note(self, error: BaseException) -> None:
        """See ``Steps.note``."""
        self._steps.note(error)

    def broken_update(self, error: BaseException) -> bool:
        """See ``Steps.broken_update``."""
        return self._steps.broken_update(error)


__all__ = ["MAX_ATTEMPTS", "Engine", "HostsChanged", "Restarted", "StepContext"]
