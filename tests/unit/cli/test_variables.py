"""The HOROVOD_FT_* variables, before a job finds out."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from horovod_ft.cli.check import Check, Status
from horovod_ft.cli.variables import variable_checks

PLAN = "[[fault]]\nworker = 1\nphase = 'data'\n"


def checked(**variables: str) -> dict[str, Check]:
    environ = {f"HOROVOD_FT_{name}": value for name, value in variables.items()}
    return {check.name.removeprefix("HOROVOD_FT_"): check for check in variable_checks(environ)}


def test_none_is_set() -> None:
    (check,) = checked().values()
    assert check.status is Status.OK
    assert "ends after 600 s" in check.detail


def test_all_are_set(tmp_path: Path) -> None:
    folders = {"EVENTS": str(tmp_path / "events"), "LEDGER": str(tmp_path / "ledger")}
    checks = checked(POLICY="rollback", FAULTS=PLAN, TIMEOUT="9", **folders)
    assert {check.status for check in checks.values()} == {Status.OK}
    assert list(checks) == ["* variables", "POLICY", "FAULTS", "EVENTS", "LEDGER"]


@pytest.mark.parametrize("name", ["POLCY", "TIMEOUT"])
def test_variables_that_no_job_would_start_with(name: str) -> None:
    (check,) = checked(**{name: "soon"}).values()
    assert check.status is Status.FAILED
    assert f"HOROVOD_FT_{name}" in check.detail
    assert check.remedy == "correct the variable, or unset it"


@pytest.mark.parametrize(
    ("name", "value"), [("POLICY", "rollbak"), ("FAULTS", "no-such-plan.toml"), ("EVENTS", "/dev/null/events")]
)
def test_a_value_that_cannot_be_used(name: str, value: str) -> None:
    check = checked(**{name: value})[name]
    assert check.status is Status.FAILED
    assert check.remedy == f"correct HOROVOD_FT_{name}, or unset it"


def test_a_policy_of_another_package_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = EntryPoint("broken", "no_such_module:Policy", "horovod_ft.policies")
    monkeypatch.setattr("horovod_ft.policy_names.entry_points", lambda group: [broken])
    check = checked(POLICY="broken")["POLICY"]
    assert check.status is Status.FAILED
    assert "no_such_module" in check.detail


def test_what_a_plan_holds() -> None:
    assert checked(FAULTS=PLAN)["FAULTS"].detail == "1 fault, the first: kill worker 1 at step 1 in data"
