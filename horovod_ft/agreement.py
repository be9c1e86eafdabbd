"""What a group agrees on when it forms anew: who has the newest state, who lacks it, and that all fit together.

One small allgather. Every worker then computes the same Agreement from the same standings; nobody is asked to decide
for the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from horovod_ft.committer import Frontier
from horovod_ft.data import Range
from horovod_ft.errors import DivergenceError, JobLostError
from horovod_ft.membership.base import Collectives, Group
from horovod_ft.policy import Costs, Failure

#: The phase of a worker whose guard has found that replicas differ.
DIVERGED = "guard"
#: Generations of one attempt at a job: numbers go on from attempt to attempt, so that records of several can be told
#: apart.
GENERATIONS = 100_000


class Resume(Enum):
    """Where a worker goes on after the group has formed."""

    IN_PLACE = "in place"  # inside its training loop
    REENTER = "reenter"  # at the top of the training function
    FINISHING = "finishing"  # its training function has returned


class Gradients(NamedTuple):
    """What one worker has of the update that failed, at the moment when all its local gradients are computed.

    Attributes:
        update: says which update it is; equal on all workers in the same one.
        done: for each reduction of the update, in an order that is equal on all workers, whether it is here.
        lossy: for each of them, whether what is here comes from an earlier try to go forward, and lacks some shares.
        elements: for each of them, how many numbers it has.
        weight: of this worker's share of the mini-batch; 1.0 if all shares are equal.
    """

    update: str
    done: tuple[bool, ...]
    lossy: tuple[bool, ...]
    elements: tuple[int, ...]
    weight: float


@dataclass(frozen=True)
class Reach:
    """How far the group came in the update that failed: the gradient frontiers of its workers, merged.

    Attributes:
        holders: for each reduction the lowest rank that has its result, a whole one if possible; None if nobody has.
        lossy: for each of them, whether that result lacks the share of somebody.
        elements: as in Gradients.
        weights: of the workers' shares, by rank.
        shared_by: the group that the mini-batch was dealt to; as rank 0 of the new group was in it.
        ranks: in that group, of those who are left, by their new ranks.
    """

    holders: tuple[int | None, ...]
    lossy: tuple[bool, ...]
    elements: tuple[int, ...]
    weights: tuple[float, ...]
    shared_by: Group
    ranks: tuple[int, ...]

    @property
    def gone(self) -> tuple[int, ...]:
        """Ranks, in the group that the mini-batch was dealt to, of those who are not left."""
        return tuple(sorted(set(range(self.shared_by.size)) - set(self.ranks)))

    @property
    def largest(self) -> int:
        """The new rank of the worker with the most samples; the lowest of several."""
        return max(range(len(self.weights)), key=lambda rank: (self.weights[rank], -rank))

    @property
    def whole(self) -> tuple[bool, ...]:
        """For each reduction whether somebody has a result that lacks nobody's share."""
        return tuple(holder is not None and not lossy for holder, lossy in zip(self.holders, self.lossy, strict=True))


class Standing(NamedTuple):
    """What one worker tells the others.

    Attributes:
        frontier: how far its parameters are.
        fresh: its process has just begun.
        torn: a transfer into it was cut off.
        process: a number that no other process has.
        generation, rank, size: the last group it agreed in; generation -1 if there is none yet.
        computed_by: generation that computed the open step's first update, if one is applied.
        resume: where it goes on.
        schema: hash of names, shapes and dtypes of its state.
        consecutive: its failures since its last commit; 0 if it comes to this group without one.
        open_ranges: the global batches of its open step.
        shared_by: the last group in which it had the state of all, and as which of them: its batch was dealt there.
        phase: where it was when the group broke, as in ``policy.Failure``.
        gradients: what it has of an update that failed; or why it cannot finish that update.
        ages_s: seconds since each earlier failure that it remembers, newest first.
        step_s, reduction_s: how long a step takes, and how much of that it waits for gradients; 0.0 if not known yet.
        copies: steps that it has a full copy of, and the seconds since each was taken.
        back: it wants to go back to the newest of them.
        restarts: how often it has gone back without getting further than before.
        attempt: how often the job was started before.
        store: it can restore durable checkpoints.
        durable: committed steps of the newest one that it knows of, and the seconds since; None if it knows of none.
    """

    frontier: Frontier
    fresh: bool
    torn: bool
    process: int
    generation: int
    rank: int
    size: int
    computed_by: int | None
    resume: Resume
    schema: str
    consecutive: int
    open_ranges: tuple[Range, ...]
    shared_by: Group
    phase: str
    gradients: Gradients | str
    ages_s: tuple[float, ...]
    step_s: float
    reduction_s: float
    copies: tuple[tuple[int, float], ...]
    back: bool
    restarts: int
    attempt: int = 0
    store: bool = False
    durable: tuple[int, float] | None = None

    @property
    def sound(self) -> bool:
        """It has the group's state."""
        return not (self.fresh or self.torn)


