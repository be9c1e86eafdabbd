"""Mini-batch rollback: when it replays, and when it gives up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from horovod_ft.errors import PolicyError
from horovod_ft.policies.rollback import MiniBatchRollback
from horovod_ft.policy import Replay
from tests.unit.test_policy import FAILURE

NOBODY_LOST = replace(FAILURE, lost=(), survivors=(0, 1, 2), size_after=3)


def test_a_failure_is_replayed() -> None:
    assert MiniBatchRollback()(FAILURE) == Replay()


def test_losing_workers_is_replayed_however_often() -> None:
    assert MiniBatchRollback(1)(replace(FAILURE, consecutive=100)) == Replay()


@pytest.mark.parametrize("consecutive", [1, 2])
def test_a_failure_that_lost_nobody_is_replayed_a_few_times(consecutive: int) -> None:
    assert MiniBatchRollback(2)(replace(NOBODY_LOST, consecutive=consecutive)) == Replay()


def test_it_has_no_answer_to_a_failure_that_comes_again_and_again_without_losing_anybody() -> None:
    assert MiniBatchRollback(2)(replace(NOBODY_LOST, consecutive=3)) is None


def test_it_can_be_bound_to_a_rate_of_failures() -> None:
    policy = MiniBatchRollback(at_most=3, within=60.0)
    assert policy(replace(FAILURE, ages_s=(10.0, 59.0))) == Replay()
    assert policy(replace(FAILURE, ages_s=(10.0, 59.0, 60.0))) is None
    assert policy(replace(FAILURE, ages_s=(10.0, 61.0, 62.0, 63.0))) == Replay()


def test_not_replaying_at_all_is_not_what_this_policy_is_for() -> None:
    with pytest.raises(PolicyError, match="at least 1"):
        MiniBatchRollback(0)
