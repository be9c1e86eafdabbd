"""Going back to a full copy on a fake world: all are at its step afterwards, and end as if nothing had happened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_ft.data import Deal
from horovod_ft.errors import DivergenceError, JobLostError, PolicyError, RecoveryError, UsageError
from horovod_ft.guard import ReplicaGuard
from horovod_ft.ledger import LedgerReport, verify_ledger
from horovod_ft.policies.rollback import MiniBatchRollback
from horovod_ft.policy import Abort, Decision, Failure, Forward, RecoveryPolicy, Replay, Restart
from horovod_ft.testing.fake_world import Breakage, GroupBroken
from tests.unit.test_recovery import check_like_no_failure
from tests.unit.toy import Ended, Job, Toy, WeightsArena, run_toys

#: Of a job of two epochs with four steps each.
STEPS = 8


def restart_only(failure: Failure) -> Decision | None:
    return Restart()


def copying(every: int) -> Callable[[Toy], None]:
    def prepare(toy: Toy) -> None:
        toy.keep_copies(every)

    return prepare


@dataclass
class Asking:
    """Who calls ``restore``, and when: once, before the step of this number, or inside its body."""

    workers: tuple[int, ...] = (1,)
    step: int = 6
    inside: bool = False
    every: int | None = 2

    def prepare(self, toy: Toy) -> None:
        toy.keep_copies(self.every)
        asked: list[int] = []

        def ask(deal: Deal) -> None:
            me = toy.membership.index
            if toy.steps + 1 == self.step and me in self.workers and not asked:
                asked.append(me)
                toy.engine.go_back()

        if self.inside:
            toy.in_body = ask
        else:
            toy.before_step = ask


def check(ended: Ended, job: Job, *, dead: set[int] | None = None) -> LedgerReport:
    check_like_no_failure(ended, job, dead=sorted(dead or ()))
    assert job.ledger is not None
    report = verify_ledger(job.ledger)
    assert report.exact, report.problems
    assert (report.epochs, report.samples, report.steps) == (2, 2 * job.samples, STEPS)
    return report


def restarts(ended: Ended, index: int = 0) -> list[tuple[int, int]]:
    return [(event.data["to"], event.data["lost_steps"]) for event in ended.events(index, "restarted")]


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("workers", [(1,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("size", [1, 3])
def test_all_go_back_whoever_asks(tmp_path: Path, size: int, workers: tuple[int, ...], inside: bool) -> None:
    if size == 1:
        workers = (0,)
    job = Job(ledger=tmp_path)
    ended = run_toys(size, job=job, prepare=Asking(workers, inside=inside).prepare)
    report = check(ended, job)
    assert restarts(ended) == [(4, 1)]
    assert report.redone == 1


@pytest.mark.parametrize("step", range(3, STEPS + 1))
def test_from_any_step_to_the_newest_copy_before_it(tmp_path: Path, step: int) -> None:
    """Over the end of an epoch too, which comes after the fourth step."""
    job = Job(ledger=tmp_path)
    ended = run_toys(3, job=job, prepare=Asking(step=step).prepare)
    report = check(ended, job)
    newest = (step - 1) // 2 * 2
    assert restarts(ended) == [(newest, step - 1 - newest)]
    assert report.redone == step - 1 - newest


def test_over_the_end_of_an_epoch(tmp_path: Path) -> None:
    job = Job(ledger=tmp_path)
    ended = run_toys(3, job=job, prepare=Asking(step=6, every=3).prepare)
    check(ended, job)
    assert restarts(ended) == [(3, 2)]


def test_the_training_function_is_entered_again(tmp_path: Path) -> None:
    ended = run_toys(3, job=Job(ledger=tmp_path), prepare=Asking().prepare)
    assert [toy.calls.count("reentering") for toy in ended.toys.values()] == [2, 2, 2]


def test_what_each_worker_has_of_its_own_goes_back_too(tmp_path: Path) -> None:
    ended = run_toys(3, job=Job(ledger=tmp_path), prepare=Asking(inside=True).prepare)
    assert [toy.draws.value for toy in ended.toys.values()] == [STEPS] * 3


def test_an_error_of_the_script_that_is_caught_and_answered_with_restore(tmp_path: Path) -> None:
    job = Job(ledger=tmp_path)
    raised: list[bool] = []

    def prepare(toy: Toy) -> None:
        toy.keep_copies(1)

        def fail(deal: Deal) -> None:
            if toy.membership.index == 1 and toy.steps == 5 and not raised:
                raised.append(True)
                toy.weights[:] = -1
                raise ValueError

        train = toy.train

        def careful() -> None:
            try:
                train()
            except ValueError:
                toy.engine.go_back()

        toy.in_body = fail
        toy.train = careful  # type: ignore[method-assign]

    ended = run_toys(3, job=job, prepare=prepare)
    check(ended, job)
    assert restarts(ended) == [(5, 0)]


def test_a_body_that_swallows_the_signal_cannot_stop_it(tmp_path: Path) -> None:
    job = Job(ledger=tmp_path)
    asked: list[bool] = []

    def prepare(toy: Toy) -> None:
        toy.keep_copies(2)

        def ask(deal: Deal) -> None:
            if toy.membership.index == 0 and toy.steps == 5 and not asked:
                asked.append(True)
                try:
                    toy.engine.go_back()
                except BaseException:
                    toy.draws.value += 100
                    raise ValueError from None

        toy.in_body = ask

    ended = run_toys(3, job=job, prepare=prepare)
    check(ended, job)
    assert ended.toys[0].draws.value == STEPS
    assert "refuse" in ended.toys[0].calls


def test_a_worker_that_has_finished_comes_back(tmp_path: Path) -> None:
    job = Job(ledger=tmp_path)
    asked: list[bool] = []

    def prepare(toy: Toy) -> None:
        toy.keep_copies(3)
        train = toy.train

        def and_look_again() -> None:
            train()
            if toy.membership.index == 1 and not asked:
                asked.append(True)
                toy.engine.go_back()

        toy.train = and_look_again  # type: ignore[method-assign]

    ended = run_toys(3, job=job, prepare=prepare)
    check(ended, job)
    assert restarts(ended) == [(6, 2)]


# --- together with failures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["standing", "copies", "gradient.0", "changed"])
@pytest.mark.parametrize("nth", [1, 2, 6])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_death_on_the_way(tmp_path: Path, victim: int, nth: int, name: str) -> None:
    job = Job(ledger=tmp_path)
    breakage = Breakage(victim, name, nth)
    ended = run_toys(3, [breakage], job, prepare=Asking().prepare, must_break=False)
    check(ended, job, dead=ended.dead)
    assert ended.dead <= {victim}


def test_a_newcomer_that_has_no_copy_gets_it(tmp_path: Path) -> None:
    job = Job(ledger=tmp_path)

    def prepare(toy: Toy) -> None:
        Asking(step=7, every=4).prepare(toy)
        ask = toy.before_step

        def announce(deal: Deal) -> None:
            ask(deal)
            if toy.membership.index == 0 and toy.steps == 5 and not toy.membership.told and len(ended_sizes) == 0:
                ended_sizes.append(True)
                toy.membership.announce()

        toy.before_step = announce

    ended_sizes: list[bool] = []
    ended = run_toys(2, job=job, prepare=prepare)
    check(ended, job)
    assert restarts(ended) == [(4, 2)]
    assert len(ended.results) == 3


def test_a_process_that_has_just_begun_is_not_told_that_it_was_regrouped(tmp_path: Path) -> None:
    """Its reset callbacks have nothing to reset. It comes in the moment in which another goes back."""
    announced: list[bool] = []

    def prepare(toy: Toy) -> None:
        Asking(step=7, every=4, workers=(0,)).prepare(toy)
        ask = toy.before_step

        def announce(deal: Deal) -> None:
            if toy.membership.index == 0 and toy.steps == 6 and not announced:
                announced.append(True)
                toy.membership.announce()
            ask(deal)

        toy.before_step = announce

    job = Job(ledger=tmp_path)
    ended = run_toys(2, job=job, prepare=prepare)
    check(ended, job)
    assert restarts(ended) == [(4, 2)]
    calls = ended.toys[2].calls
    assert "regrouped" not in calls[: calls.index("reentering")]


def test_copies_that_not_all_have_come_after_those_that_all_have(tmp_path: Path) -> None:
    """Going back further keeps everybody's own state."""
    job = Job(ledger=tmp_path)

    def prepare(toy: Toy) -> None:
        Asking(every=None, workers=(0,)).prepare(toy)
        ask = toy.before_step

        def save(deal: Deal) -> None:
            if toy.steps == 2 or (toy.steps == 4 and toy.membership.index != 1):
                assert toy.copies is not None
                toy.copies.take(toy.steps)
            ask(deal)

        toy.before_step = save

    ended = run_toys(3, job=job, prepare=prepare)
    check(ended, job)
    assert restarts(ended) == [(2, 3)]


