"""The engine carrying a mini-batch forward on a fake world: replicas stay equal, and what is lost is on record."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_ft.data import Deal
from horovod_ft.errors import JobLostError, PolicyError
from horovod_ft.faults.plan import Fault
from horovod_ft.ledger import LedgerReport, Lossy, verify_ledger
from horovod_ft.policies.auto import loss
from horovod_ft.policies.lossy_forward import LossyForward
from horovod_ft.policies.rollback import MiniBatchRollback
from horovod_ft.policy import Decision, Failure, Forward, RecoveryPolicy, Replay
from horovod_ft.testing.fake_world import Breakage, GroupBroken
from tests.unit.test_recovery import check_like_no_failure
from tests.unit.toy import Ended, Integers, Job, Toy, contribution, expected, initial, run_toys, updated

DEATH = Breakage(1, "gradient.0", 3)


def forward(index: int) -> RecoveryPolicy:
    return LossyForward(max_consecutive=None)


def without(job: Job, report: LedgerReport) -> Integers:
    """The weights at the end if exactly the samples that the ledger calls lost did not count in their steps."""
    assert job.batch.total is not None
    weights = initial()
    order = job.order()
    step = 0
    for epoch in range(job.epochs):
        for at in range(0, job.samples, job.batch.total):
            step += 1
            lost = report.lossy[step].ids if step in report.lossy else ()
            ids = [int(sample) for sample in order(epoch)[at : at + job.batch.total] if sample not in lost]
            weights = updated(weights, contribution(ids, 0))
    return weights


def check_accounted_for(ended: Ended, job: Job, *, dead: Sequence[int]) -> LedgerReport:
    """All survivors have what follows from the ledger, and the ledger accounts for every sample."""
    assert job.ledger is not None
    report = verify_ledger(job.ledger)
    assert ended.dead == set(dead)
    assert report.complete, report.problems
    assert (report.epochs, report.samples) == (job.epochs, job.epochs * job.samples)
    for index, result in ended.results.items():
        np.testing.assert_array_equal(result.weights[0], without(job, report), err_msg=f"worker {index}")
        assert result.schedule == result.steps == report.steps
        assert result.place == (job.epochs, 0)
    return report


@pytest.mark.parametrize("nth", range(1, 9))
def test_the_survivors_finish_the_batch_and_the_share_of_the_dead_is_on_record(nth: int, tmp_path: Path) -> None:
    job = Job(ledger=tmp_path)
    ended = run_toys(3, [Breakage(1, "gradient.0", nth)], job, policy=forward)
    report = check_accounted_for(ended, job, dead=[1])
    assert list(report.lossy) == [nth]
    assert len(report.lossy[nth].ids) == (2 if nth not in (4, 8) else 1)  # the last batch of an epoch has two samples
    assert not report.exact
    assert ended.kinds(0).count("forward") == 1


def test_the_body_of_the_loop_does_not_notice(tmp_path: Path) -> None:
    bodies: dict[int, int] = {}

    def count(toy: Toy) -> None:
        def body(deal: Deal) -> None:
            bodies[toy.membership.index] = bodies.get(toy.membership.index, 0) + 1

        toy.in_body = body

    run_toys(3, [DEATH], Job(ledger=tmp_path), policy=forward, prepare=count)
    assert bodies == {0: 8, 1: 3, 2: 8}


def test_what_is_lost_is_told(tmp_path: Path) -> None:
    ended = run_toys(3, [DEATH], Job(ledger=tmp_path), policy=forward)
    (event,) = ended.events(0, "forward")
    assert event.data["gone"] == (1,)
    assert (event.data["lossy"], event.data["lossy_elements"], event.data["elements"]) == (("weights",), 1, 1)
    assert event.data["samples"] == list(verify_ledger(tmp_path).lossy[3].ids)
    assert ended.events(0, "decision")[0].data["decision"] == "Forward"


@pytest.mark.parametrize("reaches", [(0,), (2,)], ids=str)
def test_a_reduction_that_completed_on_a_survivor_loses_nothing(reaches: Sequence[int], tmp_path: Path) -> None:
    job = Job(ledger=tmp_path)
    ended = run_toys(3, [Breakage(1, "gradient.0", 3, reaches)], job, policy=forward)
    check_like_no_failure(ended, job, dead=[1])
    assert verify_ledger(tmp_path).exact


def test_one_that_completed_on_all_survivors_is_no_failure_yet(tmp_path: Path) -> None:
    job = Job(ledger=tmp_path)
    ended = run_toys(3, [Breakage(1, "gradient.0", 3, (0, 2))], job, policy=forward)
    assert set(check_accounted_for(ended, job, dead=[1]).lossy) <= {4}


@pytest.mark.parametrize("victim", [0, 2, 3])
@pytest.mark.parametrize("name", ["standing", "decision of the recovery policy", "completion"])
def test_a_second_death_on_the_way_forward(victim: int, name: str, tmp_path: Path) -> None:
    job = Job(ledger=tmp_path)
    nth = 2 if name == "standing" else 1
    ended = run_toys(4, [DEATH, Breakage(victim, name, nth)], job, policy=forward)
    report = check_accounted_for(ended, job, dead=sorted({1, victim}))
    assert len(report.lossy) == 1


@pytest.mark.parametrize("reaches", [(0,), (2,), (0, 2), (0, 2, 3)], ids=str)
def test_a_second_death_when_some_have_completed_the_update(reaches: Sequence[int], tmp_path: Path) -> None:
    """They have applied it by the time the others fail; those are brought forward."""
    job = Job(ledger=tmp_path)
    ended = run_toys(4, [DEATH, Breakage(3, "completion", 1, reaches)], job, policy=forward)
    check_accounted_for(ended, job, dead=[1, 3])


def test_a_failure_that_loses_nobody_loses_nothing(tmp_path: Path) -> None:
    job = Job(ledger=tmp_path)
    ended = run_toys(3, [Breakage(1, "gradient.0", 3, dies=False)], job, policy=forward)
    check_like_no_failure(ended, job)
    assert verify_ledger(tmp_path).exact


def test_down_to_one(tmp_path: Path) -> None:
    job = Job(ledger=tmp_path)
    ended = run_toys(3, [Breakage(0, "gradient.0", 2), Breakage(2, "gradient.0", 6)], job, policy=forward)
    report = check_accounted_for(ended, job, dead=[0, 2])
    assert set(report.lossy) == {2, 6}


def test_several_batches_summed_up(tmp_path: Path) -> None:
    job = Job(passes=2, ledger=tmp_path)
    ended = run_toys(3, [Breakage(1, "gradient.0", 2)], job, policy=forward)
    assert ended.results[0].weights.tolist() == ended.results[2].weights.tolist()
    report = verify_ledger(tmp_path)
    assert report.complete
    assert len(report.lossy[2].ids) == 3  # two of the third batch, one of the fourth


def test_who_joins_in_the_same_moment_closes_the_way(tmp_path: Path) -> None:
    job = Job(ledger=tmp_path)

    def announce(toy: Toy) -> None:
        def body(deal: Deal) -> None:
            if toy.membership.index == 0 and toy.steps == 2 and toy.membership.group.size == 3:
                toy.membership.announce()

        toy.in_body = body

    ended = run_toys(3, [DEATH], job, policy=forward, prepare=announce)
    check_like_no_failure(ended, job, dead=[1])
    failure = ended.events(0, "decision")[0].data["failure"]
    assert "has just joined" in failure["closed"]
    assert failure["newcomers"] == 1


# --- several updates in a step ---------------------------------------------------------------------------------------


def test_a_batch_that_was_given_up_is_not_carried_forward_if_the_replay_breaks(tmp_path: Path) -> None:
    """The newcomer that closes the way dies, too. By then the gradients are gone."""
    job = Job(ledger=tmp_path)
    announced: list[bool] = []

    def prepare(toy: Toy) -> None:
        def announce(deal: Deal) -> None:
            if toy.membership.index == 0 and toy.steps == 3 and not announced:
                announced.append(True)
                toy.membership.announce()

        toy.before_step = announce

    breakages = [Breakage(1, "gradient.0", 4), Breakage(3, "structure")]
    ended = run_toys(3, breakages, job, policy=forward, prepare=prepare)
    check_like_no_failure(ended, job, dead=[1, 3])
    assert [event.data["decision"] for event in ended.events(0, "decision")] == ["Replay", "Replay"]
    assert "given up" in ended.events(0, "decision")[-1].data["failure"]["closed"]


def test_the_lost_samples_of_a_second_update(tmp_path: Path) -> None:
    job = Job(updates=2, ledger=tmp_path)
    ended = run_toys(4, [Breakage(0, "gradient.0", 3), Breakage(3, "gradient.1", 3)], job, policy=forward)
    assert ended.dead == {0, 3}
    batch = job.order()(0)[12:18].tolist()  # shares 2, 2, 1, 1
    told = [event.data["samples"] for event in ended.events(1, "forward")]
    assert told[0] == batch[0:2]
    assert set(told[1]) == {*batch[0:2], batch[5]}, (told, batch)


def test_the_ledger_knows_a_loss_in_the_second_update(tmp_path: Path) -> None:
    """The first update's gradients broke without losing anybody; in the second somebody dies."""
    job = Job(updates=2, ledger=tmp_path)
    breakages = [Breakage(0, "gradient.0", 3, dies=False), Breakage(3, "gradient.1", 3)]
    ended = run_toys(4, breakages, job, policy=forward)
    assert ended.dead == {3}
    (told,) = [event.data["lossy"] for event in ended.events(1, "forward") if event.data["gone"]]
    assert told
    assert not verify_ledger(tmp_path).exact
    assert 3 in verify_ledger(tmp_path).lossy
    assert verify_ledger(tmp_path).lossy[3].ids


