"""Who differs from the majority, and what the engine does about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_ft.data import Deal
from horovod_ft.errors import ConfigurationError, DivergenceError
from horovod_ft.guard import ReplicaGuard, Verdict, judge
from horovod_ft.testing.fake_world import Breakage
from tests.unit.test_recovery import check_like_no_failure
from tests.unit.toy import Job, Toy, run_toys

# --- the verdict -----------------------------------------------------------------------------------------------------


def test_one_that_differs_is_named() -> None:
    assert judge([7, 9, 7]) == Verdict((0, 2), (1,))


def test_several_that_differ_each_in_its_way_are_named() -> None:
    assert judge([7, 9, 7, 8, 7]) == Verdict((0, 2, 4), (1, 3))


@pytest.mark.parametrize("digests", [[7, 9], [7, 7, 9, 9], [7, 7, 8, 9], [1, 2, 3]])
def test_half_of_them_is_no_majority(digests: list[int]) -> None:
    assert judge(digests) is None


def test_who_has_numbers_that_are_not_finite_has_no_vote() -> None:
    assert judge([7, 9], [True, False]) == Verdict((0,), (1,))
    assert judge([9, 9, 7], [False, False, True]) == Verdict((2,), (0, 1))


@pytest.mark.parametrize("finite", [[True, True], [False, False]])
def test_votes_do_not_always_settle_it(finite: list[bool]) -> None:
    assert judge([7, 9], finite) is None


@given(digests=st.lists(st.integers(0, 2), min_size=1, max_size=9))
def test_a_verdict_names_everybody_once(digests: list[int]) -> None:
    verdict = judge(digests)
    if verdict is not None:
        assert sorted(verdict.healthy + verdict.differing) == list(range(len(digests)))
        assert len({digests[rank] for rank in verdict.healthy}) == 1
        assert len(verdict.healthy) > len(digests) / 2


@pytest.mark.parametrize("every", [0, -1, True, 1.5])
def test_a_number_of_steps_that_means_nothing_is_refused(every: Any) -> None:
    with pytest.raises(ConfigurationError, match="whole number of steps"):
        ReplicaGuard(every)


# --- in the engine ---------------------------------------------------------------------------------------------------


def guarded(every: int, *, corrupt: int, at: int) -> Any:
    """Guard every training, and change the weights of one worker before it commits a step."""

    def prepare(toy: Toy) -> None:
        toy.guarded = ReplicaGuard(every)
        plain = toy.body

        def body(deal: Deal) -> None:
            plain(deal)
            if toy.membership.index == corrupt and toy.steps + 1 == at:
                toy.weights += 1

        toy.body = body  # type: ignore[method-assign]

    return prepare


def test_a_worker_that_differs_is_named_and_healed(tmp_path: Path) -> None:
    job = Job(ledger=tmp_path)
    ended = run_toys(3, job=job, prepare=guarded(2, corrupt=1, at=4))
    check_like_no_failure(ended, job)
    for index in range(3):
        (event,) = ended.events(index, "diverged")
        assert (event.step, event.data["healthy"], event.data["differing"]) == (4, (0, 2), (1,))
        assert len(ended.events(index, "healed")) == 1


@pytest.mark.parametrize(("at", "found"), [(1, 3), (2, 3), (3, 3), (4, 6)])
def test_it_is_found_within_so_many_steps(at: int, found: int) -> None:
    ended = run_toys(3, prepare=guarded(3, corrupt=1, at=at))
    assert [event.step for event in ended.events(0, "diverged")] == [found]


def test_nothing_is_said_while_all_are_equal() -> None:
    ended = run_toys(3, prepare=guarded(1, corrupt=9, at=1))
    check_like_no_failure(ended)
    assert not ended.events(0, "diverged")


def test_without_a_majority_training_ends_on_all_and_says_so() -> None:
    ended = run_toys(2, prepare=guarded(1, corrupt=1, at=3))
    assert {type(error) for error in ended.errors.values()} == {DivergenceError}
    assert "after step 3 the workers have different parameters" in str(ended.errors[0])


def test_the_one_with_finite_numbers_counts() -> None:
    def prepare(toy: Toy) -> None:
        guarded(1, corrupt=1, at=3)(toy)
        toy.sane = toy.membership.index == 0

    ended = run_toys(2, prepare=prepare)
    check_like_no_failure(ended)
    assert ended.events(1, "diverged")[0].data["differing"] == (1,)


@pytest.mark.parametrize("name", ["digest", "structure", "transfer.0"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_death_while_replicas_are_compared_or_healed(name: str, victim: int, tmp_path: Path) -> None:
    job = Job(ledger=tmp_path)
    ended = run_toys(4, [Breakage(victim, name, 2)], job, prepare=guarded(2, corrupt=1, at=4))
    assert ended.dead == {victim}
    results = list(ended.results.values())
    assert all((result.weights == results[0].weights).all() for result in results)


def test_a_worker_that_differs_does_not_count_if_the_group_breaks_before_it_is_healed(tmp_path: Path) -> None:
    """Worker 0 dies, so that of those left one has the right replica and one another."""
    job = Job(ledger=tmp_path)
    ended = run_toys(3, [Breakage(0, "structure", 2)], job, prepare=guarded(2, corrupt=1, at=4))
    check_like_no_failure(ended, job, dead=[0])
