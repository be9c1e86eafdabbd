"""The engine: the only place that catches Horovod's failure signals, asks the policy, and carries its decision out.

It knows neither the framework (it sees a Trainee) nor how a group is formed (it sees a Membership). Every collective of
a recovery is called from here, in the same order by every worker: reform, agreement, decision, transfer. If the group
breaks again on the way, all of it starts over with whoever is left.
"""

from __future__ import annotations

import hashlib
import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from types import TracebackType
from typing import TypeVar

from horovod_ft.agreement import Agreement, Resume, Standing, agree, failure_of, same_everywhere
from horovod_ft.committer import Committer
from horovod_ft.errors import PolicyError, RecoveryError, UsageError
from horovod_ft.events import EventBus
from horovod_ft.faults.inject import Injector
from horovod_ft.healing import heal
from horovod_ft.ledger import Ledger
from horovod_ft.losses import Losses
from horovod_ft.membership.base import Group, Membership, Pending
from horovod_ft.policy import Abort, Decision, Failure, Forward, RecoveryPolicy, Replay, decide, decisions_of
from horovod_ft.trainee import Trainee
from horovod_ft.transfer import transfer

log = logging.getLogger("horovod_ft")

T = TypeVar("T")

#: Groups that may break one after the other while one recovery tries to form them.
MAX_ATTEMPTS = 20
#: Steps over which the time of one is taken.
STEPS_TIMED = 21


class HostsChanged(Exception):  # noqa: N818  a signal between an adapter and the engine, no error
    """Raised inside the training function, on all workers at once: form the group anew and enter it again."""