def test_a_later_update_of_the_step_is_on_record_too(tmp_path: Path) -> None:
    """Both of its updates lack the share of the dead; the second was never carried forward."""
    ended = run_toys(3, [Breakage(1, "gradient.0", 3)], Job(updates=2, ledger=tmp_path), policy=forward)
    (event,) = ended.events(0, "forward")
    assert verify_ledger(tmp_path).lossy[3] == Lossy(tuple(event.data["samples"]), 2, 2)


# --- when the policy decides otherwise -------------------------------------------------------------------------------


@dataclass
class Asking:
    """A policy that asks a function, and can make any decision."""

    function: Callable[[Failure], Decision | None]

    def __call__(self, failure: Failure) -> Decision | None:
        return self.function(failure)


def asking(function: Callable[[Failure], Decision | None]) -> Callable[[int], RecoveryPolicy]:
    return lambda index: Asking(function)


@pytest.mark.parametrize("swallow", [False, True])
def test_a_replay_that_is_decided_in_the_middle_of_the_body_undoes_what_the_body_does_on_its_way_out(
    swallow: bool, tmp_path: Path
) -> None:
    job = Job(ledger=tmp_path)

    def prepare(toy: Toy) -> None:
        plain = toy.body

        def body(deal: Deal) -> None:
            with contextlib.suppress(GroupBroken) if swallow else contextlib.nullcontext():
                try:
                    plain(deal)
                except GroupBroken:
                    toy.schedule.value += 100
                    raise

        toy.body = body  # type: ignore[method-assign]

    ended = run_toys(3, [DEATH], job, policy=asking(lambda failure: Replay()), prepare=prepare)
    check_like_no_failure(ended, job, dead=[1])
    assert "refuse" in ended.toys[0].calls


