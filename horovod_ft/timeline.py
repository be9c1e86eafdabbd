"""What the events of a run say about it: its recoveries, stage by stage, and the sizes of its groups. Reads only.

Durations come from the monotonic clock of each worker; moments of different workers are put in order by their wall
clocks, which on several hosts are only as good as their synchronization.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from horovod_ft.events import STAGES, Event

#: Kinds that say: this worker has the group's state, in a new group.
SETTLED = ("formed", "joined", "recovered", "regrouped")


@dataclass(frozen=True)
class Stage:
    """One stage of a recovery on one worker; ``start`` is wall time, seconds since the epoch."""

    name: str
    start: float
    duration_s: float

    @property
    def stop(self) -> float:
        return self.start + self.duration_s


@dataclass(frozen=True)
class Part:
    """One worker's share of a recovery.

    Attributes:
        worker: its name.
        generation: of the group that came out of the recovery.
        stages: in order, without a hole; the first begins with the worker's last commit.
        agreed: the event with what the survivors agreed on, if it was recorded.
        size: workers afterwards.
        gap_s: seconds from the worker's last commit before to its first one after; None if no commit followed.
    """

    worker: str
    generation: int
    stages: tuple[Stage, ...]
    agreed: Event | None
    size: int
    gap_s: float | None

    @property
    def seconds(self) -> dict[str, float]:
        """Stage -> seconds; a stage that took several attempts counts with all of them."""
        spent: dict[str, float] = defaultdict(float)
        for stage in self.stages:
            spent[stage.name] += stage.duration_s
        return dict(spent)


@dataclass(frozen=True)
class Recovery:
    """One recovery, over all workers that came through it.

    Attributes:
        generation: of the group that came out of it.
        step: committed steps that training went on from.
        lost: ranks, in the group before, of the workers that were lost.
        size: workers afterwards.
        gap_s: seconds from a worker's last commit before to its first one after; the longest of all workers. Where no
            commit followed (all steps were done, or the next failure came first) it ends with the recovery.
        stages: name -> seconds that the stage took, median over the workers; ``failure_detected`` counts from the
            last commit, so it holds the part of the step that was lost.
        at: wall time of the first notice of the failure, seconds since the epoch.
        slowest: like ``stages``, for the slowest worker of each stage.
    """

    generation: int
    step: int
    lost: tuple[int, ...]
    size: int
    gap_s: float
    stages: dict[str, float]
    at: float
    slowest: dict[str, float]


def by_worker(events: Iterable[Event]) -> dict[str, list[Event]]:
    """The events of each worker, in their order."""
    workers: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        workers[event.worker].append(event)
    return {worker: sorted(its, key=lambda event: event.mono) for worker, its in workers.items()}


def recoveries(events: Iterable[Event]) -> list[Recovery]:
    """All recoveries that at least one worker came through, in order."""
    shares: dict[int, list[Part]] = defaultdict(list)
    for part in parts(events):
        shares[part.generation].append(part)
    return [_merged(generation, shares[generation]) for generation in sorted(shares)]


def parts(events: Iterable[Event]) -> list[Part]:
    """Every worker's share of every recovery that it came through."""
    return [part for its in by_worker(events).values() for part in _parts(its)]


def _parts(events: Sequence[Event]) -> Iterator[Part]:
    """A worker's events cut into recoveries.

    Each goes from the first notice of a failure to the first commit after it. A failure that comes after the recovery
    and before that commit begins the next one, which then counts from the end of the recovery before it.
    """
    share: list[Event] = []
    began = ended = float("-inf")
    for event in events:
        recovered = bool(share) and share[-1].kind == "recovered"
        if recovered and event.kind in (*STAGES, *SETTLED) and event.kind != "resumed":
            yield _part(share, began)  # the group broke or changed again before the next commit
            ended, share = share[-1].mono, []
        if event.kind == "failure_detected" and not share:
            began = max(ended, event.mono - float(event.data["since_last_commit_s"]))
            share = [event]
        elif share and event.kind in STAGES:
            share.append(event)
            if event.kind == "resumed":
                yield _part(share, began)
                share = []
        elif event.kind in SETTLED:  # it lived through a failure as a newcomer, which is a start and no recovery
            share = []
    if share and share[-1].kind == "recovered":
        yield _part(share, began)


def _part(share: Sequence[Event], began: float) -> Part:
    first, last = share[0], share[-1]
    to_wall = first.wall - first.mono
    moments = [began, *(event.mono for event in share)]
    stages = tuple(
        Stage(event.kind, start + to_wall, event.mono - start) for event, start in zip(share, moments, strict=False)
    )
    agreed = [event for event in share if event.kind == "agreed"]
    gap_s = float(last.data["gap_s"]) if last.kind == "resumed" else None
    return Part(first.worker, last.generation, stages, agreed[-1] if agreed else None, last.size, gap_s)


def _merged(generation: int, shares: Sequence[Part]) -> Recovery:
    seconds: dict[str, list[float]] = defaultdict(list)
    for part in shares:
        for name, value in part.seconds.items():
            seconds[name].append(value)
    agreed = [part.agreed for part in shares if part.agreed is not None]
    gaps = [part.gap_s for part in shares if part.gap_s is not None]
    return Recovery(
        generation=generation,
        step=max((int(event.data["newest"]) for event in agreed), default=0),
        lost=tuple(sorted({int(rank) for event in agreed for rank in event.data["lost"]})),
        size=shares[0].size,
        gap_s=max(gaps or [sum(part.seconds.values()) for part in shares]),
        stages={name: statistics.median(seconds[name]) for name in STAGES if name in seconds},
        at=min(part.stages[0].stop for part in shares),
        slowest={name: max(seconds[name]) for name in STAGES if name in seconds},
    )


def world_sizes(events: Iterable[Event]) -> list[int]:
    """Sizes of the groups that formed, in order of generation; equal neighbours once."""
    formed = {event.generation: event.size for event in events if event.kind in SETTLED and event.kind != "joined"}
    sizes = [formed[generation] for generation in sorted(formed)]
    return [size for index, size in enumerate(sizes) if index == 0 or size != sizes[index - 1]]


def lost_workers(recovery: Recovery, events: Iterable[Event]) -> dict[int, str | None]:
    """Names of the workers behind the ranks that a recovery lost; None for one that no event names."""
    before = [event for event in events if event.kind in SETTLED and event.generation < recovery.generation]
    group = max((event.generation for event in before), default=0)
    held = {event.rank: event.worker for event in before if event.generation == group}
    return {rank: held.get(rank) for rank in recovery.lost}


def labels(workers: Iterable[str]) -> dict[str, str]:
    """The shortest names that tell workers apart: start rank, then with the host, then with the process id too.

    A start rank alone does not name a newcomer: it gets one that was free when it started.
    """
    split = {worker: worker.rsplit(":", 2) for worker in workers}
    ranks = Counter(rank for _, rank, _ in split.values())
    places = Counter((host, rank) for host, rank, _ in split.values())
    names = {}
    for worker, (host, rank, pid) in split.items():
        if ranks[rank] == 1:
            names[worker] = rank
        elif places[host, rank] == 1:
            names[worker] = f"{rank}@{host}"
        else:
            names[worker] = f"{rank}@{host}:{pid}"
    return names
