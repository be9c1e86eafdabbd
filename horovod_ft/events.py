"""What happened and when: event records, the JSON-lines file a worker writes, and observers.

An observer can never hurt training: one that fails is logged and detached. Records are written with one ``write`` call
each and no buffer in this process, so what happened before a SIGKILL is on record.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from horovod_ft.settings import writable_folder

log = logging.getLogger("horovod_ft")

#: The stages of one recovery, in order; each is an event kind. ``resumed`` is the first commit after it.
STAGES = (
    "failure_detected", "sockets_cut", "drained", "reformed", "agreed",
    "decision", "transferred", "recovered", "resumed",
)  # fmt: skip


@dataclass(frozen=True)
class Event:
    """One record.

    Attributes:
        kind: what happened: one of STAGES, or started, joined, resized, restarted, finished, fault, aborted, warning.
        wall: seconds since the epoch.
        mono: CLOCK_MONOTONIC seconds; comparable between workers of one host.
        worker: ``host:start_rank:pid``, which names a process for its whole life.
        generation, rank, size: the group at that moment; generation counts reforms from 0.
        step: committed steps at that moment.
        data: whatever belongs to the kind; durations are in seconds and end in ``_s``.
    """

    kind: str
    wall: float
    mono: float
    worker: str
    generation: int
    rank: int
    size: int
    step: int
    data: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(self.__dict__, default=str, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> Event:
        return cls(**json.loads(line))


class Observer(Protocol):
    """Anything that wants to see events, in the training thread: it must be quick and must not call collectives."""

    def __call__(self, event: Event) -> None: ...


class JsonLines:
    """Append records to a file, one ``write(2)`` a record, so that a killed process leaves whole lines behind."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, line: str) -> None:
        os.write(self._fd, (line + "\n").encode())

    def close(self) -> None:
        os.close(self._fd)


class EventWriter:
    """The observer behind ``HOROVOD_FT_EVENTS``: one file a worker, named by the worker."""

    def __init__(self, folder: Path, worker: str) -> None:
        writable_folder(folder, "HOROVOD_FT_EVENTS")
        self._lines = JsonLines(folder / f"events-{file_name(worker)}.jsonl")

    def __call__(self, event: Event) -> None:
        self._lines.write(event.to_json())


def file_name(worker: str) -> str:
    """A worker's name as part of a file's name."""
    return worker.replace(":", "-").replace("/", "_")


@dataclass
class Position:
    """Where this worker is; the engine keeps it up to date and every event carries it."""

    generation: int = 0
    rank: int = 0
    size: int = 1
    step: int = 0


class EventBus:
    """Makes events and hands them to the observers.

    Args:
        worker: name of this worker for its whole life.
        wall, mono: clocks, in seconds.
    """

    def __init__(
        self, worker: str, wall: Callable[[], float] = time.time, mono: Callable[[], float] = time.monotonic
    ) -> None:
        self.worker = worker
        self.position = Position()
        self._wall = wall
        self._mono = mono
        self._observers: list[Observer] = []

    def subscribe(self, observer: Observer) -> None:
        self._observers.append(observer)

    def emit(self, kind: str, **data: Any) -> Event:
        """Tell all observers; never raises."""
        at = self.position
        event = Event(
            kind, self._wall(), self._mono(), self.worker, at.generation, at.rank, at.size, at.step, data
        )
        for observer in tuple(self._observers):
            try:
                observer(event)
            except Exception:
                log.exception("the observer %r failed and was detached; training goes on", observer)
                self._observers.remove(observer)
        return event


def read_events(folder: Path) -> list[Event]:
    """All events of a run, ordered by wall time. A last line cut short by a full disk is skipped."""
    return sorted(_parse(folder.glob("events-*.jsonl")), key=lambda event: event.wall)


def _parse(paths: Iterator[Path]) -> Iterator[Event]:
    for path in paths:
        for line in path.read_text().splitlines():
            try:
                yield Event.from_json(line)
            except (ValueError, TypeError):
                log.warning("%s: a line that is no event was skipped: %.80r", path, line)