class Engine:
    """One training state under one policy. Not thread-safe: all calls come from the training thread."""

    def __init__(
        self,
        membership: Membership,
        trainee: Trainee,
        committer: Committer,
        bus: EventBus,
        injector: Injector,
        ledger: Ledger,
        mono: Callable[[], float] = time.monotonic,
    ) -> None:
        self.membership = membership
        self.committer = committer
        self.injector = injector
        self.running = False
        self._trainee = trainee
        self._bus = bus
        self._ledger = ledger
        self._mono = mono
        #: Training goes by ``step``; False while it goes by explicit commits, or has not begun.
        self.stepping = False
        self._agreed: Group | None = None
        self._shared_by = Group(0, 1, -1)
        self._policy: RecoveryPolicy | None = None
        self._pending: Pending | None = None
        self._noted: BaseException | None = None
        self._inside = False
        self._failures = 0
        self._failed_at: deque[float] = deque(maxlen=1000)
        self._last_commit = mono()
        self._step_s: deque[float] = deque(maxlen=STEPS_TIMED)
        self._resuming = False
        self._phase = "outside"
        #: A failure in the backward pass is kept until the update, because the policy may go forward from there.
        self._keeping = False
        #: What was decided after the last failure.
        self._decision: Decision | None = None
        #: Inside a step: its failure has been recovered, by a replay or by giving up, and its body is on its way out.
        self._leaving = False
        #: Why ``broken_update`` could not recover the step.
        self._fatal: BaseException | None = None
        self._losses = Losses(ledger, trainee)

    # --- the training function -------------------------------------------------------------------------------------

    def run(self, policy: RecoveryPolicy, function: Callable[[], T]) -> T:
        """Run the training function to its end, through all failures that the policy recovers. Blocks until then.

        Raises:
            RecoveryError: the policy gave up, or no group can be formed; on every survivor.
            DivergenceError: the workers do not train the same thing.
        """
        if self.running:
            raise UsageError("this state is already inside elastic.run")
        self._policy = policy
        self._phase = "outside"
        self._keeping = Forward in decisions_of(policy)
        self._trainee.keep_gradients(self._keeping)
        self.membership.watch()
        self.running = True
        self._keep_open_work()
        try:
            self._assemble(Resume.REENTER, failed=False, formed=True)
            self._bus.emit("started")
            while True:
                self._trainee.reentering()
                if not self.stepping:
                    self.committer.begin()
                try:
                    result = function()
                except self.membership.failure_types as error:
                    self.recover(error, Resume.REENTER, "outside")
                    continue
                except HostsChanged:
                    self._resize(Resume.REENTER)
                    continue
                if self._all_finished():
                    self._bus.emit("finished")
                    self._report_unfired()
                    return result
        finally:
            self.running = False

    def _all_finished(self) -> bool:
        """Wait until every worker's training function has returned; False if it has to run once more."""
        while True:
            try:
                self._changed()  # nobody joins any more
                self.membership.comm.allgather_object(None, "finish")
                return True
            except self.membership.failure_types as error:
                if self.recover(error, Resume.FINISHING, "outside").reenter:
                    return False

    def _report_unfired(self) -> None:
        for fault in self.injector.waiting:
            self._bus.emit("warning", text=f"the fault plan's entry never fired: {fault}")
            log.warning("the fault plan's entry never fired: %s", fault)

    # --- one step --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A batch is about to be taken: what changes from now on belongs to the step."""
        if self.stepping:
            self.committer.begin()

    def admit_update(self) -> bool:
        """Whether the optimizer may apply its update now; see ``Committer.admit_update``."""
        return not self.stepping or self.committer.admit_update()

    def update_applied(self) -> None:
        """The optimizer has applied an update that was admitted."""
        if self.stepping:
            self.committer.update_applied(self.membership.group.generation)
            self._losses.update_applied(self.committer.frontier.step + 1)

    def note(self, error: BaseException) -> None:
        """The group broke inside the step. Kept, in case the user's code catches the exception."""
        if self._noted is None:
            self._noted = error
            if self._keeping:  # it may take a while until this worker comes to its update; the others wait for it
                self.membership.abort()

    def broken_update(self, error: BaseException) -> bool:
        """The gradients of an update cannot be waited for any longer, because the group broke. Recovers it. Blocks.

        Returns:
            True if the reduced gradients are there now, and the update is to be applied. False if the failure is to be
            raised: either nothing has been done about it yet, or the step is to be computed anew.

        Raises:
            RecoveryError: see ``run``.
        """
        if not (self._inside and self.stepping and self._keeping) or self._leaving:
            return False
        try:
            self.recover(error, Resume.IN_PLACE, "update")
        except BaseException as fatal:
            self._leaving = True
            self._fatal = fatal
            raise
        if isinstance(self._decision, Forward):
            return True
        self._leaving = True
        self.committer.begin()  # what the body does from now on, on its way out, will be undone
        self._trainee.refuse(error)
        return False

    def step(self) -> StepContext:
        """The context manager behind ``state.step()``."""
        return StepContext(self)

    def enter_step(self) -> None:
        """Open a step.

        Raises:
            UsageError: outside ``elastic.run``, or inside another step.
        """
        if not self.running:
            raise UsageError(
                "state.step() was used outside elastic.run: call it inside a function that is decorated with "
                "@hvd.elastic.run and was called with this state"
            )
        if self._inside:
            raise UsageError("state.step() was used inside another state.step()")
        self._inside = True
        if not self.stepping:
            self.stepping = True
            self._trainee.stepping()
            self.committer.open = False
        self.begin()
        if self._pending is None:
            try:
                self._ask_for_changes()
            except self.membership.failure_types as error:
                self.note(error)

    def leave_step(self, error: BaseException | None) -> bool:
        """Close a step: commit, or recover. Returns whether the body's exception has been dealt with."""
        self._inside = False
        if self._leaving:
            return self._left(error)
        failure = self._failure_behind(error)
        if failure is not None:
            self.recover(failure, Resume.IN_PLACE, "step")
            return True
        if error is not None:
            return False
        if not self._trainee.accumulating():
            self._commit_step()
        return False

    def _left(self, error: BaseException | None) -> bool:
        """The body of a step is left whose failure ``broken_update`` has dealt with."""
        self._leaving = False
        fatal, self._fatal = self._fatal, None
        if fatal is not None:  # it could not be recovered, and the body cannot change that
            if error is None or isinstance(error, self.membership.failure_types):
                raise fatal
            return False
        self._trainee.discard()
        self.committer.rollback()
        return error is None or self._failure_behind(error) is not None

    def _failure_behind(self, error: BaseException | None) -> BaseException | None:
        """The group's failure, if that is why the body ended: raised, wrapped by the user's code, or swallowed."""
        if error is None or isinstance(error, self.membership.failure_types):
            return error or self._noted
        if not isinstance(error, Exception):  # the user wants to leave: sys.exit(), Ctrl-C
            return None
        return next((seen for seen in _behind(error) if isinstance(seen, self.membership.failure_types)), None)

    def _commit_step(self) -> None:
        try:
            self.injector.at("commit", self.committer.frontier.step + 1)
            self.commit()
            self._compare_replicas()
            changed = self._changed()
            if not changed:
                self._ask_for_changes()  # and look at the answer when the next step ends: nobody waits for it
        except self.membership.failure_types as error:
            self.recover(error, Resume.IN_PLACE, "commit")
            return
        if changed:
            self._resize(Resume.IN_PLACE)

    def _ask_for_changes(self) -> None:
        self._pending = self.membership.comm.any_async(self.membership.changed())

    def _changed(self) -> bool:
        """Whether any worker heard of a change before it was asked last. Blocks until that is known."""
        pending, self._pending = self._pending, None
        return pending is not None and pending.result()

    def commit(self) -> None:
        """Make the open step final. Never blocks."""
        computed_by = self.committer.computed_by
        generation = self.membership.group.generation if computed_by is None else computed_by
        self._ledger.committed(self.committer.frontier.step + 1, generation)
        self.committer.commit()
        self._shared_by = self.membership.group
        self._losses.step_ended()
        now = self._mono()
        self._bus.position.step = self.committer.frontier.step
        if self._resuming:
            self._resuming = False
            self._bus.emit("resumed", gap_s=now - self._last_commit)
        else:
            self._step_s.append(now - self._last_commit)
        self._last_commit = now
        self._failures = 0

    def _compare_replicas(self) -> None:
        """If the guard is due, find out who has another replica than the others, and give it theirs. Blocks then."""
        guard = self._trainee.guard()
        if guard is not None and self.committer.frontier.step % guard.every == 0:
            heal(self.membership, self._trainee, self.committer, self._bus)

    def commit_explicitly(self) -> None:
        """The commit of scripts that commit themselves: remember everything, and look for changes of the group.

        Blocks for one small collective.

        Raises:
            HostsChanged: workers come or go; on all workers at once.
        """
        self.commit()
        if self.running:
            self._compare_replicas()
        if not self.stepping:
            self.committer.begin()
        self.check_for_changes()

    def check_for_changes(self) -> None:
        """Like ``commit_explicitly``, without the commit: if workers come or go, all go back to the last one."""
        if not self.running:
            return
        heard = self._changed()  # a question that ``step`` has left open
        self._ask_for_changes()
        if self._changed() or heard:
            raise HostsChanged

    def _keep_open_work(self) -> None:
        """Of a run that has ended: the next one goes on with it, not with the last explicit commit."""
        if not self.committer.open or self.stepping:
            return
        if self._trainee.open_ranges():
            self.commit()  # with its samples it is a step
        else:
            self.committer.save()

    # --- when the group changes ------------------------------------------------------------------------------------

    def recover(self, error: BaseException, resume: Resume, phase: str) -> Agreement:
        """The group broke: form the next one, agree, and bring everybody to the same step. Blocks until done.

        Args:
            error: how that showed here.
            resume: where this worker goes on.
            phase: where it was, as in ``policy.Failure``.

        Raises:
            RecoveryError: see ``run``.
        """
        self._phase = phase
        self._broken(error, during="training")
        done, asked = self._trainee.drain()
        self._bus.emit("drained", gradients_done=done, gradients_asked=asked)
        try:
            agreement = self._assemble(resume, failed=True, formed=False)
        except RecoveryError as fatal:
            self._bus.emit("aborted", reason=str(fatal))
            raise fatal from error
        self._resuming = True
        return agreement

    def _broken(self, error: BaseException, during: str) -> None:
        self._failures += 1
        since = self._mono() - self._last_commit
        self._bus.emit("failure_detected", error=str(error), during=during, since_last_commit_s=since)
        log.warning("horovod_ft: the group broke during %s: %s", during, error)
        began = self._mono()
        sockets = self.membership.abort()
        self._pending = self._noted = None
        self._bus.emit("sockets_cut", sockets=sockets, duration_s=self._mono() - began)

    def _resize(self, resume: Resume) -> Agreement:
        """Workers come or go, and nothing broke."""
        self._bus.emit("resizing")
        self._pending = None
        self._phase = "outside"
        agreement = self._assemble(resume, failed=False, formed=False)
        self._bus.emit("resized", newcomers=len(agreement.newcomers), lost=agreement.lost)
        self._last_commit = self._mono()
        return agreement

    def _assemble(self, resume: Resume, *, failed: bool, formed: bool) -> Agreement:
        """Form a group and bring its state together, as often as it takes.

        Args:
            resume: where this worker goes on.
            failed: a failure is behind it, so the policy is asked.
            formed: the group stands already (at the start of a process).
        """
        began = self._mono()
        new = self.committer.fresh
        for _ in range(MAX_ATTEMPTS):
            try:
                if not formed:
                    self._reform()
                agreement = self._agree_and_transfer(resume, failed=failed)
                self._bus.emit(_kind(agreement, new=new, failed=failed), duration_s=self._mono() - began)
                return agreement
            except self.membership.failure_types as error:
                self._broken(error, during="recovery")
                failed, formed = True, False
        raise RecoveryError(f"{MAX_ATTEMPTS} groups in a row broke before training could go on in one of them")

    def _reform(self) -> None:
        began = self._mono()
        self.injector.at("reform", self._step_for_faults())
        group = self.membership.reform()
        self._bus.position.rank, self._bus.position.size = group.rank, group.size
        self._bus.emit("reformed", duration_s=self._mono() - began)

    def _agree_and_transfer(self, resume: Resume, *, failed: bool) -> Agreement:
        committer, comm, group = self.committer, self.membership.comm, self.membership.group
        began = self._mono()
        self.injector.at("agreement", self._step_for_faults())
        schema = self._trainee.schema()
        agreement = agree(comm, self._standing(resume, schema, failed=failed), schema)
        self._agreed = replace(group, generation=agreement.generation)
        self._bus.emit("agreed", duration_s=self._mono() - began, holders=agreement.holders, lacking=agreement.lacking,
                       lost=agreement.lost, newest=agreement.frontier.step, updates=agreement.frontier.updates)
        self._decision = None
        if agreement.consecutive and not agreement.start:
            self._decision = self._ask_policy(agreement, group.size)
        if not isinstance(self._decision, Forward):
            self._settle(agreement)
        if not committer.fresh and not isinstance(self._decision, Forward):
            self._trainee.regrouped(group)
        began = self._mono()
        self.injector.at("transfer", self._step_for_faults())
        sent = transfer(comm, agreement, group.rank, self._trainee, committer)
        self._bus.emit("transferred", duration_s=self._mono() - began, nbytes=sent.nbytes, receivers=sent.receivers)
        committer.fresh = False
        if isinstance(self._decision, Forward):
            self._finish_update(agreement, self._decision)
            self._trainee.regrouped(group)
        elif agreement.open_ranges:
            self._trainee.repeat(agreement.open_ranges)
        self.membership.adopt_generation(agreement.generation)
        if not isinstance(self._decision, Forward):  # then the batch is still the one that was dealt before
            self._shared_by = self.membership.group
        at = self._bus.position
        at.generation, at.rank, at.size, at.step = agreement.generation, group.rank, group.size, committer.frontier.step
        self._trainee.settled(self.membership.group)
        return agreement

    def _step_for_faults(self) -> int:
        return 0 if self.committer.fresh else self.committer.frontier.step + 1

    def _standing(self, resume: Resume, schema: list[str], *, failed: bool) -> Standing:
        committer = self.committer
        previous = self._agreed or replace(self.membership.group, generation=-1)
        return Standing(
            frontier=committer.frontier,
            fresh=committer.fresh,
            torn=committer.torn,
            generation=previous.generation,
            rank=previous.rank,
            size=previous.size,
            computed_by=committer.computed_by,
            resume=resume,
            schema=hashlib.sha256("\n".join(schema).encode()).hexdigest(),
            consecutive=self._failures if failed else 0,
            open_ranges=self._trainee.open_ranges(),
            shared_by=self._shared_by,
            phase=self._phase,
            gradients=self._trainee.gradients(),
            ages_s=tuple(self._mono() - moment for moment in reversed(self._failed_at)),
            step_s=statistics.median(self._step_s) if self._step_s else 0.0,
            reduction_s=self._trainee.reduction_s(),
        )

    def _ask_policy(self, agreement: Agreement, size: int) -> Decision:
        """Let the policy decide, and make sure that it decided alike everywhere."""
        failure = failure_of(agreement, size)
        assert self._policy is not None
        try:
            decision: Decision | PolicyError | None = decide(self._policy, failure)
        except PolicyError as error:
            decision = error
        # The text of an error may hold an address, which differs between workers that decided alike.
        answer = type(decision).__name__ if isinstance(decision, PolicyError) else repr(decision)
        same_everywhere(self.membership.comm, "decision of the recovery policy", answer)
        if isinstance(decision, PolicyError):
            raise decision
        decision = decision or _given_up(self._policy, failure)
        self._bus.emit("decision", decision=type(decision).__name__, failure=asdict(failure))
        self._failed_at.append(self._mono())
        match decision:
            case Abort(reason=reason):
                raise RecoveryError(reason)
            case Forward() | Replay():
                return decision

    def _finish_update(self, agreement: Agreement, decision: Forward) -> None:
        """Complete the reductions of the update that failed, and put on record what is lost."""
        assert agreement.reach is not None
        began = self._mono()
        self.injector.at("completion", self._step_for_faults())
        reach = agreement.reach
        done = self._trainee.finish(reach, decision)
        if self.committer.computed_by is None:
            self.committer.computed_by = reach.shared_by.generation
        samples = self._losses.carried_forward(self.committer.frontier.step + 1, reach, decision, done)
        self._bus.emit(
            "forward", duration_s=self._mono() - began, missing=decision.missing, rescale=decision.rescale,
            gone=reach.gone, gradients=done.gradients, elements=done.elements, lossy=done.lossy,
            lossy_elements=done.lossy_elements, samples=samples,
        )  # fmt: skip
        log.warning(
            "horovod_ft: step %d goes on without the workers %s: in %d of %d gradients (%d of %d elements) they do not "
            "count",
            self.committer.frontier.step + 1, list(reach.gone), len(done.lossy), done.gradients,
            done.lossy_elements, done.elements,
        )  # fmt: skip

    def _settle(self, agreement: Agreement) -> None:
        """Give up the open step, unless it was completed by others: then what it did to local state is right.

        Nor is anything given up once all training functions have returned, because nobody would do it again.
        """
        self._ledger.discarded()
        self._trainee.discard()
        self._losses.step_ended()
        if agreement.reenter and self.committer.frontier.step >= agreement.frontier.step:
            self.committer.rollback()


def _given_up(policy: RecoveryPolicy, failure: Failure) -> Abort:
    """No policy has an answer."""
    lost = (
        f"and the last failure took the workers {list(failure.lost)}" if failure.lost else
        "although no worker was lost: the cause is in the step itself (see the first error in the log)"
    )  # fmt: skip
    return Abort(
        f"step {failure.step + 1} failed {failure.consecutive} times in a row, {lost}. The recovery policy {policy!r} "
        "has no answer to that"
    )


def _kind(agreement: Agreement, *, new: bool, failed: bool) -> str:
    if agreement.start:
        return "formed"
    if new:
        return "joined"
    return "recovered" if failed else "regrouped"


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
    """``with state.step():`` one training step as a transaction."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        self._engine.enter_step()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self._engine.leave_step(error)
