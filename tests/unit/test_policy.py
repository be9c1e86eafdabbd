"""Policies: what they are asked, what they may answer, and how one is found by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from horovod_ft.errors import PolicyError
from horovod_ft.policies.rollback import MiniBatchRollback
from horovod_ft.policy import (
    ENTRY_POINTS,
    Abort,
    Decision,
    Failure,
    RecoveryPolicy,
    Replay,
    decide,
    installed_policies,
    parse_policy,
)

FAILURE = Failure(
    generation=2, step=7, updates=0, lost=(1,), survivors=(0, 2), size_before=3, size_after=2, behind=0, consecutive=1,
    samples_at_risk=12,
)  # fmt: skip


def test_a_failure_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        FAILURE.step = 8  # type: ignore[misc]


@pytest.mark.parametrize("answer", [Replay(), Abort("enough")])
def test_a_decision_is_passed_on(answer: Decision) -> None:
    assert decide(lambda failure: answer, FAILURE) is answer


def test_a_policy_that_raises_is_the_policys_fault() -> None:
    def broken(failure: Failure) -> Decision:
        raise KeyError("x")

    with pytest.raises(PolicyError, match=r"broken.* raised KeyError\('x'\) when asked about Failure\(") as raised:
        decide(broken, FAILURE)
    assert isinstance(raised.value.__cause__, KeyError)


@pytest.mark.parametrize("answer", [None, True, "replay", Replay])
def test_anything_else_is_no_decision(answer: Any) -> None:
    with pytest.raises(PolicyError, match=r"which is not Replay\(\) or Abort"):
        decide(lambda failure: answer, FAILURE)


# --- by name -------------------------------------------------------------------------------------------------------

KNOWN: dict[str, Callable[..., RecoveryPolicy]] = {"rollback": MiniBatchRollback}


@pytest.mark.parametrize("text", ["rollback", " rollback ", "rollback()"])
def test_a_name_alone_gives_the_default_policy(text: str) -> None:
    assert parse_policy(text, KNOWN) == MiniBatchRollback()


def test_arguments_are_given_by_name() -> None:
    assert parse_policy("rollback(max_consecutive=5)", KNOWN) == MiniBatchRollback(max_consecutive=5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nonsense", "no recovery policy 'nonsense'; installed: rollback"),
        ("", "write NAME or NAME"),
        ("rollback(", "write NAME or NAME"),
        ("rollback(3)", "write NAME or NAME"),
        ("a.b", "write NAME or NAME"),
        ("rollback(max_consecutive=len)", "must be literals"),
        ("rollback(patience=3)", "refuses its arguments.*patience"),
        ("rollback(max_consecutive=0)", "max_consecutive is 0; it must be at least 1"),
        ("rollback(**{'max_consecutive': 3})", "refuses its arguments"),
    ],
)
def test_a_text_that_names_no_policy_is_explained(text: str, said: str) -> None:
    with pytest.raises(PolicyError, match=said):
        parse_policy(text, KNOWN)


def test_without_any_policy_the_installation_is_suspected() -> None:
    with pytest.raises(PolicyError, match="is horovod_ft installed with pip"):
        parse_policy("rollback", {})


def test_the_policies_of_this_package_are_installed() -> None:
    assert installed_policies()["rollback"](max_consecutive=5) == MiniBatchRollback(max_consecutive=5)


def test_a_policy_of_another_package_that_cannot_be_loaded_harms_only_those_who_ask_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    points = [
        EntryPoint("rollback", "horovod_ft.policies.rollback:MiniBatchRollback", ENTRY_POINTS),
        EntryPoint("broken", "no_such_package:Policy", ENTRY_POINTS),
    ]
    monkeypatch.setattr("horovod_ft.policy.entry_points", lambda group: points)
    assert parse_policy("rollback") == MiniBatchRollback()
    with pytest.raises(PolicyError, match=r"'broken' \(no_such_package:Policy\) cannot be loaded"):
        parse_policy("broken")


# --- conformance of what is a policy -------------------------------------------------------------------------------


def test_a_function_is_a_policy() -> None:
    assert isinstance(lambda failure: Replay(), RecoveryPolicy)


def test_a_policy_decides_by_the_failure_alone() -> None:
    policy = MiniBatchRollback()
    assert policy(FAILURE) == policy(replace(FAILURE)) == Replay()
