"""The engine on a fake world: whatever breaks, all survivors end where a run without failures ends, bit by bit."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_ft.data import BatchSize, Deal, Range
from horovod_ft.errors import DivergenceError, JobLostError, PolicyError, RecoveryError, UsageError
from horovod_ft.faults.inject import FaultInjected
from horovod_ft.faults.plan import Fault
from horovod_ft.ledger import verify_ledger
from horovod_ft.policies.rollback import MiniBatchRollback
from horovod_ft.policy import Abort, Costs, Decision, Failure, RecoveryPolicy, Replay
from horovod_ft.recovery import MAX_ATTEMPTS, Engine, HostsChanged
from horovod_ft.testing.fake_world import Breakage
from tests.unit.toy import DEFAULT, Ended, Job, Result, Toy, expected, run_toys, updated

STEPS = 8  # of the default job: 20 samples, 6 in a global batch, 2 epochs
POLICY = "decision of the recovery policy"


def check_like_no_failure(ended: Ended, job: Job = DEFAULT, *, dead: Sequence[int] = ()) -> None:
    """Who should be dead is; all others have what a run without failures has, and the ledger proves it."""
    assert ended.dead == set(dead)
    for index, result in ended.results.items():
        np.testing.assert_array_equal(result.weights, expected(job), err_msg=f"worker {index}")
        assert result.schedule == result.steps
        assert result.place == (job.epochs, 0)
    if job.ledger is not None:
        check_ledger(job, job.ledger)


def check_ledger(job: Job, folder: Path) -> None:
    report = verify_ledger(folder)
    assert report.problems == []
    assert (report.epochs, report.samples) == (job.epochs, job.epochs * job.samples)


def recovered_at(ended: Ended, index: int) -> list[tuple[int, int]]:
    """Step and size of the group after each recovery of a worker."""
    return [(event.step, event.size) for event in ended.events(index, "recovered")]


# --- without failures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_the_result_does_not_depend_on_the_number_of_workers(size: int, tmp_path: Path) -> None:
    job = Job(ledger=tmp_path)
    ended = run_toys(size, job=job)
    check_like_no_failure(ended, job)
    assert {result.steps for result in ended.results.values()} == {STEPS}


def test_all_workers_begin_with_the_state_of_rank_0() -> None:
    def differ(toy: Toy) -> None:
        toy.weights += 1000 * toy.membership.index

    check_like_no_failure(run_toys(3, prepare=differ))


def test_a_run_is_told_from_its_start_to_its_end() -> None:
    ended = run_toys(2)
    assert ended.kinds(1) == ["agreed", "transferred", "formed", "started", "finished"]


def test_a_process_that_has_just_begun_is_not_told_of_a_regrouping() -> None:
    assert run_toys(2).toys[1].calls == ["prepare", "settled 1 2 0", "reentering"]


def test_several_batches_may_make_one_step(tmp_path: Path) -> None:
    job = Job(passes=2, ledger=tmp_path)
    ended = run_toys(3, job=job)
    check_like_no_failure(ended, job)
    assert ended.results[0].steps == STEPS // 2


# --- a death at every collective -----------------------------------------------------------------------------------

SUBSETS = [(), (0,), (2,), (0, 2)]


@pytest.mark.parametrize("reaches", SUBSETS, ids=str)
@pytest.mark.parametrize("nth", range(1, STEPS + 1))
def test_a_death_in_a_reduction_that_completes_on_some(nth: int, reaches: Sequence[int], tmp_path: Path) -> None:
    job = Job(ledger=tmp_path)
    ended = run_toys(3, [Breakage(1, "gradient.0", nth, reaches)], job)
    check_like_no_failure(ended, job, dead=[1])
    at = nth if reaches else nth - 1
    assert recovered_at(ended, 0) == recovered_at(ended, 2) == [(at, 2)]


@pytest.mark.parametrize("reaches", SUBSETS, ids=str)
@pytest.mark.parametrize("which", [0, 1])
def test_a_death_between_two_updates_of_a_step(which: int, reaches: Sequence[int], tmp_path: Path) -> None:
    job = Job(updates=2, ledger=tmp_path)
    ended = run_toys(3, [Breakage(1, f"gradient.{which}", 3, reaches)], job)
    check_like_no_failure(ended, job, dead=[1])


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("reaches", SUBSETS, ids=str)
@pytest.mark.parametrize("name", ["gradient.0", "gradient.1", "changed"])
def test_a_batch_size_for_each_worker_repeats_the_global_batch_behind_an_update_that_is_applied(
    name: str, reaches: Sequence[int], passes: int, tmp_path: Path
) -> None:
    """The group is smaller afterwards, and so would be its next global batch."""
    job = Job(samples=48, batch=BatchSize(per_worker=2), updates=2, passes=passes, ledger=tmp_path)
    ended = run_toys(4, [Breakage(1, name, 2, reaches), Breakage(3, "standing", 2)], job)
    assert ended.dead == {1, 3}
    np.testing.assert_array_equal(ended.results[0].weights, ended.results[2].weights)
    check_ledger(job, tmp_path)


@pytest.mark.parametrize("reaches", SUBSETS, ids=str)
@pytest.mark.parametrize("nth", range(1, STEPS + 1))
def test_a_death_while_changes_are_asked_for(nth: int, reaches: Sequence[int], tmp_path: Path) -> None:
    job = Job(ledger=tmp_path)
    check_like_no_failure(run_toys(3, [Breakage(1, "changed", nth, reaches)], job), job, dead=[1])


@pytest.mark.parametrize("reaches", [(), (0,)], ids=str)
@pytest.mark.parametrize("nth", range(1, 5))
def test_a_death_while_batches_are_summed_up(nth: int, reaches: Sequence[int], tmp_path: Path) -> None:
    job = Job(passes=2, ledger=tmp_path)
    check_like_no_failure(run_toys(3, [Breakage(1, "gradient.0", nth, reaches)], job), job, dead=[1])


def test_a_step_of_several_batches_may_reach_over_the_end_of_an_epoch(tmp_path: Path) -> None:
    job = Job(samples=18, passes=2, ledger=tmp_path)
    check_like_no_failure(run_toys(3, [Breakage(1, "gradient.0", 2)], job), job, dead=[1])


@pytest.mark.parametrize("reaches", SUBSETS, ids=str)
@pytest.mark.parametrize("name", ["standing", "structure", "transfer.0"])
def test_a_death_while_the_job_starts(name: str, reaches: Sequence[int], tmp_path: Path) -> None:
    job = Job(ledger=tmp_path)
    check_like_no_failure(run_toys(3, [Breakage(1, name, 1, reaches)], job), job, dead=[1])


@pytest.mark.parametrize("reaches", [(), (1,)], ids=str)
@pytest.mark.parametrize("name", ["standing", "structure"])
def test_the_death_of_rank_0_while_the_job_starts(name: str, reaches: Sequence[int]) -> None:
    check_like_no_failure(run_toys(3, [Breakage(0, name, 1, reaches)]), dead=[0])


def test_a_start_that_is_cut_off_on_all_who_are_left_ends_the_job() -> None:
    """Their weights are half those of rank 0, which may come from a file, and half their own."""
    ended = run_toys(3, [Breakage(0, "transfer.0")])
    assert all("no replica is left, and no checkpoint" in str(ended.errors[index]) for index in (1, 2))


def test_a_start_that_is_cut_off_goes_on_with_a_whole_state() -> None:
    """The new rank 0 has received half a state; the old one is still there, as another rank."""
    ended = run_toys(3, [Breakage(1, "transfer.0")], arrange=lambda order: order[::-1] if len(order) == 2 else order)
    check_like_no_failure(ended, dead=[1])
    assert ended.events(2, "agreed")[-1].data["holders"] == (1,)


@pytest.mark.parametrize("reaches", SUBSETS, ids=str)
def test_a_death_after_the_training_function_has_returned(reaches: Sequence[int], tmp_path: Path) -> None:
    job = Job(ledger=tmp_path)
    check_like_no_failure(run_toys(3, [Breakage(1, "finish", 1, reaches)], job), job, dead=[1])


def test_the_death_of_rank_0() -> None:
    ended = run_toys(3, [Breakage(0, "gradient.0", 3)])
    check_like_no_failure(ended, dead=[0])
    assert sorted(result.group.rank for result in ended.results.values()) == [0, 1]


def test_a_failure_without_a_death_is_replayed_by_all() -> None:
    ended = run_toys(3, [Breakage(1, "gradient.0", 3, dies=False)])
    check_like_no_failure(ended)
    assert recovered_at(ended, 1) == [(2, 3)]


def test_ranks_may_change_in_any_way() -> None:
    ended = run_toys(4, [Breakage(1, "gradient.0", 3, [3])], arrange=lambda order: order[::-1])
    check_like_no_failure(ended, dead=[1])


# --- laggards ------------------------------------------------------------------------------------------------------


def test_a_survivor_that_is_a_step_behind_is_brought_forward() -> None:
    ended = run_toys(3, [Breakage(1, "gradient.0", 3, [0])])
    check_like_no_failure(ended, dead=[1])
    agreed = ended.events(2, "agreed")[-1].data
    assert (agreed["holders"], agreed["lacking"], agreed["newest"]) == ((0,), (1,), 3)
    assert ended.events(2, "decision")[0].data["failure"]["behind"] == 1


def test_a_laggard_keeps_what_the_completed_step_did_to_its_own_state() -> None:
    ended = run_toys(3, [Breakage(1, "gradient.0", 3, [0])])
    assert [ended.toys[index].draws.value for index in (0, 2)] == [STEPS, STEPS]


def test_a_replay_leaves_no_trace_in_light_state() -> None:
    ended = run_toys(3, [Breakage(1, "gradient.0", 3)])
    assert [ended.toys[index].draws.value for index in (0, 2)] == [STEPS, STEPS]


def test_an_update_that_is_in_the_parameters_is_not_applied_again() -> None:
    job = Job(updates=2)
    ended = run_toys(3, [Breakage(1, "gradient.1", 3)], job)
    check_like_no_failure(ended, job, dead=[1])
    assert ended.events(0, "agreed")[-1].data["updates"] == 1


def counting_epochs(toy: Toy) -> None:
    """The script counts epochs between two steps, as stock scripts do."""
    toy.committer.parts.append(toy.extra)

    def train() -> None:
        for _ in toy.epochs():
            for deal in toy.batches():
                with toy.engine.step():
                    toy.body(deal)
            toy.extra.value += 1

    toy.train = train  # type: ignore[method-assign]


@pytest.mark.parametrize("reaches", SUBSETS, ids=str)
@pytest.mark.parametrize("nth", [3, 4, 5], ids=["last-but-one", "last", "first"])
def test_what_a_script_does_at_an_epochs_end_is_done_once_by_laggards_too(nth: int, reaches: Sequence[int]) -> None:
    ended = run_toys(3, [Breakage(1, "gradient.0", nth, reaches)], prepare=counting_epochs)
    check_like_no_failure(ended, dead=[1])
    assert [ended.toys[index].extra.value for index in ended.results] == [2, 2]


# --- failures while recovering -------------------------------------------------------------------------------------

LAGGARD = Breakage(1, "gradient.0", 3, [0, 3])  # worker 2 is a step behind


@pytest.mark.parametrize("reaches", [(), (0,), (2,), (0, 2)], ids=str)
@pytest.mark.parametrize("name", ["standing", POLICY, "structure", "transfer.0", "transfer.1"])
@pytest.mark.parametrize("dies", [True, False])
def test_a_second_failure_while_the_group_recovers(
    name: str, reaches: Sequence[int], dies: bool, tmp_path: Path
) -> None:
    job = Job(ledger=tmp_path)
    nth = 1 if name in (POLICY, "transfer.1") else 2
    ended = run_toys(4, [LAGGARD, Breakage(3, name, nth, reaches, dies)], job)
    check_like_no_failure(ended, job, dead=[1, 3] if dies else [1])


@pytest.mark.parametrize("phase", ["reform", "agreement", "transfer"])
def test_a_kill_by_plan_while_the_group_recovers(phase: Any, tmp_path: Path) -> None:
    job = Job(ledger=tmp_path)
    ended = run_toys(4, [LAGGARD], job, faults=[Fault(phase, worker=3, step=2)])
    check_like_no_failure(ended, job, dead=[1, 3])


def test_one_after_the_other_down_to_a_single_survivor(tmp_path: Path) -> None:
    job = Job(ledger=tmp_path)
    deaths = [Breakage(0, "gradient.0", 2), Breakage(2, "gradient.0", 5, [1]), Breakage(3, "gradient.0", 8)]
    ended = run_toys(4, deaths, job)
    check_like_no_failure(ended, job, dead=[0, 2, 3])
    assert [size for _, size in recovered_at(ended, 1)] == [3, 2, 1]


def test_two_failures_in_a_row_are_counted() -> None:
    ended = run_toys(3, [Breakage(1, "gradient.0", 3, dies=False), Breakage(1, "gradient.0", 4, dies=False)])
    check_like_no_failure(ended)
    decisions = ended.events(0, "decision")
    assert [event.data["failure"]["consecutive"] for event in decisions] == [1, 2]


def test_a_committed_step_ends_the_row() -> None:
    ended = run_toys(3, [Breakage(1, "gradient.0", 3, dies=False), Breakage(1, "gradient.0", 5, dies=False)])
    assert [event.data["failure"]["consecutive"] for event in ended.events(0, "decision")] == [1, 1]


def test_the_death_of_the_only_holder_in_a_transfer_leaves_no_replica() -> None:
    ended = run_toys(3, [Breakage(1, "gradient.0", 3, [0]), Breakage(0, "transfer.0", 2)])
    assert ended.dead == {0, 1}
    assert isinstance(ended.errors[2], RecoveryError)
    assert "no replica is left" in str(ended.errors[2])
    assert ended.kinds(2)[-1] == "aborted"


def test_the_death_of_one_of_two_holders_in_a_transfer_is_survived() -> None:
    ended = run_toys(4, [LAGGARD, Breakage(0, "transfer.0", 2)])
    check_like_no_failure(ended, dead=[0, 1])


def test_the_only_holders_death_before_the_transfer_only_costs_its_step() -> None:
    ended = run_toys(3, [Breakage(1, "gradient.0", 3, [0]), Breakage(0, "structure", 2)])
    check_like_no_failure(ended, dead=[0, 1])
    assert recovered_at(ended, 2) == [(2, 1)]
    assert ended.toys[2].draws.value == STEPS


def test_groups_that_break_one_after_the_other_end_the_job() -> None:
    breakages = [Breakage(1, "standing", nth, dies=False) for nth in range(2, MAX_ATTEMPTS + 2)]
    ended = run_toys(2, [Breakage(1, "gradient.0", 3, dies=False), *breakages])
    assert {type(error) for error in ended.errors.values()} == {JobLostError}
    assert str(ended.errors[0]).startswith(f"{MAX_ATTEMPTS} groups in a row broke")


def test_one_group_less_is_survived() -> None:
    breakages = [Breakage(1, "standing", nth, dies=False) for nth in range(2, MAX_ATTEMPTS + 1)]
    patient = MiniBatchRollback(MAX_ATTEMPTS + 1)
    ended = run_toys(2, [Breakage(1, "gradient.0", 3, dies=False), *breakages], policy=lambda index: patient)
    check_like_no_failure(ended)


# --- generations ---------------------------------------------------------------------------------------------------


def test_a_number_of_a_group_is_never_used_twice(tmp_path: Path) -> None:
    """Worker 0 goes on in a group that breaks on worker 2 before it stands there, deals a batch, and dies."""
    job = Job(ledger=tmp_path)
    deaths = [Breakage(1, "gradient.0", 3), Breakage(2, POLICY, 1, [0], dies=False), Breakage(0, "gradient.0", 4)]
    ended = run_toys(3, deaths, job)
    check_like_no_failure(ended, job, dead=[0, 1])
    assert ended.results[2].group.generation == 2


def test_a_worker_on_which_only_the_transfer_failed_does_not_count_as_lost() -> None:
    ended = run_toys(4, [LAGGARD, Breakage(2, "transfer.1", 1, [0, 3], dies=False)])
    check_like_no_failure(ended, dead=[1])
    assert [event.data["lost"] for event in ended.events(0, "agreed")] == [(), (1,), ()]


# --- joining -------------------------------------------------------------------------------------------------------


def announcing(before_step: int, newcomers: int = 1) -> Callable[[Toy], None]:
    """Worker 1 hears of newcomers."""

    def prepare(toy: Toy) -> None:
        def announce(deal: Deal) -> None:
            mine = toy.membership
            if mine.index == 1 and toy.steps == before_step - 1 and not (mine.told or mine.group.generation):
                mine.announce(newcomers)

        toy.before_step = announce

    return prepare


@pytest.mark.parametrize(("before", "step"), [(1, 1), (4, 5), (5, 6), (STEPS - 1, STEPS)])
def test_newcomers_join_a_step_after_they_were_announced(before: int, step: int, tmp_path: Path) -> None:
    """Workers ask each other for news at the end of a step, and look at the answers at the end of the next."""
    job = Job(ledger=tmp_path)
    ended = run_toys(2, job=job, prepare=announcing(before, 2))
    check_like_no_failure(ended, job)
    assert sorted(ended.results) == [0, 1, 2, 3]
    assert [event.step for event in ended.events(3, "joined")] == [step]


def test_joining_asks_no_policy_and_survivors_stay_in_their_loop() -> None:
    ended = run_toys(2, prepare=announcing(3))
    assert "decision" not in ended.kinds(0)
    assert ended.toys[0].calls.count("reentering") == 1
    assert ended.events(0, "resized")[0].data == {"newcomers": 1, "lost": ()}


def test_a_newcomer_gets_a_random_stream_of_its_own() -> None:
    toys = run_toys(2, prepare=announcing(3)).toys
    assert "joined 1 2" in toys[2].calls
    assert not any(call.startswith("joined") for call in toys[0].calls)


def test_a_newcomer_has_the_buffers_of_a_holder() -> None:
    toys = run_toys(2, prepare=announcing(3)).toys
    assert {int(toy.running[0]) for toy in toys.values()} == {STEPS}


@pytest.mark.parametrize("reaches", [(), (0,), (0, 1)], ids=str)
@pytest.mark.parametrize("name", ["standing", "structure", "transfer.0", "transfer.1", "changed", "gradient.0"])
def test_the_death_of_a_newcomer(name: str, reaches: Sequence[int], tmp_path: Path) -> None:
    job = Job(ledger=tmp_path)
    ended = run_toys(2, [Breakage(2, name, 1, reaches)], job, prepare=announcing(3))
    check_like_no_failure(ended, job, dead=[2])


def test_a_newcomer_that_comes_while_a_group_recovers(tmp_path: Path) -> None:
    job = Job(ledger=tmp_path)

    def prepare(toy: Toy) -> None:
        def announce_and_die(deal: Deal) -> None:
            if toy.membership.index == 1 and toy.steps == 2:
                toy.membership.announce()
                toy.membership.die()

        toy.in_body = announce_and_die

    ended = run_toys(3, job=job, prepare=prepare)
    check_like_no_failure(ended, job, dead=[1])
    failure = ended.events(0, "decision")[0].data["failure"]
    assert (failure["lost"], failure["size_before"], failure["size_after"]) == ((1,), 3, 3)
    assert "decision" in ended.kinds(3)


def test_a_survivor_dies_while_newcomers_get_the_state(tmp_path: Path) -> None:
    job = Job(ledger=tmp_path)
    ended = run_toys(2, [Breakage(1, "transfer.1", 1)], job, prepare=announcing(3))
    check_like_no_failure(ended, job, dead=[1])


# --- policies ------------------------------------------------------------------------------------------------------

DEATH = Breakage(1, "gradient.0", 3)


@dataclass(frozen=True, repr=False)
class Asking:
    """A function as a policy; its text holds its address, as that of a function does."""

    function: Callable[[Failure], Decision]

    def __call__(self, failure: Failure) -> Decision:
        return self.function(failure)


def same(function: Callable[[Failure], Decision]) -> Callable[[int], RecoveryPolicy]:
    """The same policy for each worker, in an object of its own, as in processes."""
    return lambda index: Asking(function)


def test_a_policy_is_asked_about_the_whole_failure() -> None:
    asked: list[Failure] = []

    def policy(failure: Failure) -> Decision:
        asked.append(failure)
        return Replay()

    run_toys(3, [DEATH], policy=same(policy))
    known = [replace(failure, costs=Costs(0.0, None)) for failure in asked]  # times differ from run to run
    assert known == [
        Failure(
            generation=0, step=2, updates=0, phases=("update", "update"), lost=(1,), survivors=(0, 2), size_before=3,
            size_after=2, newcomers=0, behind=0, consecutive=1, ages_s=(), samples_at_risk=6, shares=3,
            shares_lost=1, gradients=1,
            gradients_done=0, elements=1, elements_done=0, closed="", diverged=False,
            checkpoint_step=None, checkpoint_age_s=None, costs=Costs(0.0, None),
        )
    ] * 2  # fmt: skip
    assert asked[0] == asked[1]
    assert asked[0].costs.replay_s > 0


def test_the_decision_is_on_record() -> None:
    event = run_toys(3, [DEATH]).events(0, "decision")[0]
    assert event.data["decision"] == "Replay"
    assert event.data["failure"]["lost"] == (1,)


def test_a_policy_that_aborts_ends_the_job_on_all_survivors_with_its_reason() -> None:
    ended = run_toys(3, [DEATH], policy=same(lambda failure: Abort(f"step {failure.step} is holy")))
    assert {index: str(error) for index, error in ended.errors.items()} == dict.fromkeys((0, 2), "step 2 is holy")
    assert {type(error) for error in ended.errors.values()} == {RecoveryError}
    assert ended.events(0, "aborted")[0].data["reason"] == "step 2 is holy"


def test_after_an_abort_local_state_is_that_of_the_last_commit() -> None:
    ended = run_toys(3, [DEATH], policy=same(lambda failure: Abort("enough")))
    job = Job()
    weights, order = np.stack([np.arange(1, 4)]), job.order()(0)
    for step in range(2):
        ids = order[6 * step : 6 * step + 6].tolist()
        weights[0] = updated(weights[0], sum((sample + 2) ** 2 for sample in ids))
    for index in (0, 2):
        np.testing.assert_array_equal(ended.toys[index].weights, weights)


def raising(failure: Failure) -> Decision:
    raise KeyError("oh")


def nonsense(failure: Failure) -> Decision:
    return "replay"  # type: ignore[return-value]


@pytest.mark.parametrize("policy", [raising, nonsense])
def test_a_policy_that_fails_is_told_so_on_all_survivors(policy: Callable[[Failure], Decision]) -> None:
    ended = run_toys(3, [DEATH], policy=same(policy))
    assert {index: type(error) for index, error in ended.errors.items()} == {0: PolicyError, 2: PolicyError}


@pytest.mark.parametrize("odd", [lambda failure: Abort("I am worker 2"), raising, nonsense])
def test_policies_that_differ_end_the_job_on_all_survivors(odd: Callable[[Failure], Decision]) -> None:
    ended = run_toys(3, [DEATH], policy=lambda index: Asking(odd) if index == 2 else MiniBatchRollback())
    assert {index: type(error) for index, error in ended.errors.items()} == {0: DivergenceError, 2: DivergenceError}
    assert "disagree on the decision of the recovery policy: worker 0: Replay(); worker 1: " in str(ended.errors[0])


def test_rollback_gives_up_on_a_step_that_fails_again_and_again() -> None:
    breakages = [Breakage(1, "gradient.0", nth, dies=False) for nth in (3, 4, 5)]
    ended = run_toys(2, breakages, policy=lambda index: MiniBatchRollback(2))
    assert all("step 3 failed 3 times in a row" in str(ended.errors[index]) for index in (0, 1))


# --- different models ----------------------------------------------------------------------------------------------


def test_workers_that_train_different_models_are_told_so_before_the_first_step() -> None:
    def prepare(toy: Toy) -> None:
        toy.names = [f"weights ({toy.membership.index},) int64"]

    ended = run_toys(2, prepare=prepare)
    assert {type(error) for error in ended.errors.values()} == {DivergenceError}
    assert "first difference is 'weights (1,) int64' against 'weights (0,) int64'" in str(ended.errors[0])
    assert ended.toys[0].steps == 0


# --- the user's code -----------------------------------------------------------------------------------------------


def wrapped_body(wrap: Callable[[Toy, Deal], None]) -> Callable[[Toy], None]:
    def prepare(toy: Toy) -> None:
        toy.body = lambda deal: wrap(toy, deal)  # type: ignore[method-assign]

    return prepare


def swallows(toy: Toy, deal: Deal) -> None:
    with contextlib.suppress(Exception):
        toy.original(deal)


def replaces(toy: Toy, deal: Deal) -> None:
    try:
        toy.original(deal)
    except Exception as error:
        raise ValueError("training failed") from error


def replaces_and_hides(toy: Toy, deal: Deal) -> None:
    try:
        toy.original(deal)
    except Exception:
        raise ValueError("training failed") from KeyError("another cause")


def replaces_by_itself(toy: Toy, deal: Deal) -> None:
    try:
        toy.original(deal)
    except Exception:
        error = ValueError("training failed")
        raise error from error


@pytest.mark.parametrize("wrap", [swallows, replaces, replaces_and_hides, replaces_by_itself])
@pytest.mark.parametrize("reaches", [(), (0,)], ids=str)
def test_a_body_that_catches_the_failure_is_recovered_all_the_same(
    wrap: Callable[[Toy, Deal], None], reaches: Sequence[int], tmp_path: Path
) -> None:
    job = Job(ledger=tmp_path)
    ended = run_toys(3, [Breakage(1, "gradient.0", 3, reaches)], job, prepare=wrapped_body(wrap))
    check_like_no_failure(ended, job, dead=[1])


def test_an_error_that_has_nothing_to_do_with_the_group_goes_through_and_commits_nothing() -> None:
    def wrap(toy: Toy, deal: Deal) -> None:
        if toy.steps == 2:
            raise ZeroDivisionError
        toy.original(deal)

    ended = run_toys(2, prepare=wrapped_body(wrap))
    assert {type(error) for error in ended.errors.values()} == {ZeroDivisionError}
    assert {toy.steps for toy in ended.toys.values()} == {2}


@pytest.mark.parametrize("leave", [SystemExit, KeyboardInterrupt])
def test_a_user_who_leaves_because_of_a_failure_may_go(leave: type[BaseException]) -> None:
    def wrap(toy: Toy, deal: Deal) -> None:
        try:
            toy.original(deal)
        except Exception:
            raise leave from None

    ended = run_toys(2, [Breakage(1, "gradient.0", 3)], prepare=wrapped_body(wrap))
    assert type(ended.errors[0]) is leave


def test_a_worker_that_raises_is_a_lost_worker() -> None:
    def wrap(toy: Toy, deal: Deal) -> None:
        if toy.membership.index == 1 and toy.steps == 2:
            raise ZeroDivisionError
        toy.original(deal)

    ended = run_toys(3, prepare=wrapped_body(wrap))
    assert ended.errors.keys() == {1}
    assert recovered_at(ended, 0) == [(2, 2)]
    np.testing.assert_array_equal(ended.outcomes[0].value.weights, expected(Job()))


def test_an_exception_by_plan_is_the_users_own() -> None:
    ended = run_toys(3, faults=[Fault("commit", worker=1, step=3, kind="exception")])
    assert isinstance(ended.errors[1], FaultInjected)
    np.testing.assert_array_equal(ended.outcomes[0].value.weights, expected(Job()))


def test_a_failure_between_steps_enters_the_function_again() -> None:
    def prepare(toy: Toy) -> None:
        def metric(deal: Deal) -> None:
            toy.membership.comm.allgather_object(1, "metric")

        toy.before_step = metric

    ended = run_toys(3, [Breakage(1, "metric", 3)], prepare=prepare)
    check_like_no_failure(ended, dead=[1])
    assert ended.toys[0].calls.count("reentering") == 2


def test_an_entry_of_the_plan_that_never_fired_is_told_at_the_end() -> None:
    ended = run_toys(2, faults=[Fault("forward", worker=1, step=99)])
    assert "never fired" in ended.events(1, "warning")[0].data["text"]
    assert ended.events(0, "warning") == []


# --- wrong use -----------------------------------------------------------------------------------------------------


def raised_by(script: Callable[[Toy], Any]) -> BaseException:
    def run(toy: Toy) -> Result:
        script(toy)
        raise AssertionError("it should have raised")

    return run_toys(1, script=run).errors[0]


def test_a_step_outside_of_run_is_refused() -> None:
    error = raised_by(lambda toy: toy.engine.step().__enter__())
    assert isinstance(error, UsageError)
    assert "state.step() was used outside elastic.run: call it inside a function" in str(error)


def nested(toy: Toy) -> None:
    def train() -> None:
        with toy.engine.step(), toy.engine.step():
            pass

    toy.engine.run(toy.policy, train)


def test_a_step_inside_a_step_is_refused() -> None:
    error = raised_by(nested)
    assert isinstance(error, UsageError)
    assert "inside another state.step()" in str(error)


def test_a_run_inside_a_run_is_refused() -> None:
    error = raised_by(lambda toy: toy.engine.run(toy.policy, lambda: toy.engine.run(toy.policy, lambda: None)))
    assert isinstance(error, UsageError)


def test_a_state_can_be_run_again_and_goes_on_where_it_is() -> None:
    def twice(toy: Toy) -> Result:
        toy.engine.run(toy.policy, lambda: None)
        return Toy.run(toy)

    ended = run_toys(2, script=twice)
    check_like_no_failure(ended)
    assert ended.results[0].group.generation == 1


def test_a_second_run_begins_with_what_the_first_has_left_and_not_with_its_last_commit() -> None:
    def halves(toy: Toy) -> Result:
        deals = toy.batches()

        def half() -> None:
            for _ in range(2):
                toy.body(next(deals))

        toy.engine.run(toy.policy, half)
        left = toy.weights.copy()
        toy.engine.run(toy.policy, lambda: np.testing.assert_array_equal(toy.weights, left))
        return Result(toy.weights, toy.steps, toy.schedule.value, toy.cursor.committed, toy.membership.group)

    ended = run_toys(2, script=halves)
    assert {result.place for result in ended.results.values()} == {(0, 12)}
    assert {result.schedule for result in ended.results.values()} == {2}


def test_a_failure_that_is_over_is_not_held_against_a_second_run() -> None:
    def twice(toy: Toy) -> Result:
        Toy.run(toy)
        return Toy.run(toy)

    ended = run_toys(3, [Breakage(1, "finish", 1)], script=twice)
    check_like_no_failure(ended, dead=[1])
    assert not ended.events(0, "decision")


# --- the end -------------------------------------------------------------------------------------------------------


def test_the_result_of_the_training_function_is_that_of_run() -> None:
    def run(toy: Toy) -> Result:
        assert toy.engine.run(toy.policy, lambda: "the result") == "the result"
        return Result(toy.weights, 0, 0, toy.cursor.committed, toy.membership.group)

    assert run_toys(2, script=run).errors == {}


def test_who_has_finished_waits_and_enters_again_if_another_is_not_done() -> None:
    """Worker 2 has yet to come through its last step when worker 1 dies; worker 0 has returned already."""
    ended = run_toys(3, [Breakage(1, "gradient.0", STEPS, [0])])
    check_like_no_failure(ended, dead=[1])
    assert ended.toys[0].calls.count("reentering") == 2
    assert ended.toys[2].calls.count("reentering") == 1


def test_if_all_have_finished_nobody_enters_again() -> None:
    ended = run_toys(3, [Breakage(1, "finish")])
    check_like_no_failure(ended, dead=[1])
    assert ended.toys[0].calls.count("reentering") == 1


# --- events of a recovery ------------------------------------------------------------------------------------------


def test_a_recovery_is_told_stage_by_stage() -> None:
    kinds = run_toys(3, [DEATH]).kinds(0)
    assert kinds[kinds.index("failure_detected") :] == [
        "failure_detected", "sockets_cut", "drained", "reformed", "agreed", "decision", "transferred", "recovered",
        "resumed", "finished",
    ]  # fmt: skip


def test_every_event_says_where_the_worker_was() -> None:
    ended = run_toys(3, [DEATH])
    where = [(event.kind, event.generation, event.rank, event.size, event.step) for event in ended.toys[2].events]
    assert ("failure_detected", 0, 2, 3, 2) in where
    assert ("recovered", 1, 1, 2, 2) in where
    assert ("resumed", 1, 1, 2, 3) in where


def test_the_group_is_told_before_and_after_the_state_comes() -> None:
    calls = run_toys(3, [DEATH]).toys[2].calls
    assert calls[-3:] == ["drain", "regrouped", "settled 1 2 1"]


def test_the_broken_group_is_cut_once_for_each_failure() -> None:
    ended = run_toys(3, [DEATH])
    assert [ended.toys[index].membership.aborts for index in (0, 2)] == [1, 1]


# --- scripts that commit themselves --------------------------------------------------------------------------------


def committing_every(steps: int) -> Callable[[Toy], Result]:
    """A script as for stock Horovod: it commits now and then, and goes back to its last commit after a failure."""

    def script(toy: Toy) -> Result:
        def train() -> None:
            for _ in toy.epochs():
                for count, deal in enumerate(toy.batches(), start=1):
                    toy.before_step(deal)
                    toy.body(deal)
                    if count % steps == 0:
                        toy.engine.commit_explicitly()

        toy.train = train  # type: ignore[method-assign]
        return Toy.run(toy)

    return script


def check_explicit(ended: Ended, *, dead: Sequence[int] = ()) -> None:
    assert ended.dead == set(dead)
    for result in ended.results.values():
        np.testing.assert_array_equal(result.weights, expected(Job()))


@pytest.mark.parametrize("every", [1, 2, 4])
@pytest.mark.parametrize("reaches", SUBSETS, ids=str)
@pytest.mark.parametrize("nth", [1, 3, 4])
def test_an_explicit_commit_is_what_a_failure_goes_back_to(every: int, nth: int, reaches: Sequence[int]) -> None:
    ended = run_toys(3, [Breakage(1, "gradient.0", nth, reaches)], script=committing_every(every))
    check_explicit(ended, dead=[1])
    assert ended.toys[0].calls.count("reentering") == 2


@pytest.mark.parametrize("reaches", SUBSETS, ids=str)
@pytest.mark.parametrize("nth", [1, 2])
def test_a_failure_in_an_explicit_commit(nth: int, reaches: Sequence[int]) -> None:
    ended = run_toys(3, [Breakage(1, "changed", nth, reaches)], script=committing_every(2))
    check_explicit(ended, dead=[1])


@pytest.mark.parametrize("every", [3, 100])
@pytest.mark.parametrize("reaches", SUBSETS, ids=str)
def test_what_comes_after_the_last_explicit_commit_is_not_lost_at_the_end(every: int, reaches: Sequence[int]) -> None:
    check_explicit(run_toys(3, [Breakage(1, "finish", 1, reaches)], script=committing_every(every)), dead=[1])


@pytest.mark.parametrize("reaches", SUBSETS, ids=str)
def test_what_comes_after_the_last_explicit_commit_is_done_again_if_one_failed_in_it(reaches: Sequence[int]) -> None:
    ended = run_toys(3, [Breakage(1, "gradient.0", STEPS, reaches)], script=committing_every(3))
    check_explicit(ended, dead=[1])


@pytest.mark.parametrize("nth", [4, 5, 6])
def test_an_epoch_may_end_between_two_explicit_commits(nth: int) -> None:
    check_explicit(run_toys(3, [Breakage(1, "gradient.0", nth)], script=committing_every(3)), dead=[1])


def test_newcomers_join_at_an_explicit_commit_and_all_enter_again() -> None:
    ended = run_toys(2, script=committing_every(2), prepare=announcing(1))
    check_explicit(ended)
    assert sorted(ended.results) == [0, 1, 2]
    assert ended.toys[0].calls.count("reentering") == 2
    assert "decision" not in ended.kinds(0)


def test_an_earlier_failure_is_not_held_against_newcomers() -> None:
    """The group fails, and before its next commit newcomers come: nothing has failed anew."""

    def prepare(toy: Toy) -> None:
        def look(deal: Deal) -> None:
            if toy.membership.group.generation == 1 and toy.membership.index == 0 and not toy.membership.told:
                toy.membership.announce()
            toy.engine.check_for_changes()

        toy.before_step = look

    ended = run_toys(3, [Breakage(1, "gradient.0", 2)], script=committing_every(4), prepare=prepare)
    check_explicit(ended, dead=[1])
    assert len(ended.events(0, "decision")) == 1
    assert ended.kinds(0).count("resized") == 1


def test_hosts_changed_is_a_signal_and_no_error_of_this_package() -> None:
    assert issubclass(HostsChanged, Exception)
    assert HostsChanged.__module__ == "horovod_ft.recovery"


# --- everything at once --------------------------------------------------------------------------------------------

NAMES = ["standing", "structure", "transfer.0", "transfer.1", "changed", "gradient.0", "gradient.1", "finish", POLICY]


@st.composite
def disasters(draw: st.DrawFn) -> tuple[int, list[Breakage]]:
    size = draw(st.integers(2, 4))
    breakages = draw(
        st.lists(
            st.builds(
                Breakage,
                worker=st.integers(0, size - 1),
                name=st.sampled_from(NAMES),
                nth=st.integers(1, 6),
                reaches=st.sets(st.integers(0, size - 1)).map(tuple),
                dies=st.booleans(),
            ),
            min_size=1,
            max_size=4,
            unique_by=lambda breakage: (breakage.worker, breakage.name, breakage.nth),
        )
    )
    return size, breakages


@settings(deadline=None, derandomize=True, database=None, max_examples=25)
@given(
    disaster=disasters(),
    job=st.builds(Job, samples=st.sampled_from([7, 20]), updates=st.integers(1, 2), passes=st.integers(1, 2)),
    newcomers=st.integers(0, 2),
    reverse=st.booleans(),
)
def test_any_sequence_of_failures_ends_as_none_or_without_a_replica(
    disaster: tuple[int, list[Breakage]], job: Job, newcomers: int, reverse: bool
) -> None:
    size, breakages = disaster
    ended = run_toys(
        size, breakages, job, prepare=announcing(3, newcomers), must_break=False,
        policy=lambda index: MiniBatchRollback(50), arrange=(lambda order: order[::-1]) if reverse else tuple,
    )  # fmt: skip
    if ended.errors:
        assert all("no replica is left" in str(error) for error in ended.errors.values())
    else:
        check_like_no_failure(ended, job, dead=sorted(ended.dead))


def test_the_order_of_updates_matters_in_this_training() -> None:
    """Or else the tests above would prove less."""
    ways = {tuple(updated(updated(np.arange(3), a), b).tolist()) for a, b in itertools.permutations((5, 9))}
    assert len(ways) == 2


# --- what a look from outside has found ----------------------------------------------------------------------------


def test_a_worker_who_missed_that_the_others_agreed_is_not_lost() -> None:
    """The agreement completes on worker 0 only; worker 2 dies in it."""
    asked: list[Failure] = []

    def policy(failure: Failure) -> Decision:
        asked.append(failure)
        return Replay()

    breakages = [Breakage(3, "gradient.0", 2), Breakage(2, "standing", 2, reaches=(0,))]
    ended = run_toys(4, breakages, policy=same(policy))
    check_like_no_failure(ended, dead=[2, 3])
    last = asked[-1]
    assert (last.lost, last.survivors, last.size_before, last.size_after) == ((2,), (0, 1), 3, 2)
    assert len(last.phases) == 2


def test_a_training_that_is_done_is_not_given_up() -> None:
    """The policy is not asked: there is nothing to compute again."""
    ended = run_toys(4, [Breakage(2, "finish", 1), Breakage(1, "finish", 2)], policy=same(lambda failure: Abort("no")))
    check_like_no_failure(ended, dead=[1, 2])


def test_what_came_before_the_training_is_no_step() -> None:
    """The time of a step does not count from when its state was made."""
    now = [0.0]
    asked: list[Failure] = []

    def policy(failure: Failure) -> Decision:
        asked.append(failure)
        return Replay()

    def prepare(toy: Toy) -> None:
        toy.engine = Engine(toy.membership, toy, toy.committer, toy.bus, toy.injector, toy.ledger, lambda: now[0])

        def start() -> Result:
            now[0] = 1000.0
            return plain()

        plain, toy.run = toy.run, start  # type: ignore[method-assign]

    run_toys(2, [Breakage(1, "gradient.0", 2)], policy=same(policy), prepare=prepare, script=lambda toy: toy.run())
    assert asked[0].costs.replay_s == 0.0


def test_a_step_can_be_entered_after_one_whose_entering_failed() -> None:
    """A warning that is an error, say."""

    def prepare(toy: Toy) -> None:
        complaints = [RuntimeWarning("not distributed")]

        def complain() -> None:
            if complaints:
                raise complaints.pop()

        toy.stepping = complain  # type: ignore[method-assign]
        train = toy.train

        def again() -> None:
            with contextlib.suppress(RuntimeWarning):
                train()
            train()

        toy.train = again  # type: ignore[method-assign]

    assert not run_toys(1, prepare=prepare).errors


def test_a_run_that_could_not_begin_can_be_begun_again() -> None:
    def script(toy: Toy) -> Result:
        broken = [OSError("no space left on device")]
        look = toy.open_ranges

        def fail() -> tuple[Range, ...]:
            if broken:
                raise broken.pop()
            return look()

        toy.open_ranges = fail  # type: ignore[method-assign]
        toy.committer.open = True
        with pytest.raises(OSError, match="no space left"):
            toy.run()
        return toy.run()

    check_like_no_failure(run_toys(1, script=script))


def test_a_step_can_be_entered_after_one_whose_question_failed() -> None:
    """With an error that is no failure of the group."""

    def prepare(toy: Toy) -> None:
        comm = toy.membership.comm
        errors = [ValueError("a duplicate name")]
        ask = comm.any_async

        def fail(flags: int) -> Any:
            if errors:
                raise errors.pop()
            return ask(flags)

        comm.any_async = fail  # type: ignore[method-assign]
        train = toy.train

        def again() -> None:
            with contextlib.suppress(ValueError):
                train()
            train()

        toy.train = again  # type: ignore[method-assign]

    assert not run_toys(1, prepare=prepare).errors
