"""The kinds of faults that are no kill, and faults for a whole host."""

from __future__ import annotations

from pathlib import Path

import pytest

from horovod_ft.testing.local_job import LocalJob, host_name
from tests.jobs.harness import check_like_reference, check_sound, fault, run_job

pytestmark = pytest.mark.job


@pytest.mark.parametrize("kind", ["slow", "stop"])
def test_a_worker_that_pauses_delays_the_others_and_costs_nothing_else(tmp_path: Path, kind: str) -> None:
    outcome = run_job(tmp_path, [fault(1, 5, "backward", kind=kind, seconds=1.5)])
    check_sound(outcome, {0, 1, 2})
    check_like_reference(outcome)
    assert len(outcome.fired()) == 1
    assert not outcome.kinds("failure_detected")
    steps = sorted(event.wall for event in outcome.kinds("finished"))
    assert steps[0] - outcome.kinds("fault")[0].wall >= 1.5


def test_a_fault_can_name_a_host(tmp_path: Path) -> None:
    entry = f"[[fault]]\nhost = '{host_name(2)}'\nstep = 5\nphase = 'allreduce'\nafter = 2\n"
    outcome = run_job(tmp_path, [entry])
    (killed,) = {event.worker.split(":")[0]: event for event in outcome.kinds("fault")}
    assert killed == host_name(2)
    rank = int(outcome.kinds("fault")[0].worker.split(":")[1])
    check_sound(outcome, {0, 1, 2} - {rank})
    check_like_reference(outcome)


GAVE_UP = "gave up: waited 8 s for horovodrun to form a new group"


def kill_the_hung_worker(job: LocalJob) -> None:
    """Once the others have given up: ``horovodrun`` itself waits for every process that it started."""
    job.wait_for("the survivors to give up", lambda job: job.output().count(GAVE_UP) == 2)
    job.kill(1)


def test_nobody_waits_for_a_hung_worker_for_ever_and_in_silence(tmp_path: Path) -> None:
    bounds = {"HOROVOD_FT_TIMEOUT": "8", "HOROVOD_GLOO_TIMEOUT_SECONDS": "3"}
    plan = [fault(1, 5, "backward", kind="stop")]
    outcome = run_job(tmp_path, plan, env=bounds, during=kill_the_hung_worker)
    assert outcome.finished.returncode not in (0, None)
    assert "A hung worker also holds it up" in outcome.finished.output
    assert outcome.finished.leftovers == 0
