"""What follows from the standings of a group's workers."""

from __future__ import annotations

from typing import Any

import pytest

from horovod_ft.agreement import Agreement, Resume, Standing, agree, conclude, same_everywhere
from horovod_ft.committer import Frontier
from horovod_ft.data import Range
from horovod_ft.errors import DivergenceError, RecoveryError
from horovod_ft.membership.base import Bytes, Group, Pending


def survivor(rank: int, step: int = 4, updates: int = 0, **changes: Any) -> Standing:
    """A worker of a group of four, generation 2."""
    standing = Standing(
        frontier=Frontier(step, updates), fresh=False, torn=False, process=rank, generation=2, rank=rank, size=4,
        computed_by=None, resume=Resume.IN_PLACE, schema="s", consecutive=1, open_ranges=(Range(0, 8, 16),),
        shared_by=Group(rank, 4, 2), phase="step", gradients="was in its step", ages_s=(), step_s=0.0, reduction_s=0.0,
        copies=(), back=False, restarts=0,
    )  # fmt: skip
    return standing._replace(**changes)


def newcomer(**changes: Any) -> Standing:
    changes = {"fresh": True, "generation": -1, "size": 1, "consecutive": 0, "open_ranges": (), **changes}
    return survivor(0, 0, resume=Resume.REENTER, **{"process": 99, **changes})


