"""The cheapest way out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from horovod_ft.errors import PolicyError
from horovod_ft.policies.auto import Auto, loss
from horovod_ft.policy import Costs, Forward, Replay, Restart
from tests.unit.test_policy import FAILURE

CHEAPER_FORWARD = replace(FAILURE, costs=Costs(replay_s=0.2, forward_s=0.1))


def test_it_goes_forward_if_that_is_cheaper() -> None:
    assert Auto()(CHEAPER_FORWARD) == Forward()


@pytest.mark.parametrize("replay_s", [0.1, 0.05])
def test_it_replays_if_that_costs_no_more(replay_s: float) -> None:
    assert Auto()(replace(FAILURE, costs=Costs(replay_s=replay_s, forward_s=0.1))) == Replay()


def test_it_replays_if_the_other_way_is_closed() -> None:
    assert Auto()(replace(FAILURE, closed="somebody is behind", costs=Costs(replay_s=9.0, forward_s=None))) == Replay()


def test_the_loss_is_the_missing_part_of_the_update_times_the_part_of_the_workers() -> None:
    failure = replace(FAILURE, elements=100, elements_done=40, lost=(1,), size_before=3)
    assert loss(failure) == pytest.approx(0.6 / 3)


def test_it_replays_if_too_much_would_be_lost() -> None:
    assert Auto(max_loss=0.21)(CHEAPER_FORWARD) == Forward()
    assert Auto(max_loss=0.19)(CHEAPER_FORWARD) == Replay()


def test_nothing_is_lost_of_an_update_without_elements() -> None:
    assert loss(replace(FAILURE, elements=0, elements_done=0)) == 0.0


def test_it_has_no_answer_when_its_budget_is_spent() -> None:
    assert Auto(max_consecutive=1)(replace(CHEAPER_FORWARD, consecutive=2)) is None


def test_replicas_that_differ_are_left_behind_if_there_is_a_copy() -> None:
    diverged = replace(FAILURE, diverged=True)
    assert Auto()(diverged) == Restart()
    assert Auto()(replace(diverged, checkpoint_step=None)) is None
    assert Restart in Auto().decisions


@pytest.mark.parametrize("max_loss", [-0.1, 1.1, float("nan")])
def test_an_impossible_bound_is_refused(max_loss: float) -> None:
    with pytest.raises(PolicyError, match="between 0 and 1"):
        Auto(max_loss=max_loss)
