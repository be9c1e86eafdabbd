"""A Keras script written for stock Horovod elastic runs after changing one import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.harness import run_job

pytestmark = pytest.mark.job


def notes(folder: Path, start_rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"notes-{start_rank}.jsonl").read_text().splitlines()]


def test_a_failure_in_fit_restores_the_last_commit_and_enters_the_function_again(tmp_path: Path) -> None:
    outcome = run_job(tmp_path, script=["tests.jobs.keras_stock_script", str(tmp_path)])
    assert outcome.finished.returncode == 0, outcome.finished.output[-4000:]
    zero, two = notes(tmp_path, 0), notes(tmp_path, 2)
    assert [note["weights"] for note in zero] == [note["weights"] for note in two]
    first, second = (index for index, note in enumerate(zero) if note["kind"] == "enter")
    entered, committed = zero[second], zero[second - 3]  # two more batches were not committed
    for name in ("epoch", "batch", "weights"):
        assert entered[name] == committed[name]
    assert (entered["epoch"], entered["batch"]) == (1, 1)
    assert (entered["size"], entered["rate"]) == (2, 0.02), "the reset callback ran"
    assert (first, zero[-1]["kind"], zero[-1]["epoch"]) == (0, "end", 3)
