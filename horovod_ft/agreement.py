"""What a group agrees on when it forms anew: who has the newest state, who lacks it, and that all fit together.

One small allgather. Every worker then computes the same Agreement from the same standings; nobody is asked to decide
for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from horovod_ft.committer import Frontier
from horovod_ft.data import Range
from horovod_ft.errors import DivergenceError, RecoveryError
from horovod_ft.membership.base import Collectives


class Resume(Enum):
    """Where a worker goes on after the group has formed."""

    IN_PLACE = "in place"  # inside its training loop
    REENTER = "reenter"  # at the top of the training function
    FINISHING = "finishing"  # its training function has returned


class Standing(NamedTuple):
    """What one worker tells the others.

    Attributes:
        frontier: how far its parameters are.
        fresh: its process has just begun.
        torn: a transfer into it was cut off.
        generation, rank, size: the last group it agreed in; generation -1 if there is none yet.
        computed_by: generation that computed the open step's first update, if one is applied.
        resume: where it goes on.
        schema: hash of names, shapes and dtypes of its state.
        consecutive: its failures since its last commit; 0 if it comes to this group without one.
        open_ranges: the global batches of its open step.
    """

    frontier: Frontier
    fresh: bool
    torn: bool
    generation: int
    rank: int
    size: int
    computed_by: int | None
    resume: Resume
    schema: str
    consecutive: int
    open_ranges: tuple[Range, ...]

    @property
    def sound(self) -> bool:
        """It has the group's state."""
        return not (self.fresh or self.torn)


@dataclass(frozen=True)
class Agreement:
    """The same value on every worker.

    Attributes:
        frontier: of the newest sound state.
        holders: ranks, in the new group, that have it. At the start of a job one alone, whose state all begin with:
            rank 0, or the first that a start that was cut off has left as it was.
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


def conclude(standings: Sequence[Standing]) -> Agreement:
    """The agreement that follows from the standings, in order of the new ranks.

    Raises:
        RecoveryError: workers survived, but none of them has a whole state.
    """
    sound = [rank for rank, standing in enumerate(standings) if standing.sound]
    fresh = tuple(rank for rank, standing in enumerate(standings) if standing.fresh)
    start = len(fresh) == len(standings)
    if start:
        sound = [rank for rank, standing in enumerate(standings) if not standing.torn][:1]
    if not sound:
        raise RecoveryError(
            "the last workers with a whole state died while they were sending it to the others: no replica is left. "
            "Start the job again"
        )
    newest = max(standings[rank].frontier for rank in sound)
    holders = tuple(rank for rank in sound if standings[rank].frontier == newest)
    previous = max(standings, key=lambda standing: standing.generation)
    survivors = tuple(standing.rank for standing in standings if standing.generation == previous.generation)
    return Agreement(
        frontier=newest,
        holders=holders,
        lacking=tuple(rank for rank in range(len(standings)) if rank not in holders),
        newcomers=fresh,
        generation=previous.generation + 1,
        start=start,
        computed_by=standings[holders[0]].computed_by,
        reenter=any(standing.resume is not Resume.FINISHING for standing in standings),
        lost=() if start else tuple(sorted(set(range(previous.size)) - set(survivors))),
        survivors=() if start else survivors,
        size_before=previous.size,
        consecutive=max(standing.consecutive for standing in standings),
        open_ranges=standings[holders[0]].open_ranges if newest.updates else (),
        at_risk=max(_samples(standing.open_ranges) for standing in standings),
    )


def _samples(ranges: Sequence[Range]) -> int:
    return sum(stop - start for _, start, stop in ranges)


def agree(comm: Collectives, mine: Standing, schema: Sequence[str]) -> Agreement:
    """Exchange standings; blocks until every worker of the group has given its own.

    Args:
        comm: collectives of the new group.
        mine: this worker's standing; ``mine.schema`` is the hash of ``schema``.
        schema: one line for each tensor: name, shape, dtype; sent only if the hashes differ.

    Raises:
        DivergenceError: the state of two workers differs in names, shapes or dtypes; names the first difference.
    """
    standings: list[Standing] = comm.allgather_object(mine, "standing")
    if len({standing.schema for standing in standings}) > 1:
        _explain_mismatch(comm.allgather_object(list(schema), "schema"))
    return conclude(standings)


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
