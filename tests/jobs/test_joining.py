"""Workers that come and go without a failure, or while there is one."""

from __future__ import annotations

from pathlib import Path

import pytest

from horovod_ft.testing.local_job import LocalJob
from tests.jobs.harness import (
    Arrays,
    Outcome,
    check_close,
    check_like_reference,
    check_sound,
    fault,
    recovered_at,
    run_job,
)

pytestmark = pytest.mark.job


def add_a_worker(job: LocalJob) -> None:
    """Once all hold, add a host, and let go when the driver has announced it."""
    holding(job, 2)
    job.add_host()
    heard(job)


def holding(job: LocalJob, workers: int) -> None:
    job.wait_for("the workers to hold", lambda job: len(list(job.folder.glob("holding-*"))) == workers)


def heard(job: LocalJob) -> None:
    job.wait_for("the driver's announcement", lambda job: (job.folder / "heard").exists())
    (job.folder / "release").touch()


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adamw"])
def test_a_newcomer_is_equal_to_the_others(tmp_path: Path, optimizer: str) -> None:
    outcome = run_job(tmp_path, workers=2, during=add_a_worker, optimizer=optimizer, hold_before=5)
    check_sound(outcome, {0, 1, 2})
    check_like_reference(outcome)
    assert outcome.results[0].scalars["size"] == 3
    assert [event.step for event in outcome.kinds("joined")] == [6]


def test_a_newcomer_takes_over_the_running_statistics_of_rank_zero(tmp_path: Path) -> None:
    outcome = run_job(tmp_path, workers=2, during=add_a_worker, model="batchnorm", hold_before=17)
    check_sound(outcome, {0, 1, 2})
    zero, newcomer = (
        next(result for result in outcome.results if result.scalars["rank"] == rank) for rank in (0, 2)
    )
    assert (newcomer.arrays["model.1.running_mean"] == zero.arrays["model.1.running_mean"]).all()


def test_the_holder_dies_while_a_newcomer_receives_the_state(tmp_path: Path) -> None:
    outcome = run_job(tmp_path, [fault(0, 7, "transfer")], workers=2, during=add_a_worker, hold_before=5)
    check_sound(outcome, {1, 2})
    check_like_reference(outcome)


def test_a_killed_worker_is_replaced_by_a_new_host(tmp_path: Path) -> None:
    outcome = run_job(tmp_path, [fault(1, 3, "allreduce", after=3)], during=add_a_worker, hold_before=8)
    check_sound(outcome, {0, 2})
    check_like_reference(outcome)
    assert [result.scalars["size"] for result in outcome.results] == [3, 3, 3]


def remove_worker_one(job: LocalJob) -> None:
    """Take the host of start rank 1 off the list while all hold before a step."""
    holding(job, 3)
    worker = next(event.worker for event in job.events() if event.worker.rsplit(":", 2)[1] == "1")
    job.remove_host(worker.rsplit(":", 2)[0])
    heard(job)


@pytest.mark.parametrize("model", ["batchnorm", "dropout"])
def test_layers_that_depend_on_the_split_go_on_as_after_a_graceful_removal(tmp_path: Path, model: str) -> None:
    killed = run_job(tmp_path / "killed", [fault(1, 6, "allreduce", after=0)], model=model)
    check_sound(killed, {0, 2})
    assert recovered_at(killed) == [(5, 2)]
    removed = run_job(tmp_path / "removed", during=remove_worker_one, model=model, hold_before=4)
    check_sound(removed, {0, 2})
    for result in killed.results:
        check_close(result.arrays, same_worker(removed, result.worker))


def same_worker(outcome: Outcome, worker: str) -> Arrays:
    """Arrays of the worker with the same start rank in another job."""
    start_rank = worker.split("-")[-2]
    return next(result.arrays for result in outcome.results if result.worker.split("-")[-2] == start_rank)
