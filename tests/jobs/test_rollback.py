"""Mini-batch rollback under ``horovodrun``: a worker is killed at a named moment, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.harness import check_like_reference, check_sound, fault, recovered_at, run_job
from tests.jobs.task import GROWTH_INTERVAL

pytestmark = pytest.mark.job

GRADIENTS = 6  # of the model: three linear layers


@pytest.mark.parametrize(
    ("phase", "more"),
    [
        ("forward", {}),
        ("backward", {}),
        ("allreduce", {"after": 1}),
        ("allreduce", {"after": 3}),
        ("allreduce", {"after": GRADIENTS}),
        ("optimizer", {}),
        ("commit", {}),
        ("data", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "".join(map(str, value.values())),
)
def test_a_kill_in_any_phase_costs_nothing_but_that_step(tmp_path: Path, phase: str, more: dict[str, int]) -> None:
    outcome = run_job(tmp_path, [fault(1, 5, phase, **more)])
    check_sound(outcome, {0, 2})
    check_like_reference(outcome)
    (step, size), *others = recovered_at(outcome)
    assert step in (4, 5)
    assert (size, others) == (2, [])


@pytest.mark.parametrize("phase", ["reform", "agreement", "transfer"])
def test_a_second_kill_while_the_group_recovers_from_the_first(tmp_path: Path, phase: str) -> None:
    outcome = run_job(tmp_path, [fault(1, 5, "allreduce", after=2), fault(3, 5, phase)], workers=4)
    check_sound(outcome, {0, 2})
    check_like_reference(outcome)
    assert len(outcome.fired()) == 2


def test_a_survivor_that_is_a_step_behind_is_brought_forward(tmp_path: Path) -> None:
    """Worker 1 dies when it and worker 0 have applied step 5, and the reduction of worker 2 has failed."""
    outcome = run_job(tmp_path, [fault(1, 6, "forward")], disagree_at=5)
    check_sound(outcome, {0, 2})
    check_like_reference(outcome)
    assert recovered_at(outcome) == [(5, 2)]
    recovery = [event for event in outcome.kinds("agreed") if event.step]
    assert [event.data["lacking"] for event in recovery] == [[1], [1]]
    assert all(event.data["nbytes"] > 0 for event in outcome.kinds("transferred"))


def test_the_death_of_rank_zero(tmp_path: Path) -> None:
    outcome = run_job(tmp_path, [fault(0, 5, "allreduce", after=2)])
    check_sound(outcome, {1, 2})
    check_like_reference(outcome)


def test_two_workers_at_once(tmp_path: Path) -> None:
    outcome = run_job(tmp_path, [fault(0, 5, "backward"), fault(2, 5, "backward")], workers=4)
    check_sound(outcome, {1, 3})
    check_like_reference(outcome)


def test_one_after_the_other_down_to_a_single_survivor(tmp_path: Path) -> None:
    outcome = run_job(tmp_path, [fault(0, 4, "allreduce", after=1), fault(2, 8, "forward"), fault(3, 12, "optimizer")],
                      workers=4)  # fmt: skip
    check_sound(outcome, {1})
    check_like_reference(outcome)
    assert [size for _, size in recovered_at(outcome)] == [3, 2, 1]


@pytest.mark.parametrize("step", [1, 9, 10, 18], ids=["first", "last-of-epoch", "first-of-epoch", "last"])
@pytest.mark.parametrize("phase", ["allreduce", "commit"])
def test_the_edges_of_an_epoch(tmp_path: Path, phase: str, step: int) -> None:
    outcome = run_job(tmp_path, [fault(1, step, phase, **({"after": 3} if phase == "allreduce" else {}))])
    check_sound(outcome, {0, 2})
    check_like_reference(outcome)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_optimizers(tmp_path: Path, optimizer: str) -> None:
    outcome = run_job(tmp_path, [fault(1, 5, "allreduce", after=3)], optimizer=optimizer)
    check_sound(outcome, {0, 2})
    check_like_reference(outcome)


def test_loading_in_worker_processes(tmp_path: Path) -> None:
    outcome = run_job(tmp_path, [fault(1, 5, "allreduce", after=3)], num_workers=2)
    check_sound(outcome, {0, 2})
    check_like_reference(outcome)


def test_gradient_accumulation_over_two_batches(tmp_path: Path) -> None:
    outcome = run_job(tmp_path, [fault(1, 5, "allreduce", after=3)], passes=2, samples=96)
    check_sound(outcome, {0, 2})
    check_like_reference(outcome)


def test_groups(tmp_path: Path) -> None:
    outcome = run_job(tmp_path, [fault(1, 5, "allreduce", after=3)], groups=2)
    check_sound(outcome, {0, 2})
    check_like_reference(outcome)


def test_fp16_compression(tmp_path: Path) -> None:
    outcome = run_job(tmp_path, [fault(1, 5, "allreduce", after=3)], fp16=True)
    check_sound(outcome, {0, 2})
    check_like_reference(outcome, tolerance=5e-3)


def test_a_gradient_scaler(tmp_path: Path) -> None:
    outcome = run_job(tmp_path, [fault(1, 5, "optimizer")], scaler=True)
    check_sound(outcome, {0, 2})
    check_like_reference(outcome)
    scalars = outcome.results[0].scalars
    assert scalars["scale"] == 2.0**16 * 2.0 ** (scalars["steps"] // GROWTH_INTERVAL), "replayed steps count once"


@pytest.mark.parametrize("phase", ["backward", "commit"])
def test_batch_size_for_each_worker(tmp_path: Path, phase: str) -> None:
    outcome = run_job(tmp_path, [fault(1, 5, phase)], global_batch=None, batch=4)
    check_sound(outcome, {0, 2})


def test_a_learning_rate_that_follows_the_number_of_workers(tmp_path: Path) -> None:
    faults = [fault(1, 5, "backward"), fault(2, 7, "commit")]
    outcome = run_job(tmp_path, faults, workers=4, global_batch=None, batch=4, lr_rule="linear")
    check_sound(outcome, {0, 3})
    scalars = outcome.results[0].scalars
    assert scalars["lr"] == pytest.approx(0.1 * 2 / 4 * 0.97 ** scalars["steps"])
    assert [event.data["workers"] for event in outcome.kinds("learning_rate") if event.rank == 0] == [3, 2]


def test_a_failure_between_steps_enters_the_training_function_again(tmp_path: Path) -> None:
    outcome = run_job(tmp_path, [fault(1, 9, "commit")], metric=True)
    check_sound(outcome, {0, 2})
    check_like_reference(outcome)


def test_a_worker_that_raises_is_a_lost_worker(tmp_path: Path) -> None:
    outcome = run_job(tmp_path, [fault(1, 5, "optimizer", kind="exception")])
    check_sound(outcome, {0, 2})
    check_like_reference(outcome)


def test_a_user_who_catches_all_errors_in_the_step_does_not_swallow_the_recovery(tmp_path: Path) -> None:
    outcome = run_job(tmp_path, [fault(1, 5, "allreduce", after=3)], swallow=True)
    check_sound(outcome, {0, 2})
    check_like_reference(outcome)