class Answers:
    """Collectives that answer what a test has prepared."""

    def __init__(self, **answers: list[Any]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def allgather_object(self, value: Any, name: str) -> list[Any]:
        self.asked.append(name)
        return self.answers[name]

    def broadcast_object(self, value: Any, root: int, name: str) -> Any:
        raise NotImplementedError

    def broadcast_bytes(self, buffer: Bytes, root: int, name: str) -> None:
        raise NotImplementedError

    def any_async(self, flags: int) -> Pending:
        raise NotImplementedError


# --- who has the newest state --------------------------------------------------------------------------------------


def test_nobody_lacks_anything_if_all_are_at_the_same_step() -> None:
    agreement = conclude([survivor(0), survivor(2), survivor(3)])
    assert (agreement.holders, agreement.lacking, agreement.frontier) == ((0, 1, 2), (), Frontier(4, 0))


def test_the_newest_step_that_any_survivor_committed_counts() -> None:
    agreement = conclude([survivor(0, 4), survivor(2, 5), survivor(3, 4)])
    assert (agreement.frontier, agreement.holders, agreement.lacking) == (Frontier(5, 0), (1,), (0, 2))


def test_an_applied_update_of_an_open_step_is_newer_than_none() -> None:
    agreement = conclude([survivor(0, 4, 1, computed_by=2), survivor(2, 4, 0)])
    assert (agreement.frontier, agreement.holders, agreement.computed_by) == (Frontier(4, 1), (0,), 2)


def test_a_committed_step_is_newer_than_any_number_of_updates_in_the_step_before() -> None:
    assert conclude([survivor(0, 4, 3), survivor(2, 5, 0)]).frontier == Frontier(5, 0)


def test_a_torn_worker_is_no_holder_even_if_its_frontier_is_the_newest() -> None:
    agreement = conclude([survivor(0, 5, torn=True), survivor(2, 4)])
    assert (agreement.frontier, agreement.holders, agreement.lacking) == (Frontier(4, 0), (1,), (0,))


def test_no_replica_is_left_if_all_survivors_are_torn() -> None:
    with pytest.raises(RecoveryError, match=r"no replica is left, and no checkpoint.* Start the job again"):
        conclude([survivor(0, torn=True), newcomer()])


# --- newcomers and the start ---------------------------------------------------------------------------------------


def test_at_the_start_rank_0_gives_its_state_to_all_others() -> None:
    agreement = conclude([newcomer(), newcomer(), newcomer()])
    assert (agreement.start, agreement.holders, agreement.lacking) == (True, (0,), (1, 2))


def test_the_first_group_has_generation_0_and_lost_nobody() -> None:
    agreement = conclude([newcomer(), newcomer()])
    assert (agreement.generation, agreement.lost, agreement.survivors) == (0, (), ())


def test_a_start_that_was_cut_off_begins_with_a_worker_that_it_has_not_written_into() -> None:
    agreement = conclude([newcomer(torn=True, generation=0), newcomer(generation=0)])
    assert (agreement.start, agreement.holders, agreement.lacking) == (True, (1,), (0,))


def test_a_start_cannot_be_repeated_if_it_was_cut_off_everywhere() -> None:
    with pytest.raises(RecoveryError, match="no replica"):
        conclude([newcomer(torn=True), newcomer(torn=True)])


def test_a_second_start_has_another_generation() -> None:
    assert conclude([newcomer(generation=0), newcomer(generation=-1)]).generation == 1


def test_newcomers_lack_the_state_and_are_no_survivors() -> None:
    agreement = conclude([survivor(1), newcomer(), survivor(3)])
    assert (agreement.newcomers, agreement.lacking, agreement.survivors) == ((1,), (1,), (1, 3))


def test_a_newcomer_never_is_a_holder_even_at_step_0() -> None:
    assert conclude([newcomer(), survivor(1, 0)]).holders == (1,)


# --- who is lost ---------------------------------------------------------------------------------------------------


def test_those_of_the_previous_group_who_are_not_here_are_lost() -> None:
    agreement = conclude([survivor(3), survivor(1)])
    assert (agreement.lost, agreement.survivors, agreement.size_before) == ((0, 2), (3, 1), 4)


def test_nobody_is_lost_if_all_are_here() -> None:
    assert conclude([survivor(rank) for rank in range(4)]).lost == ()


def test_the_previous_group_is_the_one_with_the_highest_generation() -> None:
    agreement = conclude([survivor(0, generation=1, size=5), survivor(1, generation=2, size=2)])
    assert (agreement.generation, agreement.size_before, agreement.lost) == (3, 2, (0,))


# --- the rest ------------------------------------------------------------------------------------------------------


def test_the_most_failures_in_a_row_of_any_worker_count() -> None:
    assert conclude([survivor(0, consecutive=3), survivor(1, consecutive=7), newcomer()]).consecutive == 7


def test_the_samples_at_risk_are_those_of_the_largest_open_step() -> None:
    open_step = (Range(0, 90, 100), Range(1, 0, 12))
    assert conclude([survivor(0), survivor(1, open_ranges=open_step), newcomer()]).at_risk == 22


def test_a_replay_without_an_applied_update_is_free_to_deal_anew() -> None:
    assert conclude([survivor(0), survivor(1)]).open_ranges == ()


def test_a_replay_after_an_applied_update_covers_the_samples_that_it_was_computed_from() -> None:
    ahead = survivor(1, updates=1, open_ranges=(Range(0, 16, 24),))
    assert conclude([survivor(0), ahead]).open_ranges == (Range(0, 16, 24),)


@pytest.mark.parametrize(
    ("resumes", "again"),
    [
        ([Resume.FINISHING, Resume.FINISHING], False),
        ([Resume.FINISHING, Resume.IN_PLACE], True),
        ([Resume.FINISHING, Resume.REENTER], True),
    ],
)
def test_the_function_runs_again_unless_all_have_finished_it(resumes: list[Resume], again: bool) -> None:
    standings = [survivor(rank, resume=resume) for rank, resume in enumerate(resumes)]
    assert conclude(standings).reenter is again


def test_agreeing_takes_one_small_collective() -> None:
    comm = Answers(standing=[survivor(0), survivor(1)])
    agreement = agree(comm, survivor(0), ["w (3,) float32"])
    assert isinstance(agreement, Agreement)
    assert comm.asked == ["standing"]


@pytest.mark.parametrize(
    ("schemas", "said"),
    [
        ([["w (3,) f4", "b (1,) f4"], ["w (3,) f4", "b (2,) f4"]], r"worker 1 .*'b \(2,\) f4' against 'b \(1,\) f4'"),
        ([["w (3,) f4"], ["w (3,) f4", "b (2,) f4"]], "it has 2 tensors, worker 0 has 1"),
        ([["w (3,) f4"], ["w (3,) f4"], ["v (3,) f4"]], "worker 2 trains another model than worker 0"),
    ],
    ids=["shape", "number", "third-worker"],
)
def test_workers_with_different_models_are_told_the_first_difference(schemas: list[list[str]], said: str) -> None:
    standings = [survivor(rank, schema=str(lines)) for rank, lines in enumerate(schemas)]
    with pytest.raises(DivergenceError, match=said):
        agree(Answers(standing=standings, schema=schemas), standings[0], schemas[0])


def test_the_same_answer_everywhere_is_fine() -> None:
    same_everywhere(Answers(colour=["red", "red"]), "colour", "red")


def test_different_answers_are_listed_by_worker() -> None:
    with pytest.raises(DivergenceError, match="disagree on the colour: worker 0: red; worker 1: blue"):
        same_everywhere(Answers(colour=["red", "blue"]), "colour", "red")


def test_a_worker_is_sound_if_it_is_neither_fresh_nor_torn() -> None:
    assert [survivor(0).sound, survivor(0, torn=True).sound, newcomer().sound] == [True, False, False]


def test_who_was_in_the_previous_group_without_knowing_that_it_agreed_is_not_lost() -> None:
    """Worker 7 was its rank 1, and worker 9 its rank 2."""
    standings = [survivor(0, generation=3, size=3, process=5, phase="step"), survivor(2, process=9, phase="commit")]
    agreement = conclude(standings, processes=(5, 7, 9))
    assert (agreement.generation, agreement.size_before) == (4, 3)
    assert (agreement.lost, agreement.survivors, agreement.phases) == ((1,), (0, 2), ("step", "commit"))


def test_who_was_in_which_group_is_told_only_if_need_be() -> None:
    alike = Answers(standing=[survivor(0), newcomer()])
    agree(alike, survivor(0), [])
    assert alike.asked == ["standing"]
    apart = Answers(standing=[survivor(0), survivor(1, generation=3, size=2, process=8)], processes=[(), (0, 8)])
    assert agree(apart, survivor(0), []).survivors == (0, 1)
    assert apart.asked == ["standing", "processes"]
