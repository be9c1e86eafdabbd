"""``model.fit`` on two workers: equal weights, and those of one process that computes on whole batches."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from horovod_ft.testing.local_job import LocalJob
from tests.jobs.harness import HERE, LAUNCHER

pytestmark = [pytest.mark.job, pytest.mark.timeout(330)]

CASES = [
    "sgd", "eagerly", "adamw", "clipnorm", "sum", "steps_per_execution", "accumulation", "no_gradient", "embedding",
    "embedding_adam", "embedding_accumulation", "scaled_outside", "scaled_inside", "mixed_float16", "compression",
]  # fmt: skip
#: What is computed or sent in float16.
COARSE = {"mixed_float16": 2e-3, "compression": 2e-3}

Left = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> list[Left]:
    """What each of the two workers has left, by configuration."""
    folder = tmp_path_factory.mktemp("keras")
    env = {"PYTHONPATH": str(HERE.parent.parent), "TF_CPP_MIN_LOG_LEVEL": "3", "TF_NUM_INTRAOP_THREADS": "1"}
    command = [sys.executable, "-m", "tests.jobs.keras_training", str(folder)]
    with LocalJob(command, 2, folder, min_workers=2, env=env, launcher=LAUNCHER) as job:
        finished = job.wait(280.0)
    assert finished.returncode == 0, finished.output[-6000:]
    return [json.loads((folder / f"keras-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_workers_have_equal_weights(left: list[Left], case: str) -> None:
    assert left[0][case]["digest"] == left[1][case]["digest"]


@pytest.mark.parametrize("case", CASES)
def test_the_weights_are_those_of_one_process(left: list[Left], case: str) -> None:
    apart = [worker[case]["apart"] for worker in left if "apart" in worker[case]]
    assert len(apart) == 1
    assert apart[0] < COARSE.get(case, 1e-5)


def test_workers_leave_out_an_update_together(left: list[Left]) -> None:
    """A gradient of one of them was not finite; two times, in two epochs of four steps."""
    assert left[0]["skipped"] == left[1]["skipped"]
    assert left[0]["skipped"]["scale"] == 16.0
    assert left[0]["skipped"]["steps"] == 6


def test_callbacks_make_workers_equal_that_begin_apart(left: list[Left]) -> None:
    assert left[0]["callbacks"] == left[1]["callbacks"]
    assert left[0]["callbacks"]["history"]["lr"] == pytest.approx([0.05, 0.05])


def test_a_training_loop_with_a_tape_ends_with_equal_weights(left: list[Left]) -> None:
    assert left[0]["by_hand"] == left[1]["by_hand"]


@pytest.mark.parametrize("case", ["weighted", "weighted_rows", "dealt"])
def test_slices_of_different_size_count_by_their_samples(left: list[Left], case: str) -> None:
    assert left[0][case]["digest"] == left[1][case]["digest"]
    assert max(worker[case]["apart"] for worker in left) < 1e-5


def test_the_predictions_of_all_workers_are_those_of_the_whole(left: list[Left]) -> None:
    for worker in left:
        assert worker["predicted"]["rows"] == 13
        assert worker["predicted"]["apart"] < 1e-6


def test_the_collectives_of_the_runtime(left: list[Left]) -> None:
    expected = {"asked": [0, 0b11, 8], "data": [1] * 5, "ranks": [0, 1], "received": ["from", 0]}
    assert [worker["objects"] for worker in left] == [expected, expected]


def test_stock_horovod_does_not_average_on_keras_3(left: list[Left]) -> None:
    """Why there is a ``DistributedOptimizer`` of ours. It is out of date if this fails."""
    assert left[0]["stock"]["digest"] != left[1]["stock"]["digest"]
