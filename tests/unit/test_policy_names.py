"""Finding a policy by its name."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint

import pytest

from horovod_ft.errors import PolicyError
from horovod_ft.policies.auto import Auto
from horovod_ft.policies.lossy_forward import LossyForward
from horovod_ft.policies.rollback import MiniBatchRollback
from horovod_ft.policy import RecoveryPolicy
from horovod_ft.policy_names import ENTRY_POINTS, installed_policies, parse_policy

KNOWN: dict[str, Callable[..., RecoveryPolicy]] = {"rollback": MiniBatchRollback, "lossy_forward": LossyForward}


@pytest.mark.parametrize("text", ["rollback", " rollback ", "rollback()"])
def test_a_name_alone_gives_the_default_policy(text: str) -> None:
    assert parse_policy(text, KNOWN) == MiniBatchRollback()


def test_arguments_are_given_by_name() -> None:
    assert parse_policy("rollback(max_consecutive=5)", KNOWN) == MiniBatchRollback(max_consecutive=5)


@pytest.mark.parametrize(
    "text", ["lossy_forward(max_consecutive=3)|rollback", " lossy_forward( max_consecutive = 3 ) | rollback() "]
)
def test_several_are_asked_in_turn(text: str) -> None:
    assert parse_policy(text, KNOWN) == LossyForward(max_consecutive=3) | MiniBatchRollback()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nonsense", "no recovery policy 'nonsense'; installed: lossy_forward, rollback"),
        ("", "write NAME or NAME"),
        ("rollback(", "write NAME or NAME"),
        ("rollback(3)", "write NAME or NAME"),
        ("a.b", "write NAME or NAME"),
        ("rollback |", "write NAME or NAME"),
        ("rollback & rollback", "write NAME or NAME"),
        ("rollback | nonsense", "no recovery policy 'nonsense'"),
        ("lossy_forward(missing='guess')", "missing is 'guess'; it must be one of 'reduce_again', 'local', 'skip'"),
        ("rollback(max_consecutive=len)", "must be literals"),
        ("rollback(patience=3)", "refuses its arguments.*patience"),
        ("rollback(max_consecutive=0)", "max_consecutive is 0; it must be a whole number, at least 1"),
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
    installed = installed_policies()
    assert installed["rollback"](max_consecutive=5) == MiniBatchRollback(max_consecutive=5)
    assert installed["lossy_forward"](missing="skip") == LossyForward(missing="skip")
    assert installed["auto"](max_loss=0.5) == Auto(max_loss=0.5)


def test_a_policy_of_another_package_that_cannot_be_loaded_harms_only_those_who_ask_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    points = [
        EntryPoint("rollback", "horovod_ft.policies.rollback:MiniBatchRollback", ENTRY_POINTS),
        EntryPoint("broken", "no_such_package:Policy", ENTRY_POINTS),
    ]
    monkeypatch.setattr("horovod_ft.policy_names.entry_points", lambda group: points)
    assert parse_policy("rollback") == MiniBatchRollback()
    with pytest.raises(PolicyError, match=r"'broken' \(no_such_package:Policy\) cannot be loaded"):
        parse_policy("broken")
