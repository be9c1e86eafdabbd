"""Lossy forward recovery under ``horovodrun``: the survivors finish the mini-batch, all with the same bits."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from horovod_ft.events import Event
from tests.jobs.harness import Outcome, check_like_reference, check_sound, fault, run_job
from tests.jobs.task import Carried

pytestmark = pytest.mark.job

GRADIENTS = 6  # of the model: three linear layers
POLICY = "lossy_forward"


def forwards(outcome: Outcome) -> dict[int, Event]:
    """Step -> what the survivors recorded of carrying it forward; they must agree."""
    found: dict[int, Event] = {}
    for event in outcome.kinds("forward"):
        first = found.setdefault(event.step + 1, event)
        told = ("gone", "gradients", "elements", "lossy", "lossy_elements", "samples")
        assert [first.data[name] for name in told] == [event.data[name] for name in told]
    return found


def dealt(outcome: Outcome, step: int, generation: int = 0) -> dict[int, list[int]]:
    """Rank -> sample ids that it was dealt for a step, from the ledger's files."""
    records = [
        json.loads(line)
        for path in (Path(outcome.config.folder) / "ledger").glob("*")
        for line in path.read_text().splitlines()
    ]
    wanted = ("dealt", step, generation)
    dealt = [record for record in records if (record["kind"], record.get("step"), record.get("generation")) == wanted]
    shares: dict[int, list[int]] = defaultdict(list)
    for record in dealt:
        shares[record["rank"]] += record["ids"]
    return dict(shares)


def carried(outcome: Outcome) -> dict[int, Carried]:
    """What every update that was carried forward was made of, from the events and the ledger alone."""
    made = {}
    for step, event in forwards(outcome).items():
        everything = dealt(outcome, step)
        shares = {rank: ids for rank, ids in everything.items() if rank not in event.data["gone"]}
        left = [sample for ids in shares.values() for sample in ids]
        # The dead may not have come to note its share; then the survivors have noted it for it.
        whole = len({*event.data["samples"], *(sample for ids in everything.values() for sample in ids)})
        match event.data["missing"]:
            case "reduce_again":
                counted = left
            case "local":
                counted = max((shares[rank] for rank in sorted(shares)), key=len)
            case _:
                counted = []
        made[step] = Carried(
            tuple(event.data["lossy"]), tuple(counted), len(counted) if event.data["rescale"] else whole
        )
    return made


@pytest.mark.parametrize("after", range(GRADIENTS + 1))
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_a_kill_after_any_number_of_reduced_gradients(tmp_path: Path, workers: int, after: int) -> None:
    # Nothing else makes sure that the others have left their commits when it dies before the first reduction.
    late = [] if after else [fault(1, 5, "forward", kind="slow", seconds=0.5)]
    plan = [*late, fault(1, 5, "allreduce", after=after)]
    outcome = run_job(tmp_path, plan, workers=workers, policy=POLICY)
    check_sound(outcome, set(range(workers)) - {1}, lossy=True)
    check_like_reference(outcome, carried=carried(outcome))
    assert len(outcome.kinds("recovered")) == workers - 1
    found = forwards(outcome)
    if after == GRADIENTS:  # the survivors may have all of them too, and find out later, or only some of them may
        assert len(found) <= 1
        return
    assert list(found) == [5]
    assert len(found[5].data["lossy"]) == GRADIENTS - after
    assert len(found[5].data["samples"]) == 12 // workers
    assert not outcome.ledger.exact


@pytest.mark.parametrize("rescale", [True, False])
@pytest.mark.parametrize("missing", ["reduce_again", "local", "skip"])
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_what_becomes_of_a_gradient_that_nobody_has(
    tmp_path: Path, missing: str, rescale: bool, optimizer: str
) -> None:
    policy = f"lossy_forward(missing={missing!r}, rescale={rescale})"
    outcome = run_job(tmp_path, [fault(0, 5, "allreduce", after=2)], policy=policy, optimizer=optimizer)
    check_sound(outcome, {1, 2}, lossy=True)
    check_like_reference(outcome, carried=carried(outcome))
    assert [(step, len(event.data["lossy"])) for step, event in forwards(outcome).items()] == [(5, GRADIENTS - 2)]


