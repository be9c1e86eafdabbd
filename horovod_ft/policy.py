"""Recovery policies as values: the frozen context of a failure, the decisions, and how policies combine.

A policy only decides. The engine (in ``reconcile.py``) is the only place that acts on a Decision.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol, TypeAlias, get_args, runtime_checkable

from horovod_ft.errors import PolicyError

#: What becomes of a gradient that no survivor has in its reduced form.
#: ``reduce_again``: it is reduced once more, from the local gradients of the survivors.
#: ``local``: it is the local gradient of the survivor with the largest share, sent to all.
#: ``skip``: there is none, and the optimizer leaves its parameter alone in this step.
MISSING = ("reduce_again", "local", "skip")


@dataclass(frozen=True)
class Costs:
    """Expected seconds of each way out, as measured in this run; the largest over the survivors.

    Attributes:
        replay_s: to compute the failed mini-batch again.
        forward_s: to reduce what is missing; None if that way is closed.
        restart_s: to go back to the last full copy of the state and compute the steps since then again; None without.
    """

    replay_s: float
    forward_s: float | None
    restart_s: float | None = None


@dataclass(frozen=True)
class Failure:
    """Everything that the survivors of a failure agree on. Equal on all of them.

    Attributes:
        generation: of the group that broke.
        step: newest step that any survivor committed; training goes on from it.
        updates: optimizer updates that a survivor had already applied in the open step.
        phases: where each survivor was, in their order: ``outside`` of a step, ``step``, ``update`` (in the wait for
            the reduced gradients, all local ones computed), ``commit``, or ``guard`` (their replicas differ).
        lost: ranks, in the group that broke, of the workers that are gone.
        survivors: ranks, in the group that broke, of those that are left.
        size_before, size_after: world sizes; newcomers count in ``size_after``.
        newcomers: how many have joined in the same moment.
        behind: how many survivors have to be brought forward to ``step``.
        consecutive: failures since the last committed step, this one included.
        ages_s: seconds since each earlier failure of the run that a survivor remembers, newest first.
        samples_at_risk: samples of the failed mini-batch, over all workers; 0 when no loader is tracked.
        shares, shares_lost: how many workers the failed mini-batch was dealt to, and how many of them are gone. After a
            second failure on the way forward these count from the beginning, and ``lost`` does not.
        gradients, gradients_done: of the update that failed: how many there are, and how many of them at least one
            survivor has in their reduced form, whole. 0 if the survivors were not all in the same update.
        elements, elements_done: the same in numbers.
        closed: why the mini-batch cannot be carried forward; empty if it can.
        diverged: a ReplicaGuard found that the survivors' replicas differ, and no majority. Replay and Forward do not
            mend that: they count as no answer.
        checkpoint_step, checkpoint_age_s: of the newest full copy of the state that they can go back to: the committed
            steps it holds, and the seconds since it was taken. None without one.
        costs: of each way out.
    """

    generation: int
    step: int
    updates: int
    phases: tuple[str, ...]
    lost: tuple[int, ...]
    survivors: tuple[int, ...]
    size_before: int
    size_after: int
    newcomers: int
    behind: int
    consecutive: int
    ages_s: tuple[float, ...]
    samples_at_risk: int
    shares: int
    shares_lost: int
    gradients: int
    gradients_done: int
    elements: int
    elements_done: int
    closed: str
    diverged: bool
    checkpoint_step: int | None
    checkpoint_age_s: float | None
    costs: Costs


@dataclass(frozen=True)
class Replay:
    """Discard the failed mini-batch on all workers and compute it again among the survivors."""


@dataclass(frozen=True)
class Forward:
    """Finish the failed mini-batch without those who are gone. Only when ``Failure.closed`` is empty.

    Gradients that any survivor has in their reduced form keep the full average, the share of the dead included.
    ``skip`` needs at least one of these: otherwise nothing is left to apply.

    Args:
        missing: what becomes of all others: one of MISSING.
        rescale: let what is left count as the whole: the average is over the samples that are left. Otherwise the
            gradients of the dead count as zero, and the update is smaller by their share.

    Raises:
        PolicyError: an argument is wrong.
    """

    missing: str = "reduce_again"
    rescale: bool = True

    def __post_init__(self) -> None:
        if self.missing not in MISSING:
            raise PolicyError(f"missing is {self.missing!r}; it must be one of {', '.join(map(repr, MISSING))}")
        if not isinstance(self.rescale, bool):
            raise PolicyError(f"rescale is {self.rescale!r}; it must be True or False")

    def leaves_nothing(self, failure: Failure) -> bool:
        """Whether no gradient would be left to apply."""
        return self.missing == "skip" and not failure.gradients_done


@dataclass(frozen=True)
class Restart:
    """Go back to the newest full copy of the state, and enter the training function again from the top.

    Only when ``Failure.checkpoint_step`` is not None. The steps since then are computed again.
    """


@dataclass(frozen=True)
class Abort:
    """Give up: every survivor raises RecoveryError with this reason and exits non-zero."""

    reason: str


Decision: TypeAlias = Replay | Forward | Restart | Abort
EVERY_DECISION: frozenset[type] = frozenset(get_args(Decision))


@runtime_checkable
class RecoveryPolicy(Protocol):
    """Any callable over a Failure that answers with a Decision, or None for "I have no answer".

    It must depend on nothing but the Failure: all survivors have to reach the same decision. An attribute ``decisions``
    may say which kinds of decision it can make (default: all). The engine prepares for those only.
    """

    def __call__(self, failure: Failure) -> Decision | None: ...


class Policy(ABC):
    """Base of the policies here: lets them be combined. ``a | b`` asks ``b`` when ``a`` has no answer."""

    @property
    def decisions(self) -> frozenset[type]:
        """The kinds of decision that the policy can make."""
        return EVERY_DECISION

    @abstractmethod
    def __call__(self, failure: Failure) -> Decision | None:
        """See ``RecoveryPolicy``."""

    def __or__(self, other: RecoveryPolicy) -> Escalation:
        return Escalation((*_flat(self), *_flat(other)))

    def __ror__(self, other: RecoveryPolicy) -> Escalation:
        return Escalation((*_flat(other), *_flat(self)))


@dataclass(frozen=True)
class Escalation(Policy):
    """Ask one policy after the other until one has an answer. Made by ``|``."""

    policies: tuple[RecoveryPolicy, ...]

    def __call__(self, failure: Failure) -> Decision | None:
        answers = (decide(policy, failure) for policy in self.policies)
        return next((answer for answer in answers if answer is not None), None)

    @property
    def decisions(self) -> frozenset[type]:
        return frozenset().union(*(decisions_of(policy) for policy in self.policies))

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.policies))


def _flat(policy: RecoveryPolicy) -> tuple[RecoveryPolicy, ...]:
    if not callable(policy):
        raise PolicyError(f"{policy!r} cannot be combined with a recovery policy: it is not one")
    return policy.policies if isinstance(policy, Escalation) else (policy,)


def decisions_of(policy: RecoveryPolicy) -> frozenset[type]:
    """The kinds of decision that a policy says it can make; all if it does not say."""
    named: frozenset[type] = getattr(policy, "decisions", EVERY_DECISION)
    return named


def decide(policy: RecoveryPolicy, failure: Failure) -> Decision | None:
    """Ask the policy, and check that the answer is one. None if it has none, or one that does not help.

    Raises:
        PolicyError: the policy raised, answered with something else, or asked for a way that is closed.
    """
    try:
        decision = policy(failure)
    except PolicyError:
        raise
    except Exception as error:
        raise PolicyError(f"the recovery policy {policy!r} raised {error!r} when asked about {failure}") from error
    if decision is not None and not isinstance(decision, Decision):
        raise PolicyError(
            f"the recovery policy {policy!r} answered {decision!r}, which is not Replay(), Forward(...), Restart(), "
            "Abort(...) or None"
        )
    if isinstance(decision, Replay | Forward) and failure.diverged:
        return None
    if isinstance(decision, Restart) and failure.checkpoint_step is None:
        raise PolicyError(
            f"the recovery policy {policy!r} answered {decision!r}, but there is no full copy of the state to go back "
            "to: elastic.run(checkpoint=...) saves some, StateCommitter(state, keep='copy') keeps some in memory, in a "
            "training that goes by state.step(). A policy can see that in failure.checkpoint_step"
        )
    if isinstance(decision, Forward) and decision.leaves_nothing(failure):
        raise PolicyError(
            f"the recovery policy {policy!r} answered {decision!r}, but no survivor has any reduced gradient, so that "
            "nothing would be left to apply. A policy can see that in failure.gradients_done"
        )
    if isinstance(decision, Forward) and failure.closed:
        raise PolicyError(
            f"the recovery policy {policy!r} answered {decision!r}, but that way is closed: {failure.closed}. A policy "
            "can see that in failure.closed"
        )
    return decision


@dataclass(frozen=True)
class Budget:
    """How often a policy may be used. When it is spent, the policy has no answer, and the next one is asked.

    Args:
        max_consecutive: failures without a committed step between them; None for any number.
        at_most, within: failures in the last ``within`` seconds; both or neither are given.
    """

    max_consecutive: int | None = None
    at_most: int | None = None
    within: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_consecutive", "at_most"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise PolicyError(f"{name} is {value!r}; it must be a whole number, at least 1")
        if (self.at_most is None) != (self.within is None):
            raise PolicyError("at_most and within belong together: at most so many failures within so many seconds")
        if self.within is not None and not self.within > 0:
            raise PolicyError(f"within is {self.within!r}; it must be a positive number of seconds")

    def spent(self, failure: Failure) -> bool:
        if self.max_consecutive is not None and failure.consecutive > self.max_consecutive:
            return True
        if self.at_most is None or self.within is None:
            return False
        return 1 + sum(age <= self.within for age in failure.ages_s) > self.at_most
