"""``horovod-ft chaos`` around a real job: it says which entries of the plan fired, and the job survives them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from horovod_ft.cli.chaos import EXIT_NOT_FIRED
from horovod_ft.testing.local_job import LocalJob
from tests.jobs.harness import HERE, LAUNCHER, fault
from tests.jobs.task import Config

pytestmark = pytest.mark.job

WORKERS = 3


def test_one_entry_that_fires_and_one_that_cannot(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(fault(1, 5, "allreduce", after=3) + fault(0, 100_000, "forward"))
    config = Config(folder=str(tmp_path))
    chaos = [sys.executable, "-m", "horovod_ft.cli.main", "chaos", "--plan", str(plan), "--"]
    with LocalJob(
        [sys.executable, "-m", "tests.jobs.training", config.write()], WORKERS, tmp_path,
        env={"PYTHONPATH": str(HERE.parent.parent), "COLUMNS": "120"},
        launcher=[*chaos, *LAUNCHER],
    ) as job:  # fmt: skip
        finished = job.wait(100)
    assert finished.returncode == EXIT_NOT_FIRED, finished.output[-6000:]
    rows = [" ".join(line.split()) for line in finished.output.splitlines()]
    assert "kill worker 1 at step 5 in allreduce after 3 gradients yes 1" in rows
    assert "kill worker 0 at step 100000 in forward never" in rows
    assert {event.worker.rsplit(":", 2)[1] for event in job.events() if event.kind == "finished"} == {"0", "2"}
    assert len(list(tmp_path.glob("result-*"))) == WORKERS - 1
    assert finished.leftovers == 0