@dataclass(frozen=True)
class Copied:
    """A full copy of the state that a group can go back to.

    Attributes:
        step: committed steps that it holds.
        holders: ranks, in the new group, that have it.
        age_s: seconds since it was taken; the largest over the holders.
    """

    step: int
    holders: tuple[int, ...]
    age_s: float


@dataclass(frozen=True)
class Agreement:
    """The same value on every worker.

    Attributes:
        frontier: of the newest sound state.
        holders: ranks, in the new group, that have it. At the start of a job one alone, whose state all begin with:
            rank 0, or the first that a start that was cut off has left as it was. Nobody, if only a durable checkpoint
            is left.
        lacking: ranks that must receive it.
        newcomers: ranks whose processes are new; a subset of ``lacking``, but for the holder at the start of a job.
        generation: of the new group: one more than the last that was agreed on, 0 for the first.
        start: nobody had a state: the job begins.
        computed_by: as in Standing, of the holders.
        reenter: at least one worker is not finishing, so those who are have to run the training function again.
        lost, survivors: ranks in the previous group.
        size_before: size of the previous group.
        consecutive: the largest over the workers.
        open_ranges: of the holders, if an update of the open step is applied: its replay must cover the same samples.
        at_risk: samples in the open step; the most over the workers.
        phases: of the survivors, in the order of their ranks in the previous group.
        reach: how far the update came that all workers are in; None if they are not in the same one.
        closed: why the mini-batch cannot be carried forward; empty if it can.
        ages_s: as in Standing, of the survivor who remembers most.
        step_s, reduction_s: as in Standing, the largest.
        copies: that the group can go back to, in the order in which to try them.
        back: somebody wants to.
        restarts: as in Standing, the largest.
        diverged: a guard has found that replicas differ, and no majority.
        processes: of the new group, by rank.
        durable: as in Standing, of the worker that knows of the newest.
    """

    frontier: Frontier
    holders: tuple[int, ...]
    lacking: tuple[int, ...]
    newcomers: tuple[int, ...]
    generation: int
    start: bool
    computed_by: int | None
    reenter: bool
    lost: tuple[int, ...]
    survivors: tuple[int, ...]
    size_before: int
    consecutive: int
    open_ranges: tuple[Range, ...]
    at_risk: int
    phases: tuple[str, ...] = ()
    reach: Reach | None = None
    closed: str = ""
    ages_s: tuple[float, ...] = ()
    step_s: float = 0.0
    reduction_s: float = 0.0
    copies: tuple[Copied, ...] = ()
    back: bool = False
    restarts: int = 0
    diverged: bool = False
    processes: tuple[int, ...] = ()
    durable: tuple[int, float] | None = None


def who_has_it(
    frontier: Frontier, group: Group, holders: Sequence[int], *, start: bool = False, newcomers: Sequence[int] = ()
) -> Agreement:
    """An agreement that follows from what all workers know already: these have the state, the others lack it."""
    everybody = tuple(range(group.size))
    return Agreement(
        frontier=frontier, holders=tuple(holders), lacking=tuple(rank for rank in everybody if rank not in holders),
        newcomers=tuple(newcomers), generation=group.generation, start=start, computed_by=None, reenter=True, lost=(),
        survivors=() if start else everybody, size_before=group.size, consecutive=0, open_ranges=(), at_risk=0,
    )  # fmt: skip


