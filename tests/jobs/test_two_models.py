"""Two optimizers in a step under lossy forward recovery: each update is finished for itself, with the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from horovod_ft.ledger import verify_ledger
from tests.jobs.harness import Outcome, fault, run_job
from tests.jobs.two_models import FIRST, build, reference

pytestmark = pytest.mark.job

STEP = 4


def dealt(folder: Path) -> dict[int, list[int]]:
    """Rank -> ids of the samples that it was dealt for the step."""
    records = [json.loads(line) for path in (folder / "ledger").glob("*") for line in path.read_text().splitlines()]
    return {
        record["rank"]: record["ids"]
        for record in records
        if (record["kind"], record.get("step"), record.get("generation")) == ("dealt", STEP, 0)
    }


def counted(outcome: Outcome, folder: Path) -> dict[int, dict[str, list[int]]]:
    """What the events and the ledger say of the step that was carried forward."""
    event = outcome.kinds("forward")[0]
    left = [sample for rank, ids in sorted(dealt(folder).items()) if rank not in event.data["gone"] for sample in ids]
    lossy = list(event.data["lossy"])
    if event.data["gradients"] == FIRST:  # the second update came after it, among those who are left
        lossy += [f"opt_second.{name}" for name, _ in build()[1].named_parameters()]
    return {STEP: dict.fromkeys(lossy, left)}


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_kill_in_either_update(tmp_path: Path, after: int) -> None:
    """The first has two gradients: after three it is the second update that fails."""
    late = [] if after else [fault(1, STEP, "forward", kind="slow", seconds=0.5)]
    plan = [*late, fault(1, STEP, "allreduce", after=after)]
    outcome = run_job(tmp_path, plan, script=["tests.jobs.two_models", str(tmp_path)],
                      env={"HOROVOD_FT_POLICY": "lossy_forward"})  # fmt: skip
    assert outcome.finished.returncode == 0, outcome.finished.output[-6000:]
    results = [np.load(path) for path in tmp_path.glob("two-*")]
    assert len(results) == 2
    for name in results[0].files:
        assert results[0][name].tobytes() == results[1][name].tobytes()
    ledger = verify_ledger(tmp_path / "ledger")
    assert ledger.complete, ledger.problems
    assert list(ledger.lossy) == [STEP]
    for name, value in reference(counted(outcome, tmp_path)).items():
        np.testing.assert_allclose(results[0][name], value, rtol=0, atol=1e-10, err_msg=name)
