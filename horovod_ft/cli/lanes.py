"""The life of each worker as stretches of time, for the chart. No matplotlib here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from horovod_ft.events import Event
from horovod_ft.timeline import SETTLED, by_worker, labels

#: What a worker is doing. While it has ended there is no stretch; a second training in the same process may follow.
STARTING, TRAINING, REGROUPING, ENDED = "starting", "training", "regrouping", "ended"


@dataclass(frozen=True)
class Stretch:
    """From ``start`` to ``stop``, wall seconds since the epoch, a worker was in one condition.

    Attributes:
        what: STARTING, TRAINING or REGROUPING.
        generation: of the group; for the two others of the group before.
    """

    what: str
    generation: int
    start: float
    stop: float


@dataclass(frozen=True)
class Lane:
    """The life of one worker.

    Attributes:
        worker: its name.
        label: short and unique.
        stretches: in order.
        vanished: it ended without saying so: it was killed, or its host was taken away.
    """

    worker: str
    label: str
    stretches: tuple[Stretch, ...]
    vanished: bool


def lanes(events: Iterable[Event]) -> list[Lane]:
    """One lane a worker: those that began the run by start rank, then newcomers as they came."""
    workers = by_worker(events)
    names = labels(workers)
    found = [Lane(worker, names[worker], *_life(worker, workers)) for worker in workers]
    return sorted(found, key=lambda lane: _order(workers[lane.worker]))


def _order(its: Sequence[Event]) -> tuple[float, int]:
    newcomer = any(event.kind == "joined" for event in its)
    return (its[0].wall if newcomer else 0.0), int(its[0].worker.rsplit(":", 2)[1])


def _life(worker: str, workers: Mapping[str, Sequence[Event]]) -> tuple[tuple[Stretch, ...], bool]:
    its = workers[worker]
    stretches: list[Stretch] = []
    what, generation, start = STARTING, its[0].generation, its[0].wall
    for event in its:
        turned = _turn(event, what)
        if turned is not None:
            if what != ENDED:
                stretches.append(Stretch(what, generation, start, event.wall))
            what, generation, start = turned, event.generation, event.wall
    if what != ENDED:
        stretches.append(Stretch(what, generation, start, _last_sign(worker, workers)))
    return tuple(stretches), what != ENDED


def _turn(event: Event, what: str) -> str | None:
    """The condition that begins with an event; None if it changes nothing."""
    if event.kind in SETTLED:
        return TRAINING
    if event.kind in ("finished", "aborted"):
        return ENDED
    if event.kind in ("failure_detected", "resizing") and what == TRAINING:
        return REGROUPING
    return None


def _last_sign(worker: str, workers: Mapping[str, Sequence[Event]]) -> float:
    """When a worker that vanished was gone: the others notice it in the last group that it was in.

    Without anybody who noticed, it is taken to have lived as long as there are events.
    """
    its = workers[worker]
    if its[-1].kind == "fault":
        return its[-1].wall
    others = [event for name, theirs in workers.items() if name != worker for event in theirs]
    noticed = [
        event.wall
        for event in others
        if event.kind == "failure_detected" and event.generation == its[-1].generation and event.wall >= its[-1].wall
    ]
    if noticed:
        return min(noticed)
    if its[-1].kind == "resizing":  # the driver had no place for it in the next group
        return its[-1].wall
    return max(event.wall for event in (*others, its[-1]))
