"""A recovery policy by its name: ``rollback``, ``lossy_forward(max_consecutive=3) | rollback``."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from horovod_ft.errors import PolicyError
from horovod_ft.policy import Escalation, RecoveryPolicy

ENTRY_POINTS = "horovod_ft.policies"


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
    """Turn ``rollback``, ``rollback(max_consecutive=5)`` or several of them with ``|`` between into a policy.

    Arguments are literals, given by name.

    Raises:
        PolicyError: the text cannot be read, no such policy is installed, it cannot be loaded, or it refuses the
            arguments.
    """
    known = installed_policies() if factories is None else factories
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise _unreadable(text) from error
    policies = tuple(_made(part, text, known) for part in _parts(node))
    return policies[0] if len(policies) == 1 else Escalation(policies)


def _parts(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _parts(node.left) + _parts(node.right)
    return [node]


def _made(node: ast.expr, text: str, known: Mapping[str, Callable[..., RecoveryPolicy]]) -> RecoveryPolicy:
    name, arguments = _split(node, text)
    if name not in known:
        listed = ", ".join(sorted(known)) or "none: is horovod_ft installed with pip?"
        raise PolicyError(f"there is no recovery policy {name!r}; installed: {listed}")
    try:
        return known[name](**arguments)
    except TypeError as error:
        raise PolicyError(f"the recovery policy {ast.unparse(node)!r} refuses its arguments: {error}") from error


def _split(node: ast.expr, text: str) -> tuple[str, dict[str, Any]]:
    match node:
        case ast.Name(id=name):
            return name, {}
        case ast.Call(func=ast.Name(id=name), args=[], keywords=keywords):
            try:
                return name, {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in keywords}
            except ValueError as error:
                raise PolicyError(f"the arguments of {text!r} must be literals such as 3 or 'mean'") from error
    raise _unreadable(text)


def _unreadable(text: str) -> PolicyError:
    return PolicyError(
        f"cannot read the recovery policy {text!r}: write NAME or NAME(argument=value), or several with | between them"
    )