def copied(toy: Toy, step: int) -> WeightsArena:
    assert toy.copies is not None
    arena = toy.copies._of(step).arena
    assert isinstance(arena, WeightsArena)
    return arena


def test_copies_that_differ_do_not_cost_those_of_later_steps_that_some_have(tmp_path: Path) -> None:
    job = Job(ledger=tmp_path)

    def prepare(toy: Toy) -> None:
        Asking(every=None, workers=(0,)).prepare(toy)
        ask = toy.before_step

        def save(deal: Deal) -> None:
            assert toy.copies is not None
            if toy.steps == 2 or (toy.steps == 4 and toy.membership.index != 1):
                toy.copies.take(toy.steps)
            if toy.steps == 2:
                copied(toy, 2).saved += toy.membership.index
            ask(deal)

        toy.before_step = save

    ended = run_toys(3, job=job, prepare=prepare)
    check(ended, job)
    assert restarts(ended) == [(4, 1)]


def test_a_copy_that_differs_counts_no_more_once_that_is_known(tmp_path: Path) -> None:
    """The one who wants to go back dies before it is healed, and the others go on from there."""
    job = Job(ledger=tmp_path)

    def prepare(toy: Toy) -> None:
        Asking(workers=(0,), every=4).prepare(toy)
        ask = toy.before_step

        def spoil(deal: Deal) -> None:
            if toy.steps == 5 and toy.membership.index == 2:
                copied(toy, 4).saved += 1
            ask(deal)

        toy.before_step = spoil

    ended = run_toys(4, [Breakage(0, "structure", 2)], job, prepare=prepare)
    check(ended, job, dead={0})