@pytest.mark.parametrize(
    "more",
    [
        {"passes": 2},
        {"groups": 2},
        {"scaler": True},
        {"swallow": True},
        {"num_workers": 2},
        {"batch": 4, "global_batch": None},
        {"model": "embedding", "optimizer": "sgd"},
    ],
    ids=lambda more: "-".join(map(str, more)),
)
def test_with_everything_else_that_a_training_may_do(tmp_path: Path, more: dict[str, Any]) -> None:
    outcome = run_job(tmp_path, [fault(1, 3, "allreduce", after=1)], policy=POLICY, **more)
    check_sound(outcome, {0, 2}, lossy=True)
    found = forwards(outcome)
    assert list(found) == [3]
    assert found[3].data["lossy"]
    if more.get("global_batch", 12) is not None:
        check_like_reference(outcome, carried=carried(outcome))


def test_fp16_compression(tmp_path: Path) -> None:
    outcome = run_job(tmp_path, [fault(1, 5, "allreduce", after=2)], policy=POLICY, fp16=True)
    check_sound(outcome, {0, 2}, lossy=True)
    check_like_reference(outcome, carried=carried(outcome), tolerance=5e-3)


@pytest.mark.parametrize("model", ["batchnorm", "dropout"])
def test_layers_that_depend_on_the_split(tmp_path: Path, model: str) -> None:
    outcome = run_job(tmp_path, [fault(1, 5, "allreduce", after=2)], policy=POLICY, model=model)
    check_sound(outcome, {0, 2}, lossy=True)
    assert list(forwards(outcome)) == [5]


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "optimizer", "commit"])
def test_a_kill_in_another_phase(tmp_path: Path, phase: str) -> None:
    outcome = run_job(tmp_path, [fault(1, 5, phase)], policy=POLICY)
    check_sound(outcome, {0, 2}, lossy=True)
    check_like_reference(outcome, carried=carried(outcome))


def test_two_workers_at_once(tmp_path: Path) -> None:
    outcome = run_job(tmp_path, [fault(0, 5, "backward"), fault(2, 5, "backward")], workers=4, policy=POLICY)
    check_sound(outcome, {1, 3}, lossy=True)
    check_like_reference(outcome, carried=carried(outcome))


@pytest.mark.parametrize("phase", ["reform", "agreement", "completion"])
def test_a_second_kill_on_the_way_forward(tmp_path: Path, phase: str) -> None:
    faults = [fault(1, 5, "allreduce", after=2), fault(3, 5, phase)]
    outcome = run_job(tmp_path, faults, workers=4, policy=POLICY)
    check_sound(outcome, {0, 2}, lossy=True)
    check_like_reference(outcome, carried=carried(outcome))
    assert set(outcome.fired()) == {"kill worker 1 at step 5 in allreduce after 2 gradients",
                                    f"kill worker 3 at step 5 in {phase}"}  # fmt: skip


def test_a_reduced_gradient_that_one_survivor_has_and_another_lacks(tmp_path: Path) -> None:
    """Nothing is lost that a survivor held."""
    faults = [fault(1, 5, "allreduce", after=4), fault(2, 5, "allreduce", after=1, kind="lose")]
    outcome = run_job(tmp_path, faults, policy=POLICY)
    check_sound(outcome, {0, 2}, lossy=True)
    check_like_reference(outcome, carried=carried(outcome))
    (event, *_) = outcome.kinds("forward")
    assert len(event.data["lossy"]) == GRADIENTS - 4
    done = {event.rank: event.data["gradients_done"] for event in outcome.kinds("drained")}
    assert sorted(done.values()) == [1, 4]


def test_a_survivor_that_has_not_finished_the_step_that_another_has(tmp_path: Path) -> None:
    outcome = run_job(tmp_path, [fault(2, 5, "allreduce", after=3, kind="lose")], policy=POLICY)
    check_sound(outcome, {0, 1, 2})
    check_like_reference(outcome)
    assert not outcome.kinds("forward")
    assert {event.data["decision"] for event in outcome.kinds("decision")} == {"Replay"}


def test_a_spent_budget_escalates(tmp_path: Path) -> None:
    policy = "lossy_forward(at_most=1, within=1000.0) | rollback"
    faults = [fault(1, 5, "allreduce", after=2), fault(2, 9, "allreduce", after=2)]
    outcome = run_job(tmp_path, faults, workers=4, policy=policy)
    check_sound(outcome, {0, 3}, lossy=True)
    check_like_reference(outcome, carried=carried(outcome))
    assert [event.data["decision"] for event in outcome.kinds("decision") if event.rank == 0] == ["Forward", "Replay"]


def test_the_cheapest_way_is_agreed_on(tmp_path: Path) -> None:
    outcome = run_job(tmp_path, [fault(1, 5, "allreduce", after=2)], policy="auto")
    check_sound(outcome, {0, 2}, lossy=True)
    check_like_reference(outcome, carried=carried(outcome))
    assert len({str(event.data) for event in outcome.kinds("decision")}) == 1
