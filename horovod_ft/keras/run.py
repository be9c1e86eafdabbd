"""``elastic.run``: a training function that is entered again after a failure outside of a step, as with Horovod."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from horovod_ft.choices import Where, asked_place, asked_policy, chosen
from horovod_ft.errors import ConfigurationError
from horovod_ft.keras.failures import failures
from horovod_ft.keras.runtime import current
from horovod_ft.keras.state import TensorFlowState
from horovod_ft.policy import RecoveryPolicy

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=TensorFlowState)
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

    Used as ``@run`` or ``@run(policy=...)``. A failure inside ``state.step()`` is recovered where it is; a failure
    elsewhere, in ``model.fit`` say, enters the function again, at least once for what is left. All workers have to call
    it with the same model.

    Args:
        policy, checkpoint: see ``FaultToleranceCallback``.

    Raises:
        PolicyError: there is no such policy.
        ConfigurationError: ``checkpoint`` names no place; and when the function is called: its first argument is no
            ``KerasState`` or ``TensorFlowState``.
    """
    asked, place = asked_policy(policy), asked_place(checkpoint)

    def decorate(train: Training[S, P, R]) -> Training[S, P, R]:
        @functools.wraps(train)
        def wrapper(state: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            if not isinstance(state, TensorFlowState):
                raise ConfigurationError(
                    f"the first argument of {getattr(train, '__name__', 'the function')} must be a state such as "
                    f"hvd.elastic.KerasState(...), not {type(state).__name__}"
                )

            def body() -> R:
                with failures():
                    return train(state, *args, **kwargs)

            decided, checkpoints = chosen(asked, place, current().settings)
            try:
                return state.engine.run(decided, body, checkpoints)
            finally:
                state.ft_weigh(1.0)  # what trains next is no slice of a batch

        return wrapper

    return decorate if function is None else decorate(function)
