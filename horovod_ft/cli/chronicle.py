"""The story of a run in a few rows: what the workers recorded one by one, told once for all of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from horovod_ft.events import Event
from horovod_ft.timeline import by_worker, labels


@dataclass(frozen=True)
class Row:
    """One thing that happened.

    Attributes:
        at_s: when the first worker recorded it, in seconds since the first event of the run.
        kind: of the events behind it.
        step: committed steps at that moment; the most of all workers.
        text: what happened.
        workers: labels of the workers that recorded it.
    """

    at_s: float
    kind: str
    step: int
    text: str
    workers: tuple[str, ...]


def chronicle(events: Iterable[Event]) -> list[Row]:
    """The rows of a run, in order of time.

    Events of one kind and generation are one row, once for each time that a worker recorded it: all workers notice the
    same failure. Faults and warnings stay apart, each is a thing of its own.
    """
    workers = by_worker(events)
    names = labels(workers)
    groups: dict[tuple[object, ...], list[Event]] = defaultdict(list)
    for its in workers.values():
        seen: Counter[tuple[object, ...]] = Counter()
        for event in its:
            if event.kind in TELL:
                own = event.data.get("fault") or event.data.get("text")
                key = (event.kind, event.generation, own)
                groups[(*key, seen[key])].append(event)
                seen[key] += 1
    origin = min((event.wall for its in workers.values() for event in its), default=0.0)
    rows = [_row(group, origin, names) for group in groups.values()]
    return sorted(rows, key=lambda row: row.at_s)


def _row(group: Sequence[Event], origin: float, names: dict[str, str]) -> Row:
    first = min(group, key=lambda event: event.wall)
    return Row(
        at_s=first.wall - origin,
        kind=first.kind,
        step=max(event.step for event in group),
        text=TELL[first.kind](group),
        workers=tuple(sorted((names[event.worker] for event in group), key=_by_number)),
    )


def _by_number(label: str) -> tuple[int, str]:
    return int(label.split("@", 1)[0]), label


def _formed(group: Sequence[Event]) -> str:
    return f"training begins with {_workers(group[0].size)}"


def _fault(group: Sequence[Event]) -> str:
    return f"fault: {group[0].data['fault']}"


def _noticed(group: Sequence[Event]) -> str:
    return f"failure noticed, during {group[0].data.get('during', 'training')}"


def _recovered(group: Sequence[Event]) -> str:
    return f"recovered: the group has {_workers(group[0].size)} now"


def _forward(group: Sequence[Event]) -> str:
    data = group[0].data
    one = len(data["gone"]) == 1
    what = f"carried forward without {'rank' if one else 'the ranks'} {', '.join(map(str, data['gone']))}"
    if not data["lossy"]:
        return f"{what}: nothing is lost of the update"
    part = data["lossy_elements"] / data["elements"]
    lossy = f"{len(data['lossy'])} of {data['gradients']} gradients ({part:.0%} of the update)"
    return f"{what}: {lossy} lack {'its' if one else 'their'} part"


def _restarted(group: Sequence[Event]) -> str:
    data = group[0].data
    again = f"{data['lost_steps']} step{'' if data['lost_steps'] == 1 else 's'} will be computed again"
    return f"went back to step {data['to']}: {again}"


def _restored(group: Sequence[Event]) -> str:
    data = group[0].data
    slowest = max(float(event.data["duration_s"]) for event in group)
    return f"restored step {data['to']} from {data['folder']}: {data['nbytes'] / 1e6:.1f} MB in {slowest:.2f} s"


def _save_late(group: Sequence[Event]) -> str:
    return "a checkpoint is due, and the one before is still being written"


def _preempted(group: Sequence[Event]) -> str:
    return "the job is about to be ended from outside: the workers leave"


def _resumed(group: Sequence[Event]) -> str:
    return f"goes on: {max(float(event.data['gap_s']) for event in group):.3f} s from the last step to this one"


def _joined(group: Sequence[Event]) -> str:
    return f"joined a group of {group[0].size}"


def _resizing(group: Sequence[Event]) -> str:
    return "workers come or go: forming the group anew"


def _regrouped(group: Sequence[Event]) -> str:
    return f"regrouped: the group has {_workers(group[0].size)} now"


def _aborted(group: Sequence[Event]) -> str:
    return f"gave up: {group[0].data.get('reason', 'no reason was recorded')}"


def _warning(group: Sequence[Event]) -> str:
    return f"warning: {group[0].data.get('text', '')}"


def _finished(group: Sequence[Event]) -> str:
    return "finished"


#: The kinds that make rows; all others are details of these.
TELL: dict[str, Callable[[Sequence[Event]], str]] = {
    "formed": _formed,
    "fault": _fault,
    "failure_detected": _noticed,
    "forward": _forward,
    "restarted": _restarted,
    "restored": _restored,
    "save_late": _save_late,
    "preempted": _preempted,
    "recovered": _recovered,
    "resumed": _resumed,
    "joined": _joined,
    "resizing": _resizing,
    "regrouped": _regrouped,
    "aborted": _aborted,
    "warning": _warning,
    "finished": _finished,
}


def _workers(count: int) -> str:
    return f"{count} worker{'' if count == 1 else 's'}"