def test_steps_lost_count_from_where_training_was_however_often_going_back_breaks(tmp_path: Path) -> None:
    """And it counts as going back once."""
    job = Job(ledger=tmp_path)
    breakages = [Breakage(2, "copies", nth, dies=False) for nth in range(1, 12)]
    ended = run_toys(3, breakages, job, prepare=Asking(workers=(0,), every=3).prepare)
    check(ended, job)
    assert restarts(ended) == [(3, 2)]


@pytest.mark.parametrize("step", [6, STEPS + 1])
def test_who_has_gone_back_enters_again_even_if_nobody_wants_that_any_more(tmp_path: Path, step: int) -> None:
    """The one who did dies when the others are back. They had finished already, or were in a step."""
    job = Job(ledger=tmp_path)

    def prepare(toy: Toy) -> None:
        Asking((0,), step, inside=True, every=3).prepare(toy)
        train = toy.train

        def and_look_again() -> None:
            train()
            if toy.membership.index == 0:
                toy.engine.go_back()

        toy.train = and_look_again  # type: ignore[method-assign]

    ended = run_toys(3, [Breakage(0, "copies", 1)], job, prepare=prepare)
    check(ended, job, dead={0})
    assert [ended.toys[index].calls.count("reentering") for index in (1, 2)] == [2, 2]


@pytest.mark.parametrize("every", [1, 3])
def test_a_policy_may_go_back(tmp_path: Path, every: int) -> None:
    job = Job(ledger=tmp_path)
    ended = run_toys(3, [Breakage(1, "gradient.0", 6)], job, policy=lambda index: restart_only,
                     prepare=copying(every))  # fmt: skip
    check(ended, job, dead={1})
    newest = 5 // every * every
    assert restarts(ended) == [(newest, 5 - newest)]


def test_a_policy_that_knows_the_copy_and_what_it_costs(tmp_path: Path) -> None:
    asked: list[Failure] = []

    def policy(failure: Failure) -> Decision:
        asked.append(failure)
        return Replay()

    run_toys(3, [Breakage(1, "gradient.0", 6)], policy=lambda index: policy,
             prepare=copying(2))  # fmt: skip
    failure = asked[0]
    assert (failure.checkpoint_step, failure.checkpoint_age_s) == (4, 0.0)
    assert failure.costs.restart_s == pytest.approx(2 * failure.costs.replay_s)


def test_copies_of_one_step_with_other_light_state_become_one(tmp_path: Path) -> None:
    """The script changes something and saves once more; worker 1 goes back before it comes to that."""
    job = Job(ledger=tmp_path)

    def prepare(toy: Toy) -> None:
        toy.keep_copies(2)
        done: list[bool] = []

        def before(deal: Deal) -> None:
            if toy.steps == 4 and not done:
                done.append(True)
                toy.schedule.value += 100
                if toy.membership.index == 1:
                    toy.engine.go_back()
                assert toy.copies is not None
                toy.copies.take(4)
                toy.reduce(0, "evaluation")

        toy.before_step = before

    ended = run_toys(3, job=job, prepare=prepare)
    assert not ended.errors
    assert len({toy.schedule.value for toy in ended.toys.values()}) == 1


