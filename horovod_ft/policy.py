"""Recovery policies as values: the frozen context of a failure, the decisions, and how a policy is found by name.

A policy only decides. The engine (``recovery.py``) is the only place that acts on a Decision.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol, TypeAlias, runtime_checkable

from horovod_ft.errors import PolicyError

ENTRY_POINTS = "horovod_ft.policies"


@dataclass(frozen=True)
class Failure:
    """Everything that the survivors of a failure agree on. Equal on all of them.

    Attributes:
        generation: of the group that broke.
        step: newest step that any survivor committed; training goes on from it.
        updates: optimizer updates that a survivor had already applied in the open step.
        lost: ranks, in the group that broke, of the workers that are gone.
        survivors: ranks, in the group that broke, of those that are left.
        size_before, size_after: world sizes; newcomers count in ``size_after``.
        behind: how many survivors have to be brought forward to ``step``.
        consecutive: failures since the last committed step, this one included.
        samples_at_risk: samples of the failed mini-batch, over all workers; 0 when no loader is tracked.
    """

    generation: int
    step: int
    updates: int
    lost: tuple[int, ...]
    survivors: tuple[int, ...]
    size_before: int
    size_after: int
    behind: int
    consecutive: int
    samples_at_risk: int


@dataclass(frozen=True)
class Replay:
    """Discard the failed mini-batch on all workers and compute it again among the survivors."""


@dataclass(frozen=True)
class Abort:
    """Give up: every survivor raises RecoveryError with this reason and exits non-zero."""

    reason: str


Decision: TypeAlias = Replay | Abort


@runtime_checkable
class RecoveryPolicy(Protocol):
    """Any callable over a Failure. It must depend on nothing else: all survivors have to reach the same decision."""

    def __call__(self, failure: Failure) -> Decision: ...


def decide(policy: RecoveryPolicy, failure: Failure) -> Decision:
    """Ask the policy, and check that the answer is one.

    Raises:
        PolicyError: the policy raised, or answered with something that is not a Decision.
    """
    try:
        decision = policy(failure)
    except Exception as error:
        raise PolicyError(f"the recovery policy {policy!r} raised {error!r} when asked about {failure}") from error
    if not isinstance(decision, Replay | Abort):
        raise PolicyError(f"the recovery policy {policy!r} answered {decision!r}, which is not Replay() or Abort(...)")
    return decision


def installed_policies() -> dict[str, Callable[..., RecoveryPolicy]]:
    """Policy factories by name, from the entry points ``horovod_ft.policies`` of all installed packages.

    A policy is imported when its factory is called, so that a broken one harms only those who ask for it.
    """
    return {point.name: functools.partial(_load, point) for point in entry_points(group=ENTRY_POINTS)}


def _load(point: EntryPoint, **arguments: Any) -> RecoveryPolicy:
    try:
        factory = point.load()
    except Exception as error:  # whatever another package's import raises
        raise PolicyError(f"the recovery policy {point.name!r} ({point.value}) cannot be loaded: {error!r}") from error
    policy: RecoveryPolicy = factory(**arguments)
    return policy


def parse_policy(text: str, factories: Mapping[str, Callable[..., RecoveryPolicy]] | None = None) -> RecoveryPolicy:
    """Turn ``rollback`` or ``rollback(max_consecutive=5)`` into a policy. Arguments are literals, given by name.

    Raises:
        PolicyError: the text cannot be read, no such policy is installed, it cannot be loaded, or it refuses the
            arguments.
    """
    known = installed_policies() if factories is None else factories
    name, arguments = _split(text)
    if name not in known:
        listed = ", ".join(sorted(known)) or "none: is horovod_ft installed with pip?"
        raise PolicyError(f"there is no recovery policy {name!r}; installed: {listed}")
    try:
        return known[name](**arguments)
    except TypeError as error:
        raise PolicyError(f"the recovery policy {text!r} refuses its arguments: {error}") from error


def _split(text: str) -> tuple[str, dict[str, Any]]:
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise PolicyError(f"cannot read the recovery policy {text!r}: write NAME or NAME(argument=value)") from error
    match node:
        case ast.Name(id=name):
            return name, {}
        case ast.Call(func=ast.Name(id=name), args=[], keywords=keywords):
            try:
                return name, {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in keywords}
            except ValueError as error:
                raise PolicyError(f"the arguments of {text!r} must be literals such as 3 or 'mean'") from error
    raise PolicyError(f"cannot read the recovery policy {text!r}: write NAME or NAME(argument=value)")
