"""Runs made by hand: events as workers would have recorded them, at moments that a test can compute with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from horovod_ft.events import Event, file_name

#: Wall clock at second 0 of every run, and how far the monotonic clock is behind it.
EPOCH = 1000.0
#: Seconds from the notice of a failure to the end of each stage that follows.
STAGE_ENDS = {
    "sockets_cut": 0.002, "drained": 0.005, "reformed": 0.102, "agreed": 0.112, "decision": 0.113, "transferred": 0.123,
}  # fmt: skip
RECOVERED, RESUMED = 0.124, 0.173
SINCE_COMMIT = 0.027
GAP = SINCE_COMMIT + RESUMED  # 0.2


def name(start_rank: int) -> str:
    """A worker's name, on a host of its own."""
    return f"node{start_rank}:{start_rank}:{100 + start_rank}"


class Run:
    """Events of a run. Workers are given by start rank, or by their whole name."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(
        self,
        at: float,
        kind: str,
        worker: int | str,
        *,
        generation: int = 0,
        rank: int = 0,
        size: int = 3,
        step: int = 0,
        **data: Any,
    ) -> None:
        who = name(worker) if isinstance(worker, int) else worker
        self.events.append(Event(kind, EPOCH + at, at, who, generation, rank, size, step, data))

    def form(self, size: int = 3, at: float = 1.0) -> Run:
        """A job of that many workers comes up; it took a second."""
        for rank in range(size):
            self.add(at - 1, "init", rank, rank=rank, size=size)
            self.add(at, "formed", rank, rank=rank, size=size)
        return self

    def notice(
        self,
        worker: int | str,
        at: float,
        *,
        generation: int = 0,
        during: str = "training",
        since: float = SINCE_COMMIT,
    ) -> None:
        """One worker notices a failure, ``since`` seconds after its last commit."""
        self.add(at, "failure_detected", worker, generation=generation, during=during, since_last_commit_s=since)

    def recover(
        self,
        worker: int | str,
        at: float,
        *,
        lost: list[int],
        rank: int = 0,
        size: int = 2,
        generation: int = 1,
        step: int = 4,
        resumed: bool = True,
        since: float = SINCE_COMMIT,
    ) -> None:
        """One worker comes through one failure, which it noticed at ``at``; ``generation`` is that afterwards."""
        self.notice(worker, at, generation=generation - 1, since=since)
        for stage, after in STAGE_ENDS.items():
            data = {"newest": step, "lost": lost} if stage == "agreed" else {}
            self.add(at + after, stage, worker, generation=generation - 1, rank=rank, size=size, step=step, **data)
        where: dict[str, Any] = {"generation": generation, "rank": rank, "size": size}
        self.add(at + RECOVERED, "recovered", worker, step=step, **where)
        if resumed:
            self.add(at + RESUMED, "resumed", worker, step=step + 1, gap_s=GAP, **where)

    def write(self, folder: Path) -> Path:
        """As files in a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for event in self.events:
            with (folder / f"events-{file_name(event.worker)}.jsonl").open("a") as file:
                file.write(event.to_json() + "\n")
        return folder


def lost_one() -> Run:
    """Three workers; start rank 1 is killed at step 5, and the two others finish."""
    run = Run().form()
    run.add(5.0, "fault", 1, rank=1, step=4, fault="kill worker 1 at step 5 in backward", fault_kind="kill")
    run.recover(0, 5.01, lost=[1], rank=0)
    run.recover(2, 5.02, lost=[1], rank=1)
    for rank, worker in enumerate((0, 2)):
        run.add(9.0, "finished", worker, generation=1, rank=rank, size=2, step=20)
    return run