def conclude(standings: Sequence[Standing], processes: Sequence[int] = ()) -> Agreement:
    """The agreement that follows from the standings, in order of the new ranks.

    Args:
        processes: of the last group that anybody agreed in, by rank. Not needed if all who have agreed in any group
            have agreed in that one: an agreement can be complete on some workers only.

    Raises:
        JobLostError: workers survived, but none of them has a whole state, and there is no store.
    """
    sound = [rank for rank, standing in enumerate(standings) if standing.sound]
    fresh = tuple(rank for rank, standing in enumerate(standings) if standing.fresh)
    start = len(fresh) == len(standings)
    if start:
        sound = [rank for rank, standing in enumerate(standings) if not standing.torn][:1]
    if not sound and not all(standing.store for standing in standings):
        raise JobLostError(
            "the last workers with a whole state died while they were sending it to the others: no replica is left, "
            "and no checkpoint (elastic.run(checkpoint=...)). Start the job again"
        )
    newest = max((standings[rank].frontier for rank in sound), default=Frontier(0, 0))
    holders = tuple(rank for rank in sound if standings[rank].frontier == newest)
    previous = max(standings, key=lambda standing: standing.generation)
    ranks = {process: rank for rank, process in enumerate(processes)} or {
        standing.process: standing.rank for standing in standings if standing.generation == previous.generation
    }
    those_left = [standing for standing in standings if standing.process in ranks]
    survivors = tuple(ranks[standing.process] for standing in those_left)
    reach = _reach(standings, holders, fresh)
    return Agreement(
        frontier=newest,
        holders=holders,
        lacking=tuple(rank for rank in range(len(standings)) if rank not in holders),
        newcomers=fresh,
        generation=max(previous.generation + 1, standings[0].attempt * GENERATIONS),
        start=start,
        computed_by=standings[holders[0]].computed_by if holders else None,
        reenter=any(standing.resume is not Resume.FINISHING for standing in standings),
        lost=() if start else tuple(sorted(set(range(previous.size)) - set(survivors))),
        survivors=() if start else survivors,
        size_before=previous.size,
        consecutive=max(standing.consecutive for standing in standings),
        open_ranges=standings[holders[0]].open_ranges if newest.updates else (),
        at_risk=max(_samples(standing.open_ranges) for standing in standings),
        phases=() if start else tuple(standing.phase for standing in those_left),
        reach=reach if isinstance(reach, Reach) else None,
        closed=reach if isinstance(reach, str) else "",
        ages_s=max((standing.ages_s for standing in those_left), key=len),
        step_s=max(standing.step_s for standing in standings),
        reduction_s=max(standing.reduction_s for standing in standings),
        copies=tuple(_copies(standings)),
        back=any(standing.back for standing in standings),
        restarts=max(standing.restarts for standing in standings),
        diverged=any(standing.phase == DIVERGED for standing in standings),
        processes=tuple(standing.process for standing in standings),
        durable=max((standing.durable for standing in standings if standing.durable is not None), default=None),
    )


def _copies(standings: Sequence[Standing]) -> Iterator[Copied]:
    """The newest first, but before all others those that all have who have any.

    A copy holds what a worker has of its own, such as random generators: whoever lacks it gets that from a newcomer's
    start, so it is better to go back a little further.
    """
    held: dict[int, dict[int, float]] = defaultdict(dict)
    for rank, standing in enumerate(standings):
        for step, age_s in standing.copies:
            held[step][rank] = age_s
    most = sum(bool(standing.copies) for standing in standings)
    for step in sorted(held, key=lambda step: (len(held[step]) == most, step), reverse=True):
        yield Copied(step, tuple(held[step]), max(held[step].values()))


def _reach(standings: Sequence[Standing], holders: Sequence[int], newcomers: Sequence[int]) -> Reach | str:
    """The merged frontiers; or why the update cannot be finished."""
    if newcomers:
        return f"worker {newcomers[0]} has just joined and has no part of the mini-batch"
    if not holders:
        return "no worker has a whole state"
    behind = [rank for rank in range(len(standings)) if rank not in holders]
    if behind:
        return f"worker {behind[0]} is behind worker {holders[0]}, who has finished that update"
    frontiers = []
    for rank, standing in enumerate(standings):
        if isinstance(standing.gradients, str):
            return f"worker {rank} {standing.gradients}"
        frontiers.append(standing.gradients)
    first = frontiers[0]
    for rank, one in enumerate(frontiers):
        if (one.update, one.elements) != (first.update, first.elements):
            return f"worker {rank} is in another update ({one.update}) than worker 0 ({first.update})"
    if sum(one.weight for one in frontiers) == 0:
        return "no survivor has a share of the mini-batch"
    shared_by = standings[0].shared_by
    strangers = [rank for rank, one in enumerate(standings) if one.shared_by.generation != shared_by.generation]
    if strangers:
        return f"worker {strangers[0]} got its share of the mini-batch in another group than worker 0"
    holding = [_holder(frontiers, index) for index in range(len(first.done))]
    return Reach(
        holders=tuple(holder for holder, _ in holding),
        lossy=tuple(lossy for _, lossy in holding),
        elements=first.elements,
        weights=tuple(one.weight for one in frontiers),
        shared_by=shared_by,
        ranks=tuple(standing.shared_by.rank for standing in standings),
    )


def _holder(frontiers: Sequence[Gradients], index: int) -> tuple[int | None, bool]:
    """The lowest rank that has the result of a reduction, a whole one if possible; and whether it is not whole."""
    have = [(one.lossy[index], rank) for rank, one in enumerate(frontiers) if one.done[index]]
    if not have:
        return None, False
    lossy, rank = min(have)
    return rank, lossy


def _samples(ranges: Sequence[Range]) -> int:
    return sum(stop - start for _, start, stop in ranges)