def test_another_error_on_the_way_out_is_the_users() -> None:
    def prepare(toy: Toy) -> None:
        plain = toy.body

        def body(deal: Deal) -> None:
            try:
                plain(deal)
            except GroupBroken:
                raise SystemExit(3) from None

        toy.body = body  # type: ignore[method-assign]

    ended = run_toys(3, [DEATH], policy=asking(lambda failure: Replay()), prepare=prepare)
    assert {type(error) for error in ended.errors.values()} == {SystemExit}


def test_a_spent_budget_hands_over_to_the_next_policy(tmp_path: Path) -> None:
    job = Job(ledger=tmp_path)
    breakages = [Breakage(1, "gradient.0", 3), Breakage(2, "completion", 1)]
    ended = run_toys(4, breakages, job, policy=lambda index: LossyForward(max_consecutive=1) | MiniBatchRollback())
    check_like_no_failure(ended, job, dead=[1, 2])
    assert [event.data["decision"] for event in ended.events(0, "decision")] == ["Forward", "Replay"]


def test_without_an_answer_the_job_ends_and_says_why() -> None:
    breakages = [Breakage(1, "gradient.0", 3), Breakage(2, "completion", 1)]
    ended = run_toys(4, breakages, policy=lambda index: LossyForward(max_consecutive=1))
    assert {type(error) for error in ended.errors.values()} == {JobLostError}
    said = str(ended.errors[0])
    assert "step 3 failed 2 times in a row, and the last failure took the workers" in said
    assert "LossyForward(missing='reduce_again'" in said


