"""What training runs under: the policy and the place for checkpoints, by argument, environment or default."""

from __future__ import annotations

import os
from typing import TypeAlias

from horovod_ft.checkpoint.options import Checkpoints
from horovod_ft.errors import PolicyError
from horovod_ft.policies.checkpoint_restart import as_often_as
from horovod_ft.policies.rollback import MiniBatchRollback
from horovod_ft.policy import RecoveryPolicy
from horovod_ft.policy_names import parse_policy
from horovod_ft.settings import Settings

#: A folder that all hosts share, a URL, or all options.
Where: TypeAlias = str | os.PathLike[str] | Checkpoints


def asked_policy(argument: RecoveryPolicy | str | None) -> RecoveryPolicy | None:
    """The policy that an argument means; None if it is left out.

    Raises:
        PolicyError: there is no such policy.
    """
    chosen = parse_policy(argument) if isinstance(argument, str) else argument
    if chosen is not None and not callable(chosen):
        raise PolicyError(f"policy must be a recovery policy or the name of one, not {argument!r}")
    return chosen


def asked_place(argument: Where | None) -> Checkpoints | None:
    """The place that an argument means; None if it is left out.

    Raises:
        ConfigurationError: it names no place.
    """
    return argument if argument is None or isinstance(argument, Checkpoints) else Checkpoints(argument)


def chosen(
    policy: RecoveryPolicy | None, place: Checkpoints | None, settings: Settings
) -> tuple[RecoveryPolicy, Checkpoints | None]:
    """What training runs under, from what was asked for and what the environment says."""
    checkpoints = checkpoints_of(place, settings)
    return policy_of(policy, checkpoints, settings), checkpoints


def checkpoints_of(asked: Checkpoints | None, settings: Settings) -> Checkpoints | None:
    """Where checkpoints are saved: as asked, else as the environment says, else nowhere."""
    return asked if asked is not None or not settings.checkpoint else Checkpoints(settings.checkpoint)


def policy_of(asked: RecoveryPolicy | None, checkpoints: Checkpoints | None, settings: Settings) -> RecoveryPolicy:
    """The policy: as asked, else as the environment says, else rollback, with checkpoints for when it has no answer."""
    if asked is not None:
        return asked
    if settings.policy:
        return parse_policy(settings.policy)
    if checkpoints is None:
        return MiniBatchRollback()
    return MiniBatchRollback() | as_often_as(checkpoints)
