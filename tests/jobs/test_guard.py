"""A replica that silently differs, under ``horovodrun``: it is found, named and healed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.harness import check_like_reference, check_sound, fault, run_job

pytestmark = pytest.mark.job


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("kind", ["bitflip", "nan"])
def test_a_worker_that_differs_is_named_and_healed(tmp_path: Path, kind: str, optimizer: str) -> None:
    outcome = run_job(tmp_path, [fault(1, 6, "commit", kind=kind)], guard_every=2, optimizer=optimizer)
    check_sound(outcome, {0, 1, 2})
    check_like_reference(outcome)
    start_ranks = {event.worker.rsplit(":", 2)[1]: event.rank for event in outcome.kinds("formed")}
    found = outcome.kinds("diverged")
    assert [(event.step, event.data["differing"]) for event in found] == [(6, [start_ranks["1"]])] * 3
    assert len(outcome.kinds("healed")) == 3


@pytest.mark.parametrize("at", [3, 4])
def test_it_is_found_within_so_many_steps(tmp_path: Path, at: int) -> None:
    outcome = run_job(tmp_path, [fault(2, at, "forward", kind="bitflip")], guard_every=4)
    check_sound(outcome, {0, 1, 2})
    assert {event.step for event in outcome.kinds("diverged")} == {4}


def test_with_two_workers_the_one_with_finite_numbers_counts(tmp_path: Path) -> None:
    outcome = run_job(tmp_path, [fault(1, 6, "commit", kind="nan")], workers=2, guard_every=2)
    check_sound(outcome, {0, 1})
    check_like_reference(outcome)


def test_without_a_majority_the_job_ends_and_says_why(tmp_path: Path) -> None:
    outcome = run_job(tmp_path, [fault(1, 6, "commit", kind="bitflip")], workers=2, guard_every=2)
    assert outcome.finished.returncode not in (0, None)
    assert not outcome.results
    assert "after step 6 the workers have different parameters" in outcome.finished.output
    assert outcome.finished.leftovers == 0


def test_a_death_in_the_step_of_a_look(tmp_path: Path) -> None:
    faults = [fault(1, 6, "commit", kind="bitflip"), fault(2, 6, "commit")]
    outcome = run_job(tmp_path, faults, workers=4, guard_every=2)
    check_sound(outcome, {0, 1, 3})
