"""The doctor's table, its verdict and its exit code."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from horovod_ft.cli.check import failed, ok, warning
from horovod_ft.cli.doctor import exit_code, verdict
from horovod_ft.cli.hosts import host_checks
from tests.unit.cli.conftest import Call

FAILS = failed("one", "it is broken", "mend it")
WARNS = warning("two", "it is old", "renew it")
HOLDS = ok("three", "it holds")


@pytest.fixture(autouse=True)
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with nothing wrong, and a network in which every name resolves."""
    monkeypatch.setattr("horovod_ft.cli.doctor.environment_checks", lambda: [HOLDS])
    monkeypatch.setattr("horovod_ft.cli.doctor.host_checks", partial(host_checks, resolve=lambda name: "10.0.0.1"))


def test_all_is_well(call: Call) -> None:
    told = call("doctor")
    assert told.code == 0
    assert "Ready for fault-tolerant training." in told.out


def test_a_failure_is_shown_with_its_remedy_and_makes_the_exit_code_one(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("horovod_ft.cli.doctor.environment_checks", lambda: [FAILS, HOLDS])
    told = call("doctor")
    assert told.code == 1
    assert "it is broken" in told.out
    assert "one: mend it" in told.out
    assert "Not ready: one" in told.out


def test_a_warning_is_shown_and_no_failure(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horovod_ft.cli.doctor.environment_checks", lambda: [WARNS])
    told = call("doctor")
    assert told.code == 0
    assert "two: renew it" in told.out


def test_only_a_failure_counts() -> None:
    assert (exit_code([]), exit_code([WARNS, HOLDS]), exit_code([WARNS, FAILS])) == (0, 0, 1)


def test_the_verdict_names_all_failures() -> None:
    assert verdict([FAILS, HOLDS, failed("four", "", "x")]).plain == "Not ready: one, four"


def test_variables_are_checked_too(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_FT_POLICY", "rollbak")
    told = call("doctor")
    assert told.code == 1
    assert "Not ready: HOROVOD_FT_POLICY" in told.out


def test_a_job_that_survives_a_failure(call: Call) -> None:
    told = call("doctor", "--np", "4", "--min-np", "2", "--hosts", "a:2,b:2", "--cooldown", "10", "100")
    assert told.code == 0
    assert "2 of 2 have an address" in told.out
    assert "20 to 30 s after its first failure" in told.out


@pytest.mark.parametrize(
    ("options", "name", "remedy"),
    [
        ("--np 4 --min-np 4", "room for a failure", "give --min-np 3 or less"),
        ("--np 2 --min-np 3", "--min-np", "at most 2"),
        ("--np 9 --min-np 1 --hosts a:1,b:1", "slots", "lower -np"),
        ("--hosts a:1,a:1", "--hosts", "write it as a:1,b:1"),
        ("--hosts a", "--hosts", "write it as a:1,b:1"),
        ("--hosts ,", "--hosts", "write it as a:1,b:1"),
        ("--cooldown 5 1", "cool-down", "the lower first"),
        ("--discovery-script none.sh", "discovery script", "give the path of the script"),
    ],
)
def test_a_job_that_does_not(call: Call, options: str, name: str, remedy: str) -> None:
    told = call("doctor", *options.split())
    assert told.code == 1
    assert f"{name}: " in told.out
    assert remedy in told.out


def test_hosts_of_a_discovery_script(call: Call, tmp_path: Path) -> None:
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\necho a:2\necho b:2\n")
    script.chmod(0o755)
    told = call("doctor", "--np", "4", "--min-np", "3", "--discovery-script", str(script))
    assert told.code == 1
    assert "lists 2 hosts with 4 slots" in told.out
    assert "give --min-np 2 or less" in told.out


@pytest.mark.parametrize(
    "options", ["--hosts a:1,b:1 --discovery-script x", "--min-np 2", "--np 0", "--cooldown 1", "--np many"]
)
def test_wrong_usage(call: Call, options: str) -> None:
    told = call("doctor", *options.split())
    assert told.code == 2
    assert told.err
