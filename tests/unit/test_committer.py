"""The per-step committer: counters and light state move together."""

from __future__ import annotations

import pytest

from horovod_ft.committer import Committer, Frontier
from tests.unit.toy import Value


@pytest.fixture
def schedule() -> Value:
    return Value(10)


@pytest.fixture
def draws() -> Value:
    return Value(0, replicated=False)


@pytest.fixture
def committer(schedule: Value, draws: Value) -> Committer:
    return Committer([schedule, draws])


def test_a_new_process_is_fresh_and_at_the_beginning(committer: Committer) -> None:
    assert (committer.fresh, committer.torn, committer.frontier) == (True, False, Frontier(0, 0))


def test_frontiers_are_ordered_by_step_and_then_by_updates() -> None:
    assert Frontier(1, 0) < Frontier(1, 1) < Frontier(2, 0)


def test_a_commit_counts_a_step_and_keeps_what_it_did(committer: Committer, schedule: Value) -> None:
    committer.begin()
    schedule.value = 11
    committer.commit()
    committer.rollback()
    assert (committer.frontier, schedule.value) == (Frontier(1, 0), 11)


def test_a_rollback_returns_to_the_beginning_of_the_step(committer: Committer, schedule: Value, draws: Value) -> None:
    committer.begin()
    schedule.value, draws.value = 11, 5
    committer.rollback()
    assert (schedule.value, draws.value, committer.frontier) == (10, 0, Frontier(0, 0))


def test_a_rollback_without_an_open_step_changes_nothing(committer: Committer, schedule: Value) -> None:
    schedule.value = 11
    committer.rollback()
    assert schedule.value == 11


def test_a_step_that_is_open_is_not_begun_again(committer: Committer, schedule: Value) -> None:
    committer.begin()
    schedule.value = 11
    committer.begin()
    committer.rollback()
    assert schedule.value == 10


def test_updates_are_admitted_and_counted(committer: Committer) -> None:
    committer.begin()
    assert committer.admit_update()
    committer.update_applied(generation=3)
    assert (committer.frontier, committer.computed_by) == (Frontier(0, 1), 3)


def test_a_replay_skips_the_updates_that_are_in_the_parameters(committer: Committer) -> None:
    committer.begin()
    committer.admit_update()
    committer.update_applied(generation=0)
    committer.rollback()
    committer.begin()
    assert [committer.admit_update(), committer.admit_update()] == [False, True]


def test_the_first_update_says_which_group_computed_the_step(committer: Committer) -> None:
    for generation in (3, 4):
        committer.admit_update()
        committer.update_applied(generation)
    assert committer.computed_by == 3


def test_after_a_commit_updates_count_from_none(committer: Committer) -> None:
    committer.admit_update()
    committer.update_applied(0)
    committer.commit()
    assert (committer.frontier, committer.computed_by, committer.admit_update()) == (Frontier(1, 0), None, True)


def test_only_replicated_parts_are_exported(committer: Committer) -> None:
    assert committer.export() == [10]


def test_adopting_takes_over_the_replicated_parts_and_the_frontier(
    committer: Committer, schedule: Value, draws: Value
) -> None:
    committer.torn = True
    draws.value = 5
    committer.adopt([42], None, Frontier(7, 1), computed_by=2)
    assert (schedule.value, draws.value) == (42, 5)
    assert (committer.frontier, committer.computed_by, committer.fresh, committer.torn) == (
        Frontier(7, 1), 2, False, False,
    )  # fmt: skip


def test_adopting_no_values_leaves_the_parts_as_they_are(committer: Committer, schedule: Value) -> None:
    committer.adopt(None, [9], Frontier(7, 1), computed_by=2)
    assert (schedule.value, committer.committed) == (10, [9])


def test_the_values_of_the_last_commit_are_kept_while_the_script_changes_them_between_steps(
    committer: Committer, schedule: Value
) -> None:
    committer.begin()
    schedule.value = 11
    committer.commit()
    schedule.value = 12
    assert (committer.committed, committer.export()) == ([11], [12])


def test_a_worker_that_adopted_updates_skips_them(committer: Committer) -> None:
    committer.adopt([42], None, Frontier(7, 1), computed_by=2)
    assert [committer.admit_update(), committer.admit_update()] == [False, True]


def test_nobody_has_computed_a_step_without_updates(committer: Committer) -> None:
    committer.adopt([42], None, Frontier(7, 0), computed_by=2)
    assert committer.computed_by is None


def test_parts_that_do_not_match_the_holders_are_an_error(committer: Committer) -> None:
    with pytest.raises(ValueError, match="zip"):
        committer.adopt([1, 2], None, Frontier(1, 0), None)