def test_a_policy_whose_text_holds_an_address_may_have_no_answer() -> None:
    ended = run_toys(3, [DEATH], policy=lambda index: lambda failure: None)
    assert {type(error) for error in ended.errors.values()} == {JobLostError}
    assert "has no answer to that" in str(ended.errors[0])


def test_going_forward_where_that_is_closed_ends_the_job_on_all() -> None:
    ended = run_toys(3, [Breakage(1, "gradient.0", 3, (0,))], policy=asking(lambda failure: Forward()))
    assert {type(error) for error in ended.errors.values()} == {PolicyError}
    assert "that way is closed" in str(ended.errors[0])


def test_earlier_failures_are_remembered(tmp_path: Path) -> None:
    asked: list[Failure] = []

    def policy(failure: Failure) -> Decision:
        asked.append(failure)
        return Replay()

    run_toys(3, [Breakage(0, "gradient.0", 2), Breakage(2, "gradient.0", 6)], policy=asking(policy))
    assert [len(failure.ages_s) for failure in asked] == [0, 0, 1]
    assert asked[-1].ages_s[0] >= 0


def test_auto_bounds_what_is_lost_over_a_second_failure(tmp_path: Path) -> None:
    """max_loss=0.3: the first death loses 1/4; after the second half of the batch would be lost."""
    seen: list[float] = []

    def policy(failure: Failure) -> Decision:
        seen.append(loss(failure))
        return Replay() if failure.closed else Forward()

    run_toys(4, [Breakage(1, "gradient.0", 3), Breakage(2, "completion", 1)], Job(), policy=asking(policy))
    assert max(seen) == 0.5, sorted(set(seen))


# --- anything, anywhere ----------------------------------------------------------------------------------------------

NAMES = ("gradient.0", "changed", "standing", "completion", "structure")
BREAKAGES = st.lists(
    st.builds(
        Breakage, worker=st.integers(0, 3), name=st.sampled_from(NAMES), nth=st.integers(1, 5),
        reaches=st.sampled_from([(), (0,), (3,), (1, 2), (0, 1, 2, 3)]), dies=st.booleans(),
    ),
    max_size=3,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(breakages=BREAKAGES)
def test_replicas_are_equal_whatever_breaks(breakages: list[Breakage]) -> None:
    policy = LossyForward(max_consecutive=None) | MiniBatchRollback(max_consecutive=50)
    ended = run_toys(4, breakages, policy=lambda index: policy, must_break=False)
    if ended.errors:  # the only worker with a state died while it was sending it
        assert all("no replica is left" in str(error) for error in ended.errors.values())
        assert ended.errors.keys() | ended.dead == ended.toys.keys()
        return
    lossy = any(ended.events(index, "forward") for index in ended.toys)
    results = list(ended.results.values())
    for result in results[1:]:
        np.testing.assert_array_equal(result.weights, results[0].weights)
    if results and not lossy:
        np.testing.assert_array_equal(results[0].weights, expected(Job()))


def test_a_fault_can_strike_while_the_update_is_completed(tmp_path: Path) -> None:
    job = Job(ledger=tmp_path)
    faults = [Fault(phase="completion", worker=2, step=3)]
    ended = run_toys(4, [DEATH], job, policy=forward, faults=faults)
    check_accounted_for(ended, job, dead=[1, 2])
