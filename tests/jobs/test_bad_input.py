"""Bad input ends in a clear error on every worker, at once, and never in a hang."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.jobs.harness import fault, run_job

pytestmark = pytest.mark.job

EXPECTED = {
    "duplicate names": "ConfigurationError: named_parameters: more than one parameter has the name 'a'",
    "missing names": "ConfigurationError: named_parameters lacks 2 of the optimizer's parameters",
    "no length": "ConfigurationError: ElasticDataLoader needs a map-style dataset with __len__",
    "empty dataset": "ConfigurationError: the dataset is empty",
    "batch of zero": "ConfigurationError: global_batch_size is 0",
    "both batch sizes": "ConfigurationError: give either global_batch_size=G",
    "unknown policy": "PolicyError: there is no recovery policy 'lossless'; installed: auto, checkpoint_restart, lossy",
    "step outside run": "UsageError: state.step() was used outside elastic.run",
    "nested steps": "UsageError: state.step() was used inside another state.step()",
    "adasum": "ConfigurationError: op=hvd.Adasum",
    "process set": "ConfigurationError: process_set",
    "no state": "ConfigurationError: the first argument of",
}


def test_what_a_script_can_get_wrong(tmp_path: Path) -> None:
    script = ["tests.jobs.bad_input", str(tmp_path)]
    outcome = run_job(tmp_path, workers=2, script=script)
    assert outcome.finished.returncode == 0, outcome.finished.output[-4000:]
    for rank in range(2):
        said = json.loads((tmp_path / f"said-{rank}.json").read_text())
        assert said.keys() == EXPECTED.keys()
        for case, text in said.items():
            assert text.startswith(EXPECTED[case]), f"worker {rank}, {case}: {text}"


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"HOROVOD_FT_FAULTS": "[[fault]]\nworker = 1\nphase = 'nap'"}, "FaultPlanError: the fault plan in HOROVOD_FT"),
        ({"HOROVOD_FT_FAULTS": "/nowhere/plan.toml"}, "FaultPlanError: cannot read the fault plan /nowhere/plan.toml"),
        ({"HOROVOD_FT_EVENTS": "/dev/null/events"}, "ConfigurationError: cannot write into '/dev/null/events'"),
        ({"HOROVOD_FT_POLICY": "lossless"}, "PolicyError: there is no recovery policy 'lossless'"),
        ({"HOROVOD_FT_EVENT": "x"}, "ConfigurationError: unknown environment variable HOROVOD_FT_EVENT"),
    ],
    ids=["broken plan", "unreadable plan", "events folder", "policy", "misspelled variable"],
)
def test_what_the_environment_can_get_wrong(tmp_path: Path, env: dict[str, str], expected: str) -> None:
    outcome = run_job(tmp_path, workers=2, env=env)
    check_refused(outcome.finished.output, outcome.finished.returncode, expected)


def test_another_model_on_one_worker(tmp_path: Path) -> None:
    script = ["tests.jobs.bad_input", str(tmp_path), "mismatch"]
    outcome = run_job(tmp_path, workers=2, script=script)
    expected = "DivergenceError: worker 1 trains another model than worker 0: it has 3 tensors"
    check_refused(outcome.finished.output, outcome.finished.returncode, expected)
    assert "'model.weight (4, 2) torch.float32' against 'model.weight (3, 2) torch.float32'" in outcome.finished.output


@pytest.mark.parametrize(
    ("own_policy", "expected"),
    [
        ("raises", "raised KeyError(4) when asked about Failure("),
        ("nonsense", "answered 'replay', which is not Replay(), Forward(...), Restart(), Abort(...) or None"),
        ("differs", "disagree on the decision of the recovery policy: worker 0: Replay(); worker 1: Abort(reason='not"),
    ],
)
def test_a_policy_that_fails_ends_the_job_on_all_survivors(tmp_path: Path, own_policy: str, expected: str) -> None:
    outcome = run_job(tmp_path, [fault(1, 5, "allreduce", after=1)], own_policy=own_policy)
    check_refused(outcome.finished.output, outcome.finished.returncode, expected)
    assert not outcome.results
    assert outcome.finished.leftovers == 0


def check_refused(output: str, returncode: int | None, expected: str) -> None:
    """The job ended by itself, and each worker that got to speak said why; horovodrun ends the others meanwhile."""
    assert returncode not in (None, 0), output[-3000:]
    assert expected in output, output[-3000:]


def test_min_np_out_of_reach_ends_the_job_within_the_elastic_timeout(tmp_path: Path) -> None:
    plan = [fault(1, 5, "allreduce", after=1)]
    outcome = run_job(tmp_path, plan, min_workers=3, arguments=["--elastic-timeout", "6"])
    assert outcome.finished.returncode not in (None, 0)
    assert "waited" in outcome.finished.output
    assert "for horovodrun to form a new group" in outcome.finished.output, outcome.finished.output[-3000:]
    assert outcome.finished.leftovers == 0


def test_an_entry_of_a_fault_plan_that_never_fired_is_named(tmp_path: Path) -> None:
    outcome = run_job(tmp_path, [fault(1, 500, "forward")], workers=2)
    assert outcome.finished.returncode == 0
    assert "the fault plan's entry never fired: kill worker 1 at step 500 in forward" in outcome.finished.output