def failure_of(agreement: Agreement, size: int) -> Failure:
    """What the policy is asked about: the failure as the group sees it that has formed after it.

    Args:
        size: of the new group.
    """
    reach = agreement.reach
    elements = reach.elements if reach else ()
    whole = reach.whole if reach else ()
    missing = sum(size for size, holder in zip(elements, reach.holders if reach else (), strict=True) if holder is None)
    back = newest_copy(agreement)
    replay_s = agreement.step_s * agreement.size_before / size
    return Failure(
        generation=agreement.generation - 1,
        step=agreement.frontier.step,
        updates=agreement.frontier.updates,
        phases=agreement.phases,
        lost=agreement.lost,
        survivors=agreement.survivors,
        size_before=agreement.size_before,
        size_after=size,
        newcomers=len(agreement.newcomers),
        behind=len(set(agreement.lacking) - set(agreement.newcomers)),
        consecutive=agreement.consecutive,
        ages_s=agreement.ages_s,
        samples_at_risk=agreement.at_risk,
        shares=reach.shared_by.size if reach else agreement.size_before,
        shares_lost=len(reach.gone if reach else agreement.lost),
        gradients=len(elements),
        gradients_done=sum(whole),
        elements=sum(elements),
        elements_done=sum(size for size, done in zip(elements, whole, strict=True) if done),
        closed=agreement.closed,
        diverged=agreement.diverged,
        checkpoint_step=back[0] if back else None,
        checkpoint_age_s=back[1] if back else None,
        costs=Costs(
            replay_s=replay_s,
            forward_s=None if agreement.closed else agreement.reduction_s * missing / max(sum(elements), 1),
            restart_s=replay_s * (agreement.frontier.step - back[0] + 1) if back else None,
        ),
    )


def newest_copy(agreement: Agreement) -> tuple[int, float] | None:
    """Step and age, in seconds, of the copy that the group would go back to, in memory or durable; None without one."""
    ways = [(copy.step, copy.age_s) for copy in agreement.copies[:1]]
    return max([*ways, *([] if agreement.durable is None else [agreement.durable])], default=None)


def agree(comm: Collectives, mine: Standing, schema: Sequence[str], processes: Sequence[int] = ()) -> Agreement:
    """Exchange standings; blocks until every worker of the group has given its own.

    Args:
        comm: collectives of the new group.
        mine: this worker's standing; ``mine.schema`` is the hash of ``schema``.
        schema: one line for each tensor: name, shape, dtype; sent only if the hashes differ.
        processes: of the last group that this worker agreed in; sent only if that is not the same group on all.

    Raises:
        DivergenceError: the state of two workers differs in names, shapes or dtypes; names the first difference.
    """
    standings: list[Standing] = comm.allgather_object(mine, "standing")
    if len({standing.schema for standing in standings}) > 1:
        _explain_mismatch(comm.allgather_object(list(schema), "schema"))
    _check_stores([standing.store for standing in standings])
    agreed_in = [standing.generation for standing in standings]
    if len({generation for generation in agreed_in if generation >= 0}) > 1:
        told: list[Sequence[int]] = comm.allgather_object(processes, "processes")
        return conclude(standings, told[agreed_in.index(max(agreed_in))])
    return conclude(standings)


def _check_stores(stores: Sequence[bool]) -> None:
    if len(set(stores)) > 1:
        raise DivergenceError(
            f"worker {stores.index(True)} has a place for checkpoints, and worker {stores.index(False)} has none: all "
            "workers save together. Give all of them the same elastic.run(checkpoint=...) and HOROVOD_FT_CHECKPOINT"
        )


def _explain_mismatch(schemas: Sequence[Sequence[str]]) -> None:
    for rank, lines in enumerate(schemas):
        if list(lines) == list(schemas[0]):
            continue
        both = zip(schemas[0], lines, strict=False)
        first = next(((a, b) for a, b in both if a != b), ("(nothing more)", "(nothing more)"))
        raise DivergenceError(
            f"worker {rank} trains another model than worker 0: it has {len(lines)} tensors, worker 0 has "
            f"{len(schemas[0])}; the first difference is {first[1]!r} against {first[0]!r}. Build the same model and "
            "optimizer on every worker"
        )


def same_everywhere(comm: Collectives, what: str, value: str) -> None:
    """Make sure that all workers hold the same text.

    Raises:
        DivergenceError: on every worker, if they do not.
    """
    values = comm.allgather_object(value, what)
    if len(set(values)) > 1:
        listed = "; ".join(f"worker {rank}: {text}" for rank, text in enumerate(values))
        raise DivergenceError(f"the workers disagree on the {what}: {listed}")
