"""Workers whose models have gradients for different variables: an error on all of them, where there was a stall."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from horovod_ft.testing.local_job import LocalJob
from tests.jobs.harness import HERE, LAUNCHER

pytestmark = pytest.mark.job


def test_workers_that_train_different_layers_are_told(tmp_path: Path) -> None:
    env = {"PYTHONPATH": str(HERE.parent.parent), "TF_CPP_MIN_LOG_LEVEL": "3", "TF_NUM_INTRAOP_THREADS": "1"}
    command = [sys.executable, "-m", "tests.jobs.keras_unequal", str(tmp_path)]
    with LocalJob(command, 2, tmp_path, min_workers=2, env=env, launcher=LAUNCHER) as job:
        finished = job.wait(120.0)
    assert finished.returncode == 0, finished.output[-6000:]
    for rank, lengths in enumerate([4, 2]):
        left = json.loads((tmp_path / f"unequal-{rank}.json").read_text())
        for kind, text in (left["fit"], left["tape"], left["callback"]):
            assert kind == "InvalidArgumentError"
            assert "gradients for different variables" in text
            assert f"this one has {lengths}: " in text
