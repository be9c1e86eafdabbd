"""What recovery inside ``model.fit`` will rest on: a broken group leaves Keras's variables and compiled steps sound."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from horovod_ft.testing.local_job import LocalJob
from tests.jobs.harness import HERE, LAUNCHER

pytestmark = pytest.mark.job


def test_a_compiled_step_is_run_again_by_the_survivors(tmp_path: Path) -> None:
    env = {"PYTHONPATH": str(HERE.parent.parent), "TF_CPP_MIN_LOG_LEVEL": "3", "TF_NUM_INTRAOP_THREADS": "1"}
    command = [sys.executable, "-m", "tests.jobs.keras_failure", str(tmp_path)]
    with LocalJob(command, 3, tmp_path, env=env, launcher=LAUNCHER) as job:
        finished = job.wait(150.0)
    left = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("keras-*.json")}
    assert left.keys() == {"keras-0", "keras-2"}, finished.output[-6000:]
    assert left["keras-0"] == left["keras-2"]
    assert left["keras-0"]["untouched"] == [True]
    assert left["keras-0"]["sizes"] == [2]
    assert left["keras-0"]["iterations"] == 12
