"""Lossy forward recovery, the decision: when it goes forward, and with what."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from horovod_ft.errors import PolicyError
from horovod_ft.policies.lossy_forward import LossyForward
from horovod_ft.policy import Forward, Replay
from tests.unit.test_policy import FAILURE


def test_it_goes_forward() -> None:
    assert LossyForward()(FAILURE) == Forward("reduce_again", rescale=True)


@pytest.mark.parametrize("missing", ["reduce_again", "local", "skip"])
@pytest.mark.parametrize("rescale", [True, False])
def test_its_arguments_say_how(missing: str, rescale: bool) -> None:
    assert LossyForward(missing, rescale)(FAILURE) == Forward(missing, rescale)


def test_it_replays_where_there_is_nothing_to_carry_forward() -> None:
    assert LossyForward()(replace(FAILURE, closed="worker 0 has just joined")) == Replay()


@pytest.mark.parametrize("closed", ["", "worker 0 has just joined"])
def test_it_has_no_answer_when_its_budget_is_spent(closed: str) -> None:
    assert LossyForward(max_consecutive=2)(replace(FAILURE, consecutive=3, closed=closed)) is None
    assert LossyForward(at_most=1, within=9.0)(replace(FAILURE, ages_s=(3.0,), closed=closed)) is None


def test_any_number_of_failures_can_be_allowed() -> None:
    assert LossyForward(max_consecutive=None)(replace(FAILURE, consecutive=99)) == Forward()


@pytest.mark.parametrize(
    "arguments", [{"missing": "guess"}, {"rescale": "yes"}, {"max_consecutive": 0}, {"at_most": 3}]
)
def test_arguments_that_mean_nothing_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(PolicyError, match=r"must be|belong together"):
        LossyForward(**arguments)
