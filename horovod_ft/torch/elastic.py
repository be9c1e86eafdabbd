"""``hvd.elastic``: run a training function through failures, with the names that Horovod users know."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from horovod.common.elastic import ObjectState, State, run_fn
from horovod.common.exceptions import HostsUpdatedInterrupt

from horovod_ft.agreement import Reach
from horovod_ft.checkpoint.options import Checkpoints
from horovod_ft.choices import Where, asked_place, asked_policy, chosen
from horovod_ft.committer import Committer
from horovod_ft.data import Range
from horovod_ft.errors import ConfigurationError
from horovod_ft.guard import ReplicaGuard
from horovod_ft.membership.base import Group
from horovod_ft.parts import BasePart
from horovod_ft.policies.auto import Auto
from horovod_ft.policies.checkpoint_restart import CheckpointRestart
from horovod_ft.policies.lossy_forward import LossyForward
from horovod_ft.policies.rollback import MiniBatchRollback
from horovod_ft.policy import Abort, Decision, Failure, Forward, RecoveryPolicy, Replay, Restart
from horovod_ft.recovery import Engine, HostsChanged
from horovod_ft.snapshot import StateCommitter
from horovod_ft.torch import sampler, state
from horovod_ft.torch.loader import ElasticDataLoader
from horovod_ft.torch.runtime import current, init, shutdown
from horovod_ft.torch.sampler import ElasticSampler
from horovod_ft.torch.scaling import LearningRateRule
from horovod_ft.torch.state import TorchState
from horovod_ft.trainee import Finished

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=State)
Training = Callable[Concatenate[S, P], R]


@overload
def run(function: Training[S, P, R], /) -> Training[S, P, R]: ...


@overload
def run(
    *, policy: RecoveryPolicy | str | None = None, checkpoint: Where | None = None
) -> Callable[[Training[S, P, R]], Training[S, P, R]]: ...


def run(
    function: Any = None, /, *, policy: RecoveryPolicy | str | None = None, checkpoint: Where | None = None
) -> Any:
    """Decorate a training function ``train(state, ...)`` so that it goes on when workers die or join.

    Used as ``@run`` or ``@run(policy=...)``. The function's first argument is the state. A failure inside
    ``state.step()`` is recovered where it is; a failure elsewhere enters the function again, as Horovod does, at least
    once for what is left. All workers have to call it with the same model.

    Args:
        policy: what to do after a failure: a policy, or its name as in ``HOROVOD_FT_POLICY``. Default: the environment,
            else ``MiniBatchRollback()``, and where that has no answer ``CheckpointRestart()`` if there are checkpoints.
        checkpoint: where durable checkpoints are saved, for when no replica is left: a folder that all hosts share, a
            URL, or ``Checkpoints(...)``. A job that begins goes on from the newest one there. Default:
            ``HOROVOD_FT_CHECKPOINT``, else nowhere.

    Raises:
        PolicyError: there is no such policy.
        ConfigurationError: ``checkpoint`` names no place.
    """
    asked, place = asked_policy(policy), asked_place(checkpoint)

    def decorate(train: Training[S, P, R]) -> Training[S, P, R]:
        @functools.wraps(train)
        def wrapper(state: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            if not isinstance(state, State):
                raise ConfigurationError(
                    f"the first argument of {getattr(train, '__name__', 'the function')} must be a state such as "
                    f"hvd.elastic.TorchState(...), not {type(state).__name__}"
                )
            engine = state.engine if isinstance(state, TorchState) else _engine_of(state)
            decided, checkpoints = chosen(asked, place, current().settings)
            return engine.run(decided, lambda: train(state, *args, **kwargs), checkpoints)

        return wrapper

    return decorate if function is None else decorate(function)


class _StatePart(BasePart):
    """A state of another class than ours: it remembers and restores itself."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def rollback(self) -> None:
        self._state.restore()


class _OtherState:
    """A state of another class than ours as a ``recovery.Trainee``: it brings itself together in its ``sync``."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def schema(self) -> list[str]:
        return []

    def structure(self) -> None:
        return None

    def prepare(self, structure: Any) -> None:
        """Nothing: see ``settled``."""

    def blocks(self) -> list[Any]:
        return []

    def joined(self, generation: int, rank: int) -> None:
        """Nothing: see ``settled``."""

    def drain(self) -> tuple[int, int]:
        return 0, 0

    def keep_gradients(self, keep: bool) -> None:
        """Its optimizer, if any, is Horovod's."""

    def gradients(self) -> str:
        return "trains by a state without step()"

    def finish(self, reach: Reach, decision: Forward) -> Finished:
        raise NotImplementedError  # see ``gradients``

    def update_elements(self) -> int:
        return 0

    def reduction_s(self) -> float:
        return 0.0

    def dealt_to(self, ranks: Iterable[int]) -> list[int]:
        return []

    def ft_copies(self) -> None:
        return None

    def ft_durable(self) -> None:
        return None

    def ft_guard(self) -> None:
        return None

    def digest(self) -> int:
        raise NotImplementedError  # see ``guard``

    def finite(self) -> bool:
        raise NotImplementedError  # see ``guard``

    def refuse(self, error: BaseException) -> None:
        """Never: it has no ``step``."""

    def discard(self) -> None:
        """Its optimizer, if any, is Horovod's; ``restore`` resets it."""

    def accumulating(self) -> bool:
        return False

    def open_ranges(self) -> tuple[Range, ...]:
        return ()

    def repeat(self, ranges: tuple[Range, ...]) -> None:
        """Never: it counts no updates."""

    def regrouped(self, group: Group) -> None:
        self._state.on_reset()

    def settled(self, group: Group) -> None:
        self._state.sync()

    def reentering(self) -> None:
        """Nothing to prepare."""

    def stepping(self) -> None:
        """Never: it has no ``step``."""


def _engine_of(state: Any) -> Engine:
    """An engine for a state that is not a ``TorchState``, such as Horovod's ``ObjectState`` or a user's own."""
    runtime = current()
    committer = Committer([_StatePart(state)])
    engine = Engine(
        runtime.membership, _OtherState(state), committer, runtime.bus, runtime.injector, runtime.ledger
    )
    state.check_host_updates = engine.check_for_changes  # Horovod's loses announcements
    return engine


__all__ = [
    "Abort",
    "Auto",
    "CheckpointRestart",
    "Checkpoints",
    "Decision",
    "ElasticDataLoader",
    "ElasticSampler",
    "Failure",
    "Forward",
    "HostsChanged",
    "HostsUpdatedInterrupt",
    "LearningRateRule",
    "LossyForward",
    "MiniBatchRollback",
    "ObjectState",
    "RecoveryPolicy",
    "Replay",
    "ReplicaGuard",
    "Restart",
    "State",
    "StateCommitter",
    "TorchState",
    "init",
    "run",
    "run_fn",
    "sampler",
    "shutdown",
    "state",
]
