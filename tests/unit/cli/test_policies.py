"""The list of installed policies."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint

import pytest

from horovod_ft.policy_names import ENTRY_POINTS
from tests.unit.cli.conftest import Call

ROLLBACK = EntryPoint("rollback", "horovod_ft.policies.rollback:MiniBatchRollback", ENTRY_POINTS)
BROKEN = EntryPoint("broken", "no_such_module:Policy", ENTRY_POINTS)
HERE = "tests.unit.cli.test_policies"

Install = Callable[..., None]


class Undescribed:
    def __init__(self, patience: int, mood: str = "calm") -> None: ...


def described() -> None:
    """Does one thing.

    And says more about it.
    """


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Pretend that exactly these policies are installed."""

    def run(*points: EntryPoint) -> None:
        monkeypatch.setattr("horovod_ft.cli.policies.entry_points", lambda group: list(points))

    return run


def test_our_own_with_its_arguments_and_what_it_does(call: Call, install: Install) -> None:
    install(ROLLBACK)
    told = call("policies")
    assert told.code == 0
    assert "rollback(max_consecutive=3, at_most=None," in told.out
    assert "Replay the mini-batch, unless it keeps failing." in told.out


def test_one_that_cannot_be_loaded_does_not_hide_the_others(call: Call, install: Install) -> None:
    install(ROLLBACK, BROKEN)
    told = call("policies")
    assert told.code == 0
    assert "cannot be loaded (no_such_module:Policy)" in told.out
    assert "No module named 'no_such_module'" in told.out
    assert told.out.index("broken") < told.out.index("rollback(")


def test_only_the_first_line_of_a_description(call: Call, install: Install) -> None:
    install(EntryPoint("mine", f"{HERE}:described", ENTRY_POINTS))
    told = call("policies")
    assert "mine()" in told.out
    assert "Does one thing." in told.out
    assert "more" not in told.out


def test_one_without_a_description(call: Call, install: Install) -> None:
    install(EntryPoint("mine", f"{HERE}:Undescribed", ENTRY_POINTS))
    told = call("policies")
    assert "mine(patience, mood='calm')" in told.out
    assert "no description" in told.out


def test_none_is_installed(call: Call, install: Install) -> None:
    install()
    told = call("policies")
    assert told.code == 0
    assert "install horovod_ft with pip" in told.out
