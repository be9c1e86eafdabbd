"""Bring a group that has formed to one state: agree on who has what, let the policy decide, do what it has decided.

The only place that asks the policy, and the only one that acts on its Decision. Every worker calls the same collectives
in the same order: agreement, decision, transfer, completion. Nothing is caught here: if the group breaks on the way,
the failure goes up to ``regroup.py``, which forms another group and calls again from the top. So nothing may be left
half done that a second call does not put right.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from dataclasses import asdict, dataclass, replace

from horovod_ft.agreement import Agreement, Resume, Standing, agree, failure_of, same_everywhere
from horovod_ft.errors import JobLostError, PolicyError, RecoveryError, StorageError
from horovod_ft.events import EventBus
from horovod_ft.faults.inject import Injector
from horovod_ft.going_back import go_back, told_went_back, went_back
from horovod_ft.history import History
from horovod_ft.membership.base import Collectives, Group, Membership
from horovod_ft.open_step import OpenStep
from horovod_ft.policy import (
    Abort,
    Decision,
    Failure,
    Forward,
    RecoveryPolicy,
    Replay,
    Restart,
    decide,
    decisions_of,
)
from horovod_ft.restoring import Restoring
from horovod_ft.saving import Saving
from horovod_ft.transfer import transfer

log = logging.getLogger("horovod_ft")

#: Failures in a row, at the end of the training, of which the policy is not asked.
MAX_AT_THE_END = 20
#: How often in a row training goes back to a copy without getting further than before.
MAX_RESTARTS = 10


@dataclass(frozen=True)
class Outcome:
    """How a group came to one state.

    Attributes:
        agreement: on the state that it has now.
        decision: what was done about the failure behind it; None if there was none. Restart, too, if this worker has
            gone back in a try that broke, and is where the script is not any more.
    """

    agreement: Agreement
    decision: Decision | None


class Reconciler:
    """One worker's part in it.

    Attributes:
        policy: asked after each failure; None while no training function runs.
        back: the script wants to go back to a copy, and no policy is asked.

    Args:
        attempt: how often the job was started before.
    """

    def __init__(
        self,
        membership: Membership,
        bus: EventBus,
        injector: Injector,
        open_step: OpenStep,
        history: History,
        saving: Saving,
        attempt: int,
    ) -> None:
        self.policy: RecoveryPolicy | None = None
        self.back = False
        self._membership = membership
        self._bus = bus
        self._injector = injector
        self._open = open_step
        self._trainee = open_step.trainee
        self._committer = open_step.committer
        self._history = history
        self._saving = saving
        self._attempt = attempt
        self._restoring = Restoring(
            membership, open_step.trainee, open_step.committer, bus, injector, history.mono
        )
        self._agreed: Group | None = None
        self._processes: tuple[int, ...] = ()
        self._process = secrets.randbits(63)

    def reconcile(self, resume: Resume, phase: str, *, failed: bool) -> Outcome:
        """Bring the present group to one state. Blocks; all its workers call it.

        Args:
            resume: where this worker goes on.
            phase: where it was when the group broke, as in ``policy.Failure``.
            failed: it comes here by a failure.

        Raises:
            RecoveryError: the policy has decided to give up, nobody has a whole state, or there is no copy to go back
                to.
            CheckpointError: there are durable checkpoints, and none of them can be used.
            PolicyError: the policy has failed.
            DivergenceError: the workers do not train the same thing, or their policies decide differently.
        """
        agreement = self._agree(resume, phase, failed=failed)
        decision = self._decide(agreement)
        agreement = self._execute(decision, agreement)
        went_back = self._open.back_from is not None  # now, or in a try that broke
        self._settle(agreement, deals_anew=not isinstance(decision, Forward))
        return Outcome(agreement, Restart() if went_back else decision)

    # --- agreement -------------------------------------------------------------------------------------------------

    def _agree(self, resume: Resume, phase: str, *, failed: bool) -> Agreement:
        began = self._history.mono()
        self._injector.at("agreement", self._open.number_for_faults)
        schema = self._trainee.schema()
        standing = self._standing(resume, phase, schema, failed=failed)
        agreement = agree(self._membership.comm, standing, schema, self._processes)
        self._processes = agreement.processes
        self._agreed = replace(self._membership.group, generation=agreement.generation)
        self._bus.emit("agreed", duration_s=self._history.mono() - began, holders=agreement.holders,
                       lacking=agreement.lacking, lost=agreement.lost, newest=agreement.frontier.step,
                       updates=agreement.frontier.updates)  # fmt: skip
        return agreement

    def _standing(self, resume: Resume, phase: str, schema: list[str], *, failed: bool) -> Standing:
        committer, history = self._committer, self._history
        copies = self._trainee.ft_copies()
        previous = self._agreed or replace(self._membership.group, generation=-1)
        if self._open.back_from is not None and resume is Resume.FINISHING:
            resume = Resume.REENTER  # what it had finished was given up, in a try that broke
        return Standing(
            frontier=committer.frontier,
            fresh=committer.fresh,
            torn=committer.torn,
            process=self._process,
            generation=previous.generation,
            rank=previous.rank,
            size=previous.size,
            computed_by=committer.computed_by,
            resume=resume,
            schema=hashlib.sha256("\n".join(schema).encode()).hexdigest(),
            consecutive=history.consecutive if failed else 0,
            open_ranges=self._trainee.open_ranges(),
            shared_by=self._open.shared_by,
            phase=phase,
            gradients="has given up its gradients" if self._open.given_up else self._trainee.gradients(),
            ages_s=history.ages_s(),
            step_s=history.step_s(),
            reduction_s=self._trainee.reduction_s(),
            copies=() if copies is None else tuple((step, copies.age_s(step)) for step in copies.steps),
            back=self.back,
            restarts=history.restarts,
            attempt=self._attempt,
            store=self._saving.store is not None,
            durable=self._saving.newest,
        )

    # --- decision --------------------------------------------------------------------------------------------------

    def _decide(self, agreement: Agreement) -> Decision | None:
        """What the policy makes of the failure behind this group; None if there was none, or it does not matter.

        It does not when all training functions have returned: there is nothing to compute again. Nor when nobody has a
        whole state: then a checkpoint is all that is left.
        """
        if not agreement.holders and not agreement.start:
            return Restart()
        done = not agreement.reenter and agreement.consecutive <= MAX_AT_THE_END
        if not agreement.consecutive or agreement.start or done:
            return None
        self._saving.failed()
        if agreement.back:
            return Restart()
        assert self.policy is not None
        failure = failure_of(agreement, self._membership.group.size)
        decision = _decide_alike(self.policy, failure, self._membership.comm)
        self._bus.emit("decision", decision=type(decision).__name__, failure=asdict(failure))
        self._history.decided()
        return decision

    # --- what is done about it -------------------------------------------------------------------------------------

    def _execute(self, decision: Decision | None, agreement: Agreement) -> Agreement:
        """Returns the agreement on the state that the group has then."""
        match decision:  # with a result in each case, so that mypy misses one that is left out
            case Replay() | None:
                return self._start_over(agreement)
            case Forward():
                return self._carry_forward(agreement, decision)
            case Restart():
                return self._restart(agreement)
            case Abort(reason=reason):
                raise RecoveryError(reason)

    def _start_over(self, agreement: Agreement) -> Agreement:
        """All go back to the newest commit that anybody has; at the start of a job, to the newest checkpoint."""
        if agreement.start and self._saving.store is not None:
            restored = self._from_store(agreement)
            if restored is not None:
                self._open.begins_at = restored.frontier.step
                return restored
        if agreement.start and self._attempt:
            self._open.begins_at = 0
            if self._saving.store is not None and self._membership.group.rank == 0:
                log.warning("horovod_ft: attempt %d begins from the start: there is no checkpoint in %s",
                            self._attempt + 1, self._saving.store.url)  # fmt: skip
        self._open.give_up(agreement)
        if not self._committer.fresh:
            self._trainee.regrouped(self._membership.group)
        self._transfer(agreement)
        if agreement.open_ranges:
            self._trainee.repeat(agreement.open_ranges)
        return agreement

    def _carry_forward(self, agreement: Agreement, decision: Forward) -> Agreement:
        """All go on from where they are, in the update that failed."""
        self._transfer(agreement)  # to nobody: this way is closed if anybody is behind
        self._finish_update(agreement, decision)
        self._trainee.regrouped(self._membership.group)
        return agreement

    def _restart(self, agreement: Agreement) -> Agreement:
        """All go back to a copy of an earlier state, in memory or durable: the newest."""
        if agreement.restarts >= MAX_RESTARTS:
            raise RecoveryError(
                f"training has gone back to a copy {agreement.restarts} times without getting further than step "
                f"{agreement.frontier.step}: what fails is in that step itself (see the first error in the log)"
            )
        self._open.give_up(agreement)
        since = self._open.back_from = max(agreement.frontier.step, self._open.back_from or 0)  # of a try that broke
        agreement = self._to_copy(agreement, since)
        if not self._committer.fresh:
            self._trainee.regrouped(self._membership.group)
        self._transfer(agreement)
        return agreement

    def _to_copy(self, agreement: Agreement, since: int) -> Agreement:
        self._saving.going_back()
        durable = -1 if agreement.durable is None else agreement.durable[0]
        copy = agreement.copies[0].step if agreement.copies else -1
        in_memory = bool(agreement.copies) and copy >= durable
        restored = None if in_memory or self._saving.store is None else self._from_store(agreement, copy)
        if restored is None:
            gone = go_back(self._membership, agreement, since, self._trainee, self._committer, self._bus)
            self._saving.went_back(gone.frontier.step)
            return gone
        told_went_back(self._bus, restored.frontier.step, since)
        return restored

    def _from_store(self, agreement: Agreement, newer_than: int = -1) -> Agreement | None:
        """All have the newest durable checkpoint. Returns the agreement on that; None if there is none.

        Args:
            newer_than: step of a copy in memory, that will do as well.
        """
        assert self._saving.store is not None
        try:
            restored = self._restoring.newest(self._saving.store, agreement.generation, newer_than)
        except StorageError as error:
            if self._attempt:  # it was there before
                raise JobLostError(f"checkpoints cannot be reached: {error}") from error
            raise
        if restored is None:
            if not agreement.holders and not agreement.copies:
                raise JobLostError(
                    "the last workers with a whole state died while they were sending it to the others, and there is "
                    f"no checkpoint in {self._saving.store.url} yet. Start the job again"
                )
            return None
        self._saving.restored(restored.step, restored.values)
        return went_back(agreement, restored.step, tuple(range(self._membership.group.size)))

    def _transfer(self, agreement: Agreement) -> None:
        began = self._history.mono()
        self._injector.at("transfer", self._open.number_for_faults)
        membership = self._membership
        sent = transfer(membership.comm, agreement, membership.group.rank, self._trainee, self._committer)
        duration_s = self._history.mono() - began
        self._bus.emit("transferred", duration_s=duration_s, nbytes=sent.nbytes, receivers=sent.receivers)
        self._committer.fresh = False

    def _finish_update(self, agreement: Agreement, decision: Forward) -> None:
        """Complete the reductions of the update that failed, and put on record what is lost."""
        assert agreement.reach is not None
        began = self._history.mono()
        self._injector.at("completion", self._open.number_for_faults)
        reach = agreement.reach
        done = self._trainee.finish(reach, decision)
        samples = self._open.carried_forward(reach, decision, done)
        self._bus.emit(
            "forward", duration_s=self._history.mono() - began, missing=decision.missing, rescale=decision.rescale,
            gone=reach.gone, gradients=done.gradients, elements=done.elements, lossy=done.lossy,
            lossy_elements=done.lossy_elements, samples=samples,
        )  # fmt: skip
        log.warning(
            "horovod_ft: step %d goes on without the workers %s: in %d of %d gradients (%d of %d elements) they do not "
            "count",
            self._open.number, list(reach.gone), len(done.lossy), done.gradients, done.lossy_elements, done.elements,
        )  # fmt: skip

    def _settle(self, agreement: Agreement, *, deals_anew: bool) -> None:
        """All workers have the state: the group is in order from now on."""
        self._membership.adopt_generation(agreement.generation)
        self._open.settled(agreement)
        self._saving.settled(agreement)
        group = self._membership.group
        if deals_anew:
            self._open.shared_by = group
        at = self._bus.position
        at.generation, at.rank, at.size = agreement.generation, group.rank, group.size
        at.step = self._committer.frontier.step
        self._trainee.settled(group)


def _decide_alike(policy: RecoveryPolicy, failure: Failure, comm: Collectives) -> Decision:
    """Let the policy decide, and make sure that it decided alike everywhere."""
    try:
        decision: Decision | PolicyError | None = decide(policy, failure)
    except PolicyError as error:
        decision = error
    # The text of an error may hold an address, which differs between workers that decided alike.
    answer = type(decision).__name__ if isinstance(decision, PolicyError) else repr(decision)
    same_everywhere(comm, "decision of the recovery policy", answer)
    if isinstance(decision, PolicyError):
        raise decision
    if decision is None:
        raise _given_up(policy, failure)
    return decision


def _given_up(policy: RecoveryPolicy, failure: Failure) -> RecoveryError:
    """No policy has an answer. Without a lost worker the job would most likely end like that again."""
    lost = (
        f"and the last failure took the workers {list(failure.lost)}" if failure.lost else
        "although no worker was lost: the cause is in the step itself (see the first error in the log)"
    )  # fmt: skip
    kind = JobLostError if failure.lost else RecoveryError
    back = Restart in decisions_of(policy) and failure.checkpoint_step is None
    nowhere = ": there is no checkpoint yet that it could go back to" if back else ""
    return kind(
        f"step {failure.step + 1} failed {failure.consecutive} times in a row, {lost}. The recovery policy {policy!r} "
        f"has no answer to that{nowhere}"
    )
