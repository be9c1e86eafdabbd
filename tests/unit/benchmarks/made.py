"""Runs of ``policy_accuracy.py`` made by hand: what workers leave, and what was read from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.accuracy_runs import Run, Task, measured, summarized
from horovod_ft.faults.plan import Fault
from tests.unit.cli import made
from tests.unit.test_ledger import Workers

KILL = Fault(phase="allreduce", worker=1, step=2, after=3)
#: Three workers, two steps, of which worker 1 does not live through the second.
TASK = Task(seed=1, policy="rollback", lossy=False, plan=(KILL,), workers=3, epochs=1, samples=512)
LOSSY = replace(TASK, policy="lossy_forward", lossy=True)
ENDED: dict[str, Any] = {"steps": 2, "correct": 9876, "of": 10_000, "weights": "abc"}


def clean(seed: int, accuracy: float) -> Run:
    """A run without failures."""
    return Run(seed, "", accuracy, (), 0, 0, 0, 0, 0, 20.0)


def killed(seed: int, policy: str, accuracy: float, *gaps_s: float) -> Run:
    """A run with kills: each one replays a step, and one more is lossy."""
    return Run(seed, policy, accuracy, gaps_s, len(gaps_s), 1, 30, 40, 2, 25.0)


def result(**more: Any) -> dict[str, Any]:
    """What two seeds and two policies say; ``more`` is added."""
    runs = [
        clean(1, 98.0), killed(1, "rollback", 98.0, 0.2, 0.3), killed(1, "lossy_forward", 97.5, 0.1),
        clean(2, 97.0), killed(2, "rollback", 97.1, 0.4), killed(2, "lossy_forward", 97.25, 0.5),
    ]  # fmt: skip
    common = {"workers": 4, "kills": 3, "seeds": 2, "steps": 235, "quick": False}
    return {**common, **summarized(runs, ["rollback", "lossy_forward"], whole=True), **more}


class Left:
    """What a run of ``TASK`` leaves in a folder. Worker 1 dies in step 2."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledger = Workers(folder / "ledger")
        self.ledger.train(range(1, 2), "012")
        self.ledger.dealt(2, "012")

    def replay(self) -> Left:
        """The two others compute step 2 again."""
        self.ledger.failed("02")
        self.ledger.train(range(2, 3), "02", generation=1)
        return self

    def go_forward(self) -> Left:
        """The two others finish step 2 without worker 1, in 5 of 8 numbers."""
        gone = self.ledger.deal(2, 1, 3, 0).ids.tolist()
        for name in "02":
            self.ledger.ledger(name).lossy(2, 0, gone, 5, 8)
        self.ledger.committed(2, "02", generation=0)
        return self

    def events(self, fault: Fault | None = KILL, *, recovered: bool = True) -> Left:
        run = made.Run().form()
        if fault is not None:
            run.add(5.0, "fault", 1, rank=1, step=1, fault=str(fault))
        for rank, worker in enumerate((0, 2) if recovered else ()):
            run.recover(worker, 5.01, lost=[1], rank=rank, step=1)
        run.write(self.folder / "events")
        return self

    def survivors(self, *ranks: int, **more: Any) -> Left:
        """The last of them says ``more``."""
        for rank in ranks:
            told = {**ENDED, **(more if rank == ranks[-1] else {})}
            (self.folder / f"survivor-{rank}.json").write_text(json.dumps(told))
        return self

    def measured(self, task: Task = TASK) -> Run:
        return measured(task, self.folder, self.folder / "events", self.folder / "ledger", 25.0)
