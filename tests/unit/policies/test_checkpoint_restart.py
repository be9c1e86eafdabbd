"""Checkpoint-restart: when it goes back, when it has no answer, and when it has checkpoints saved."""

from __future__ import annotations

from dataclasses import replace

import pytest

from horovod_ft.errors import ConfigurationError
from horovod_ft.policies.checkpoint_restart import CheckpointRestart, checkpoint_restart_in
from horovod_ft.policies.rollback import MiniBatchRollback
from horovod_ft.policy import Restart
from horovod_ft.policy_names import parse_policy
from tests.unit.test_policy import FAILURE

SAVED = replace(FAILURE, checkpoint_step=5, checkpoint_age_s=2.0)


def test_it_goes_back_to_the_last_checkpoint() -> None:
    assert CheckpointRestart()(SAVED) == Restart()


def test_it_has_no_answer_before_there_is_one() -> None:
    assert CheckpointRestart()(replace(SAVED, checkpoint_step=None, checkpoint_age_s=None)) is None


def test_its_budget_can_be_spent() -> None:
    assert CheckpointRestart(max_consecutive=2)(replace(SAVED, consecutive=2)) == Restart()
    assert CheckpointRestart(max_consecutive=2)(replace(SAVED, consecutive=3)) is None
    assert CheckpointRestart(at_most=1, within=60.0)(replace(SAVED, ages_s=(59.0,))) is None


def test_it_does_nothing_but_go_back() -> None:
    assert CheckpointRestart().decisions == {Restart}


@pytest.mark.parametrize("every", [0, -3, 0.0, "often", True])
def test_a_schedule_that_cannot_be(every: str | float) -> None:
    with pytest.raises(ConfigurationError, match="it must be"):
        CheckpointRestart(every)


def test_it_says_when_to_save() -> None:
    assert [step for step in range(1, 9) if CheckpointRestart(4).schedule(0, 0.0).due(step, 0.0)] == [4, 5, 6, 7, 8]


def test_a_rarer_failure_lets_auto_save_rarer() -> None:
    often, rarely = (CheckpointRestart(prior_mtbf_s=mtbf_s).schedule(0, 0.0) for mtbf_s in (3600.0, 360000.0))
    assert often.interval_s(0.0) < rarely.interval_s(0.0)


def test_it_is_found_in_a_policy() -> None:
    last = CheckpointRestart(500)
    assert checkpoint_restart_in(last) is last
    assert checkpoint_restart_in(MiniBatchRollback() | last) is last
    assert checkpoint_restart_in(MiniBatchRollback()) is None


def test_it_has_a_name() -> None:
    named = {"checkpoint_restart": CheckpointRestart}
    assert parse_policy("checkpoint_restart(every=500)", named) == CheckpointRestart(500)