# --- what cannot be gone back to -----------------------------------------------------------------------------------


def test_without_any_copy_the_job_ends_and_says_so() -> None:
    ended = run_toys(3, prepare=Asking(step=2, every=3).prepare)
    assert {type(error) for error in ended.errors.values()} == {RecoveryError}
    assert "there is no full copy of the state yet. StateCommitter" in str(ended.errors[0])


@pytest.mark.parametrize("swallowed", [True, False])
def test_inside_a_step_too_whatever_the_body_makes_of_it(swallowed: bool) -> None:
    """Nobody goes on alone: neither if the error is swallowed, nor if it came while a failure was being handled."""

    asked: list[bool] = []

    def prepare(toy: Toy) -> None:
        toy.keep_copies(None)

        def ask(deal: Deal) -> None:
            if toy.steps != 3 or toy.membership.index != 1 or asked:
                return
            asked.append(True)
            try:
                raise GroupBroken("a collective of the script's own")
            except GroupBroken:
                if not swallowed:
                    toy.engine.go_back()
                with suppress(Exception):
                    toy.engine.go_back()

        toy.in_body = ask

    ended = run_toys(3, prepare=prepare)
    assert {index: type(error) for index, error in ended.errors.items()} == dict.fromkeys(range(3), RecoveryError)


def test_once_training_was_given_up_nobody_goes_back() -> None:
    """Not even a body that answers every error with a restore."""

    def prepare(toy: Toy) -> None:
        toy.keep_copies(2)
        body = toy.body

        def careful(deal: Deal) -> None:
            try:
                body(deal)
            except Exception:
                toy.engine.go_back()

        toy.body = careful  # type: ignore[method-assign]

    ended = run_toys(3, [Breakage(1, "gradient.0", 6)], policy=lambda index: lambda failure: Abort("enough"),
                     prepare=prepare)  # fmt: skip
    assert {str(error) for error in ended.errors.values()} == {"enough"}
    assert len(ended.errors) == 2


def test_a_policy_that_goes_back_without_a_copy_is_told() -> None:
    ended = run_toys(3, [Breakage(1, "gradient.0", 3)], policy=lambda index: restart_only)
    assert {type(error) for error in ended.errors.values()} == {PolicyError}
    assert "there is no full copy of the state to go back to" in str(ended.errors[0])


def test_outside_of_a_run_nobody_goes_back() -> None:
    def script(toy: Toy) -> None:
        toy.keep_copies(1)
        with pytest.raises(UsageError, match=r"outside elastic\.run"):
            toy.engine.go_back()

    run_toys(1, script=script)  # type: ignore[arg-type]


def test_what_fails_again_and_again_ends_the_job() -> None:
    def prepare(toy: Toy) -> None:
        toy.keep_copies(2)

        def always(deal: Deal) -> None:
            if toy.steps == 5:
                toy.engine.go_back()

        toy.before_step = always

    ended = run_toys(3, prepare=prepare)
    assert {type(error) for error in ended.errors.values()} == {RecoveryError}
    assert "gone back to a copy 10 times without getting further than step 5" in str(ended.errors[0])


def test_who_gets_further_may_go_back_as_often_as_it_likes(tmp_path: Path) -> None:
    """Twice before each step, which is sixteen times."""
    job = Job(ledger=tmp_path)

    def prepare(toy: Toy) -> None:
        toy.keep_copies(1)
        asked: Counter[int] = Counter()

        def ask(deal: Deal) -> None:
            if toy.steps and asked[toy.steps] < 2 and toy.membership.index == 1:
                asked[toy.steps] += 1
                toy.engine.go_back()

        toy.before_step = ask

    ended = run_toys(3, job=job, prepare=prepare)
    check(ended, job)
    assert len(restarts(ended)) == 2 * (STEPS - 1)


# --- replicas that differ ------------------------------------------------------------------------------------------


def diverging(at: int, *, every: int = 2, corrupt: Callable[[Toy], None] | None = None) -> Callable[[Toy], None]:
    """A bit flips on worker 1 in a step, where both look for that after each second one."""

    def prepare(toy: Toy) -> None:
        toy.keep_copies(every)
        toy.guarded = ReplicaGuard(2)
        done: list[bool] = []

        def flip(deal: Deal) -> None:
            if toy.membership.index == 1 and toy.steps + 1 == at and not done:
                done.append(True)
                toy.weights[0, 0] ^= 1

        toy.in_body = flip

    return prepare


