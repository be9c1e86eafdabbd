"""Runs that compare recovery policies: their kills, what is read from them, and what they say together."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.accuracy_runs import GRADIENTS, LEAST_STEPS_A_KILL, as_toml, draw_plan, replayed, steps_of, summarized
from benchmarks.common import BenchmarkError
from horovod_ft.faults.plan import Fault, parse_plan
from tests.unit.benchmarks.made import ENDED, LOSSY, TASK, Left, clean, killed
from tests.unit.cli.made import GAP
from tests.unit.test_ledger import Workers

# --- the kills -------------------------------------------------------------------------------------------------------


def test_a_seed_always_draws_the_same_kills_and_another_one_others() -> None:
    def plan(seed: int) -> tuple[Fault, ...]:
        return draw_plan(seed, workers=4, kills=3, steps=200)

    assert plan(1) == plan(1)
    assert len({plan(seed) for seed in range(20)}) == 20


@pytest.mark.parametrize("steps", [3 * LEAST_STEPS_A_KILL, 235])
def test_kills_hit_different_workers_in_different_stretches_of_the_training(steps: int) -> None:
    for seed in range(200):
        plan = draw_plan(seed, workers=4, kills=3, steps=steps)
        assert len({fault.worker for fault in plan}) == 3
        assert [int(fault.step * 3 / steps) for fault in plan] == [0, 1, 2]
        assert plan[0].step >= 1
        assert plan[-1].step < steps  # a step has to follow, or there is no gap to measure
        assert {(fault.kind, fault.phase) for fault in plan} == {("kill", "allreduce")}


def test_every_worker_and_every_number_of_reduced_gradients_is_drawn_some_time() -> None:
    drawn = [fault for seed in range(100) for fault in draw_plan(seed, workers=4, kills=3, steps=200)]
    assert {fault.worker for fault in drawn} == {0, 1, 2, 3}
    assert {fault.after for fault in drawn} == set(range(GRADIENTS + 1))


def test_a_plan_is_read_as_it_was_drawn() -> None:
    plan = draw_plan(1, workers=4, kills=3, steps=200)
    assert parse_plan(as_toml(plan)) == plan
    assert as_toml(()) == ""


def test_steps_of_a_training() -> None:
    assert steps_of(512, 3) == 6
    assert steps_of(513, 1) == 3


# --- one run ---------------------------------------------------------------------------------------------------------


def test_a_run_that_replays(tmp_path: Path) -> None:
    run = Left(tmp_path).replay().events().survivors(0, 2).measured()
    assert (run.seed, run.policy, run.accuracy, run.seconds) == (1, "rollback", 98.76, 25.0)
    assert run.gaps_s == pytest.approx([GAP])
    assert (run.replayed_steps, run.lossy_steps, run.lost_steps) == (1, 0, 1)
    assert (run.lossy_elements, run.carried_elements, run.lossy_samples) == (0, 0, 0)


def test_a_run_that_goes_forward(tmp_path: Path) -> None:
    run = Left(tmp_path).go_forward().events().survivors(0, 2).measured(LOSSY)
    assert (run.replayed_steps, run.lossy_steps, run.lost_steps) == (0, 1, 1)
    assert (run.lossy_elements, run.carried_elements, run.lossy_samples) == (5, 8, 1)


@pytest.mark.parametrize(("ahead", "again"), [("1", set()), ("2", {3})])
def test_a_step_counts_as_replayed_if_a_survivor_had_begun_it(tmp_path: Path, ahead: str, again: set[int]) -> None:
    workers = Workers(tmp_path, samples=12)
    workers.train(range(1, 3), "012")
    workers.ledger(ahead).dealt(3, workers.deal(3, int(ahead), 3, 0))
    workers.failed("02")
    workers.train(range(3, 4), "02", generation=1)
    assert replayed(tmp_path) == again


def test_a_kill_that_did_not_happen_is_no_data_point(tmp_path: Path) -> None:
    left = Left(tmp_path).replay().events(fault=None).survivors(0, 2)
    with pytest.raises(BenchmarkError, match=r"seed 1, rollback: planned were the faults \['kill worker 1.* \[\] happ"):
        left.measured()


def test_a_kill_that_no_recovery_followed(tmp_path: Path) -> None:
    left = Left(tmp_path).replay().events(recovered=False).survivors(0, 2)
    with pytest.raises(BenchmarkError, match="1 workers were killed, and the events tell of no recovery"):
        left.measured()


def test_lost_samples_under_a_policy_that_loses_nothing(tmp_path: Path) -> None:
    left = Left(tmp_path).go_forward().events().survivors(0, 2)
    with pytest.raises(BenchmarkError, match=r"samples lost weight in the steps \[2\]; none should have"):
        left.measured(TASK)


def test_a_ledger_that_does_not_add_up(tmp_path: Path) -> None:
    left = Left(tmp_path).events().survivors(0, 2)
    left.ledger.failed("02")
    left.ledger.dealt(2, "02", generation=1)
    left.ledger.committed(2, "0", generation=1)
    left.ledger.ledger("2").committed(4, 1)
    with pytest.raises(BenchmarkError, match=r"the ledger does not add up: .*steps that nobody committed"):
        left.measured(LOSSY)


def test_fewer_survivors_than_expected(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match=r"the workers \[2\] came to the end, not \[0, 2\]"):
        Left(tmp_path).replay().events().survivors(2).measured()


def test_a_worker_that_should_be_dead(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match=r"the workers \[0, 1, 2\] came to the end, not \[0, 2\]"):
        Left(tmp_path).replay().events().survivors(0, 1, 2).measured()


@pytest.mark.parametrize("differs", [{"weights": "abd"}, {"correct": 9877}])
def test_survivors_that_differ(tmp_path: Path, differs: dict[str, object]) -> None:
    with pytest.raises(BenchmarkError, match="do not have the same model"):
        Left(tmp_path).replay().events().survivors(0, 2, **differs).measured()


def test_too_few_steps(tmp_path: Path) -> None:
    left = Left(tmp_path).replay().events().survivors(0, **{**ENDED, "steps": 1}).survivors(2, steps=1)
    with pytest.raises(BenchmarkError, match="1 steps were done, not 2"):
        left.measured()


# --- all runs --------------------------------------------------------------------------------------------------------


def test_accuracies_are_compared_with_the_failure_free_run_of_the_same_seed() -> None:
    runs = [clean(1, 98.0), killed(1, "a", 97.5, 0.1), clean(2, 90.0), killed(2, "a", 90.2, 0.1)]
    result = summarized(runs, ["a"], whole=True)
    assert result["failure_free"]["accuracies"] == [98.0, 90.0]
    assert result["policies"]["a"]["accuracies"] == [97.5, 90.2]
    assert result["policies"]["a"]["points_from_failure_free"] == [-0.5, 0.2]
    assert result["policies"]["a"]["worst_points"] == -0.5


def test_what_a_policy_lost_is_there_for_each_seed_and_gaps_for_each_recovery() -> None:
    runs = [clean(1, 98.0), killed(1, "a", 98.0, 0.1, 0.2), clean(2, 98.0), killed(2, "a", 98.0, 0.6)]
    its = summarized(runs, ["a"], whole=True)["policies"]["a"]
    assert its["gaps_s"] == [[0.1, 0.2], [0.6]]
    assert (its["gap_spread_s"]["median"], its["gap_spread_s"]["count"]) == (0.2, 3)
    assert (its["replayed_steps"], its["lossy_steps"], its["lost_steps"]) == ([2, 1], [1, 1], [3, 2])
    assert (its["lossy_elements"], its["carried_elements"], its["lossy_samples"]) == ([30, 30], [40, 40], [2, 2])


@pytest.mark.parametrize(
    ("accuracy", "whole", "met"),
    [(98.0, True, True), (97.0, True, True), (99.0, True, True), (96.9, True, False), (99.1, True, False),
     (98.0, False, False)],
)  # fmt: skip
def test_the_goal_is_a_point_either_way_in_every_seed(accuracy: float, whole: bool, met: bool) -> None:
    runs = [clean(1, 98.0), killed(1, "a", 98.0, 0.1), clean(2, 98.0), killed(2, "a", accuracy, 0.1)]
    goals = summarized(runs, ["a"], whole=whole)["goals"]
    assert goals["a: within 1 point of the failure-free run in every seed"] is met


def test_a_model_that_has_not_learned_says_nothing() -> None:
    goals = summarized([clean(1, 96.9), killed(1, "a", 96.9, 0.1)], ["a"], whole=True)["goals"]
    assert goals["failure-free accuracy of at least 97 % in every seed"] is False


def test_runs_of_a_seed_without_its_failure_free_run_are_left_out() -> None:
    runs = [clean(1, 98.0), killed(1, "a", 98.0, 0.1), killed(2, "a", 50.0, 0.1), killed(2, "b", 50.0, 0.1)]
    result = summarized(runs, ["a", "b"], whole=False)
    assert result["policies"]["a"]["seeds"] == [1]
    assert "b" not in result["policies"]
    assert len(result["runs"]) == 4
