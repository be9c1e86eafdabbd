"""``horovod-ft run`` around real jobs: status and output, restarts, and what is left after a signal."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from horovod_ft.cli.run import EXIT_GIVEN_UP
from horovod_ft.testing.local_job import Finished, LocalJob
from tests.jobs.harness import HERE, check_like_reference, check_sound, fault, recovered_at, run_job

pytestmark = [pytest.mark.job, pytest.mark.timeout(120)]

WORKERS = 2
BOUND_S = 60.0


def job(folder: Path, how: str, *options: str) -> LocalJob:
    """Its workers load no framework; with the hosts given there is no discovery script to wait for."""
    return LocalJob(
        [sys.executable, "-m", "tests.jobs.run_script", str(folder), how, "--restarts", "-np"], WORKERS, folder,
        env={"PYTHONPATH": str(HERE.parent.parent), "HOROVOD_FT_EVENTS": "", "HOROVOD_FT_LEDGER": ""},
        launcher=[sys.executable, "-m", "horovod_ft.cli.main", "run", *options], fixed_hosts=True,
    )  # fmt: skip


def finished(folder: Path, how: str, *options: str) -> Finished:
    with job(folder, how, *options) as running:
        return running.wait(BOUND_S)


def ran(folder: Path) -> set[str]:
    """Attempt and rank of each worker that has run, such as ``0-1``."""
    return {path.name.removeprefix("ran-") for path in folder.glob("ran-*")}


def test_success_passes_through(tmp_path: Path) -> None:
    ended = finished(tmp_path, "ends well", "--restarts", "2")
    assert (ended.returncode, ended.leftovers) == (0, 0), ended.output
    assert ran(tmp_path) == {"0-0", "0-1"}
    told = [f"[{rank}]<stdout>:attempt 0, argument ['--restarts', '-np']" for rank in range(WORKERS)]
    assert sorted(ended.output.splitlines()) == told


def test_a_job_that_has_lost_all_workers_is_started_again(tmp_path: Path) -> None:
    ended = finished(tmp_path, "killed once", "--restarts", "2", "--backoff", "0.1")
    assert (ended.returncode, ended.leftovers) == (0, 0), ended.output
    assert ran(tmp_path) == {"0-0", "0-1", "1-0", "1-1"}
    assert "was ended by SIGKILL; attempt 2 begins in 0.1 s, restart 1 of 2 within 3600 s" in ended.output


def test_a_budget_that_is_spent(tmp_path: Path) -> None:
    ended = finished(tmp_path, "always killed", "--restarts", "1", "--backoff", "0.1")
    assert (ended.returncode, ended.leftovers) == (EXIT_GIVEN_UP, 0), ended.output
    assert {name[0] for name in ran(tmp_path)} == {"0", "1"}
    assert ended.output.rstrip().endswith("given up, after 1 of 1 restarts within 3600 s")


def test_an_error_of_the_script_is_final(tmp_path: Path) -> None:
    ended = finished(tmp_path, "raises", "--restarts", "2")
    assert (ended.returncode, ended.leftovers) == (1, 0), ended.output
    assert {name[0] for name in ran(tmp_path)} == {"0"}
    assert "ended with status 1, which is of the script's own making" in ended.output


@pytest.mark.parametrize(("how", "grace"), [("waits", "30"), ("stubborn", "1")])
def test_a_signal_leaves_no_process(tmp_path: Path, how: str, grace: str) -> None:
    """Workers that heed it are ended by Horovod's launcher; from those that do not, the bound is ours."""
    with job(tmp_path, how, "--restarts", "2", "--grace", grace) as running:
        running.wait_for("all workers", lambda _: len(ran(tmp_path)) == WORKERS)
        began = time.monotonic()
        running.stop(signal.SIGTERM)
        ended = running.wait(BOUND_S)
        seconds = time.monotonic() - began
    assert (ended.returncode, ended.leftovers) == (128 + signal.SIGTERM, 0), ended.output
    assert "horovod-ft run: nobody in the job listens to a notice of SIGTERM: it is ended at once" in ended.output
    assert "horovod-ft run: the job was ended by SIGTERM" in ended.output
    assert {name[0] for name in ran(tmp_path)} == {"0"}
    assert seconds < 20


def named(folder: Path, what: str) -> int:
    return len(list(folder.glob(f"{what}-*")))


@pytest.mark.parametrize(("status", "code"), [(75, 128 + signal.SIGTERM), (0, 0)])
def test_workers_hear_that_the_job_will_be_ended(tmp_path: Path, status: int, code: int) -> None:
    with job(tmp_path, f"listens {status}", "--restarts", "2") as running:
        running.wait_for("all workers to listen", lambda _: named(tmp_path, "listens") == WORKERS)
        running.stop(signal.SIGTERM)
        ended = running.wait(BOUND_S)
    assert (ended.returncode, ended.leftovers) == (code, 0), ended.output
    assert named(tmp_path, "heard") == WORKERS
    assert {name[0] for name in ran(tmp_path)} == {"0"}
    assert "horovod-ft run: told the job that SIGTERM ends it; it has 30 s for a last checkpoint" in ended.output


def test_a_host_that_all_wait_for_gets_its_worker_again(tmp_path: Path) -> None:
    """With ``--min-np`` equal to ``-np`` nobody can go on before the failed host is back, after about 2 s."""
    outcome = run_job(
        tmp_path, [fault(1, 5, "allreduce")], min_workers=3, arguments=["--blacklist-cooldown-range", "1", "2"]
    )
    check_sound(outcome, {0, 2})  # the new one has begun with rank 2, as one of the survivors had
    check_like_reference(outcome)
    assert len(outcome.results) == 3
    assert recovered_at(outcome) == [(4, 3)]
