"""Fault tolerance in a training loop of one's own with Keras: workers die at named moments, and nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from horovod_ft.ledger import verify_ledger
from tests.jobs.keras_jobs import KerasJobs, add_a_worker

pytestmark = pytest.mark.job

EPOCHS = 2
#: Workers that each job begins with, and how many are left after each of its cases.
JOBS: dict[str, tuple[int, dict[str, int]]] = {
    "gradients": (5, {"body": 4, "reduction": 3, "compiled": 2}),
    "updates": (5, {"weighted": 4, "commit": 3, "passes": 2}),
    "tape": (4, {"tape_uneven": 3}),
}
CASES = [(job, case) for job, (_, cases) in JOBS.items() for case in cases]
#: Batches of an epoch, and batches for an update.
BATCHES = {"weighted": 9, "commit": 9, "tape_uneven": 9}
PASSES = {"passes": 2}
#: What breaks inside of a ``tf.function`` enters the training function again; nothing is computed twice for it.
ENTERED = {"compiled": 2}
jobs = KerasJobs("tests.jobs.keras_loop", 120.0)


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the workers of a job have left something. Each job runs once."""
    job = request.node.callspec.params["job"]
    return jobs.once(job, JOBS[job][0], tmp_path_factory)


def left_by(folder: Path, case: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{case}-*.json"))]


@pytest.mark.parametrize(("job", "case"), CASES)
def test_survivors_go_on_to_the_end_and_are_equal(folder: Path, job: str, case: str) -> None:
    left = left_by(folder, case)
    assert len(left) == JOBS[job][1][case]
    first, *others = ({**one, "apart": None} for one in left)
    for other in others:
        assert other == first
    assert first["size"] == len(left)
    assert first["waiting"] == []  # every fault has struck


@pytest.mark.parametrize(("job", "case"), CASES)
def test_they_end_where_one_process_without_failures_ends(folder: Path, job: str, case: str) -> None:
    (apart,) = [one["apart"] for one in left_by(folder, case) if "apart" in one]
    assert max(apart.values()) < 1e-5, apart


@pytest.mark.parametrize(("job", "case"), CASES)
def test_each_step_counts_once(folder: Path, job: str, case: str) -> None:
    batches = BATCHES.get(case, 8)
    steps = EPOCHS * batches // PASSES.get(case, 1)
    for one in left_by(folder, case):
        assert one["batches"] == [epoch for epoch in range(EPOCHS) for _ in range(batches)]
        assert one["steps"] == steps
        assert one["entered"] == ENTERED.get(case, 1)
    report = verify_ledger(folder / f"ledger-{case}")
    assert report.exact, report.problems
    assert (report.epochs, report.steps) == (EPOCHS, steps)


def test_a_newcomer_enters_at_the_step_of_the_others(tmp_path: Path) -> None:
    left = left_by(jobs.run(tmp_path, "newcomer", 2, add_a_worker), "newcomer")
    assert [one["size"] for one in left] == [3, 3, 3]
    assert sorted(one.pop("first") for one in left)[:2] == [1, 1]
    (apart,) = [one.pop("apart") for one in left if "apart" in one]
    assert max(apart.values()) < 1e-5, apart
    assert left == [left[0]] * 3
    assert left[0]["batches"] == [epoch for epoch in range(3) for _ in range(9)]
    report = verify_ledger(tmp_path / "ledger-newcomer")
    assert report.exact, report.problems