def rollback_or_restart(index: int) -> RecoveryPolicy:
    return MiniBatchRollback() | restart_only


@pytest.mark.parametrize(("at", "to"), [(5, 4), (6, 4), (4, 2)])
def test_without_a_majority_the_policy_may_go_back_to_copies_that_are_equal(tmp_path: Path, at: int, to: int) -> None:
    """The newest copies were taken just before the look, and differ too."""
    job = Job(ledger=tmp_path)
    ended = run_toys(2, job=job, policy=rollback_or_restart, prepare=diverging(at))
    check(ended, job)
    assert restarts(ended)[0][0] == to
    decisions = ended.events(0, "decision")
    assert [event.data["failure"]["diverged"] for event in decisions] == [True]


def test_if_all_copies_differ_the_job_ends() -> None:
    ended = run_toys(2, policy=rollback_or_restart, prepare=diverging(3, every=1))
    assert {type(error) for error in ended.errors.values()} == {DivergenceError}
    assert "copies of the steps [4, 3] differ" in str(ended.errors[0].__cause__)


def test_a_policy_that_has_no_answer_ends_the_job_with_what_is_wrong() -> None:
    def undecided(failure: Failure) -> None:
        assert failure.diverged

    ended = run_toys(2, policy=lambda index: undecided, prepare=diverging(5))
    assert {type(error) for error in ended.errors.values()} == {DivergenceError}


@pytest.mark.parametrize("answer", [Replay(), Forward()])
def test_a_replay_does_not_mend_replicas_that_differ(answer: Decision) -> None:
    ended = run_toys(2, policy=lambda index: lambda failure: answer, prepare=diverging(5))
    assert {type(error) for error in ended.errors.values()} == {DivergenceError}
    assert "after step 6 the workers have different parameters" in str(ended.errors[0])


def test_who_was_healed_has_no_copy_of_what_it_was(tmp_path: Path) -> None:
    """The bit flips just before a copy is taken. Then nobody else is left who could say that the copy is another."""
    job = Job(ledger=tmp_path)

    def prepare(toy: Toy) -> None:
        toy.keep_copies(6)
        toy.guarded = ReplicaGuard(2)

        def flip(deal: Deal) -> None:
            if toy.membership.index == 2 and toy.steps == 5:
                toy.weights[0, 0] ^= 1

        def leave(deal: Deal) -> None:
            if toy.steps == 6 and toy.membership.index != 2:
                toy.membership.die()

        toy.in_body, toy.before_step = flip, leave

    ended = run_toys(3, job=job, prepare=prepare)
    check(ended, job, dead={0, 1})
    assert ended.events(2, "healed")
    copies = ended.toys[2].copies
    assert copies is not None
    assert copies.steps == ()


# --- anything ------------------------------------------------------------------------------------------------------

NAMES = ("standing", "structure", "decision of the recovery policy", "copies", "gradient.0", "changed", "transfer.0")


@st.composite
def scenarios(draw: st.DrawFn) -> tuple[Asking, list[Breakage]]:
    asking = Asking(
        workers=tuple(draw(st.sets(st.integers(0, 3), min_size=1))), step=draw(st.integers(2, STEPS)),
        inside=draw(st.booleans()), every=draw(st.integers(1, 4)),
    )  # fmt: skip
    breakages = [
        Breakage(draw(st.integers(0, 3)), draw(st.sampled_from(NAMES)), draw(st.integers(1, 10)),
                 reaches=draw(st.sets(st.integers(0, 3), max_size=2)), dies=draw(st.booleans()))
        for _ in range(draw(st.integers(0, 3)))
    ]  # fmt: skip
    return asking, breakages


@settings(max_examples=150, deadline=None)
@given(scenario=scenarios(), answer=st.sampled_from([Replay(), Restart()]))
def test_any_scenario_ends_with_equal_replicas(
    scenario: tuple[Asking, list[Breakage]], answer: Decision, tmp_path_factory: pytest.TempPathFactory
) -> None:
    asking, breakages = scenario
    job = Job(ledger=tmp_path_factory.mktemp("ledger"))

    def policy(failure: Failure) -> Decision | None:
        if failure.consecutive > 30:
            return None
        return Replay() if failure.checkpoint_step is None else answer

    ended = run_toys(4, breakages, job, policy=lambda index: policy, prepare=asking.prepare, must_break=False)
    errors = {type(error) for error in ended.errors.values()}
    if errors not in ({RecoveryError}, {JobLostError}):  # no copy yet, no replica left
        check_like_no_failure(ended, job, dead=sorted(ended.dead))
