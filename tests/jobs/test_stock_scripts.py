"""Scripts written for stock Horovod elastic run after changing one import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.harness import assert_equal_arrays, check_like_reference, run_job

pytestmark = pytest.mark.job


def notes(folder: Path, start_rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"notes-{start_rank}.jsonl").read_text().splitlines()]


def test_a_failure_restores_the_last_commit_and_enters_the_function_again(tmp_path: Path) -> None:
    outcome = run_job(tmp_path, script=["tests.jobs.stock_script", str(tmp_path)])
    assert outcome.finished.returncode == 0, outcome.finished.output[-4000:]
    zero, two = notes(tmp_path, 0), notes(tmp_path, 2)
    assert [note["weights"] for note in zero] == [note["weights"] for note in two]
    entries = [index for index, note in enumerate(zero) if note["kind"] == "enter"]
    assert len(entries) == 2
    committed, entered = zero[entries[1] - 1], zero[entries[1]]
    assert committed["kind"] == "commit"
    for name in ("epoch", "batch", "processed", "weights"):
        assert entered[name] == committed[name]
    assert (entered["epoch"], entered["batch"]) == (1, 3)
    assert (entered["size"], entered["replicas"], entered["lr"]) == (2, 2, 0.02), "the reset callback ran"
    assert zero[-1]["kind"] == "end"
    assert zero[-1]["epoch"] == 3


def test_explicit_commits_with_our_loader_lose_no_sample_over_the_end_of_an_epoch(tmp_path: Path) -> None:
    """The last commit before the failure is of batch 8; the epoch ends with batch 9."""
    outcome = run_job(tmp_path, commit_every=4, kill_before_batch=10)
    assert outcome.finished.returncode == 0, outcome.finished.output[-4000:]
    assert outcome.start_ranks() == {0, 2}
    assert outcome.ledger.exact, outcome.ledger.problems
    check_like_reference(outcome)
    left, right = outcome.results
    assert_equal_arrays(left.arrays, right.arrays)
    assert (left.scalars["epochs_seen"], left.scalars["batches"]) == (2, 18)


def test_a_state_of_another_class_restores_and_syncs_itself(tmp_path: Path) -> None:
    outcome = run_job(tmp_path, script=["tests.jobs.object_state_script", str(tmp_path)])
    assert outcome.finished.returncode == 0, outcome.finished.output[-4000:]
    assert sorted(path.name for path in tmp_path.glob("total-*")) == ["total-0", "total-2"]
    assert {path.read_text() for path in tmp_path.glob("total-*")} == {"30"}
