"""The policy and the place for checkpoints: argument before environment before default."""

from __future__ import annotations

from dataclasses import replace

import pytest

from horovod_ft.checkpoint.options import Checkpoints
from horovod_ft.choices import asked_place, asked_policy, checkpoints_of, policy_of
from horovod_ft.errors import PolicyError
from horovod_ft.policies.checkpoint_restart import checkpoint_restart_in
from horovod_ft.policies.lossy_forward import LossyForward
from horovod_ft.policies.rollback import MiniBatchRollback
from horovod_ft.settings import Settings

PLAIN = Settings.from_environment({})
STORE = Checkpoints("/store", every=7)


def test_a_name_means_the_policy_of_that_name() -> None:
    assert asked_policy("rollback") == MiniBatchRollback()
    assert asked_policy(None) is None


def test_what_is_no_policy_is_refused() -> None:
    with pytest.raises(PolicyError):
        asked_policy(3)  # type: ignore[arg-type]


def test_a_folder_means_checkpoints_there() -> None:
    assert asked_place("/store") == Checkpoints("/store")
    assert asked_place(STORE) is STORE
    assert asked_place(None) is None


def test_the_argument_comes_before_the_environment() -> None:
    settings = replace(PLAIN, policy="lossy_forward", checkpoint="/other")
    assert policy_of(MiniBatchRollback(), None, settings) == MiniBatchRollback()
    assert checkpoints_of(STORE, settings) is STORE


def test_the_environment_comes_before_the_default() -> None:
    settings = replace(PLAIN, policy="lossy_forward", checkpoint="/other")
    assert policy_of(None, None, settings) == LossyForward()
    assert checkpoints_of(None, settings) == Checkpoints("/other")


def test_by_default_a_step_is_rolled_back_and_nothing_is_saved() -> None:
    assert policy_of(None, None, PLAIN) == MiniBatchRollback()
    assert checkpoints_of(None, PLAIN) is None


def test_with_checkpoints_they_are_the_last_resort() -> None:
    restart = checkpoint_restart_in(policy_of(None, STORE, PLAIN))
    assert restart is not None
    assert restart.every == 7
