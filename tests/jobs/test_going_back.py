"""Going back to a full copy of the state, under ``horovodrun``: all workers do, whoever asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.harness import Outcome, check_like_reference, check_sound, fault, run_job
from tests.jobs.test_joining import add_a_worker

pytestmark = pytest.mark.job


def restarts(outcome: Outcome) -> set[tuple[int, int]]:
    return {(event.data["to"], event.data["lost_steps"]) for event in outcome.kinds("restarted")}


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("by", ["one", "all", "inside"])
def test_whoever_asks_takes_all_back(tmp_path: Path, by: str, optimizer: str) -> None:
    outcome = run_job(tmp_path, copy_every=4, restore_at=7, restore_by=by, optimizer=optimizer)
    check_sound(outcome, {0, 1, 2})
    check_like_reference(outcome)
    lost = 3 if by == "all" else 2
    assert restarts(outcome) == {(4, lost)}
    assert outcome.ledger.redone == lost


def test_over_the_end_of_an_epoch(tmp_path: Path) -> None:
    """An epoch has nine steps."""
    outcome = run_job(tmp_path, copy_every=8, restore_at=11, restore_by="all")
    check_sound(outcome, {0, 1, 2})
    check_like_reference(outcome)
    assert restarts(outcome) == {(8, 3)}


@pytest.mark.parametrize("phase", ["reform", "agreement", "transfer"])
def test_a_death_on_the_way_back(tmp_path: Path, phase: str) -> None:
    outcome = run_job(tmp_path, [fault(2, 7, phase)], copy_every=3, restore_at=7)
    check_sound(outcome, {0, 1})
    check_like_reference(outcome)
    assert restarts(outcome) == {(6, 0)}


def test_a_death_in_the_same_step(tmp_path: Path) -> None:
    outcome = run_job(tmp_path, [fault(2, 7, "allreduce", after=3)], copy_every=3, restore_at=7, restore_by="inside",
                      workers=4)  # fmt: skip
    check_sound(outcome, {0, 1, 3})
    check_like_reference(outcome)


@pytest.mark.parametrize("model", ["batchnorm", "dropout", "embedding"])
def test_with_other_layers(tmp_path: Path, model: str) -> None:
    optimizer = "sgd" if model == "embedding" else "momentum"
    outcome = run_job(tmp_path, workers=2, copy_every=4, restore_at=7, model=model, optimizer=optimizer)
    check_sound(outcome, {0, 1})
    assert restarts(outcome) == {(4, 2)}


def test_under_lossy_forward_recovery(tmp_path: Path) -> None:
    outcome = run_job(tmp_path, copy_every=4, restore_at=7, policy="lossy_forward")
    check_sound(outcome, {0, 1, 2})
    check_like_reference(outcome)
    assert restarts(outcome) == {(4, 2)}


def test_a_newcomer_gets_the_copy_of_the_others(tmp_path: Path) -> None:
    """It joins after the sixth step."""
    outcome = run_job(tmp_path, workers=2, during=add_a_worker, hold_before=5, copy_every=4, restore_at=8, restore_in=1)
    check_sound(outcome, {0, 1, 2})
    check_like_reference(outcome)
    assert restarts(outcome) == {(4, 3)}


def test_replicas_that_differ_without_a_majority_go_back_to_copies_that_do_not(tmp_path: Path) -> None:
    outcome = run_job(tmp_path, [fault(1, 6, "commit", kind="bitflip")], workers=2, guard_every=2, copy_every=2,
                      own_policy="restart")  # fmt: skip
    check_sound(outcome, {0, 1})
    check_like_reference(outcome)
    assert restarts(outcome) == {(4, 2)}
    assert {event.data["decision"] for event in outcome.kinds("decision")} == {"Restart"}
