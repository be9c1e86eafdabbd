"""The console script as a whole."""

from __future__ import annotations

import pytest

from horovod_ft.errors import ConfigurationError
from horovod_ft.version import __version__
from tests.unit.cli.conftest import Call


def test_version(call: Call) -> None:
    told = call("--version")
    assert (told.code, told.out) == (0, f"horovod_ft {__version__}\n")


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_names_all_commands(call: Call, flag: str) -> None:
    told = call(flag)
    assert told.code == 0
    for command in ("run", "doctor", "report", "chaos", "policies", "checkpoints"):
        assert f" {command} " in told.out


@pytest.mark.parametrize("command", ["run", "doctor", "report", "chaos", "policies", "checkpoints"])
def test_each_command_has_help(call: Call, command: str) -> None:
    told = call(command, "--help")
    assert told.code == 0
    assert f"Usage: horovod-ft {command}" in told.out


def test_without_a_command_it_helps(call: Call) -> None:
    told = call()
    assert told.code == 2
    assert "Usage: horovod-ft" in told.out + told.err


def test_a_command_that_does_not_exist(call: Call) -> None:
    told = call("repair")
    assert told.code == 2
    assert "repair" in told.err


def test_our_own_errors_are_one_line(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: object) -> None:
        raise ConfigurationError("no such thing")

    monkeypatch.setattr("horovod_ft.cli.report.read", refuse)
    told = call("report", "anywhere")
    assert (told.code, told.out, told.err) == (2, "", "horovod-ft: no such thing\n")
