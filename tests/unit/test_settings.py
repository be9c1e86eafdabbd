"""Settings: read once, from nowhere but the environment, and every wrong one is explained."""

from __future__ import annotations

from pathlib import Path

import pytest

from horovod_ft.errors import ConfigurationError
from horovod_ft.settings import KNOWN, PREFIX, Settings, writable_folder


def test_an_empty_environment_gives_the_defaults() -> None:
    assert Settings.from_environment({}) == Settings()


def test_every_variable_is_read() -> None:
    environ = {
        "HOROVOD_FT_POLICY": "rollback",
        "HOROVOD_FT_FAULTS": "plan.toml",
        "HOROVOD_FT_EVENTS": "/events",
        "HOROVOD_FT_LEDGER": "/ledger",
        "HOROVOD_FT_TIMEOUT": "2.5",
        "HOROVOD_FT_ATTEMPT": "2",
        "HOROVOD_ELASTIC": "1",
        "HOROVOD_HOSTNAME": "node7",
        "HOROVOD_RANK": "3",
    }
    assert Settings.from_environment(environ) == Settings(
        policy="rollback", faults="plan.toml", events=Path("/events"), ledger=Path("/ledger"), timeout_s=2.5,
        attempt=2, elastic=True, host="node7", start_rank=3,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["POLICY", "FAULTS", "EVENTS", "LEDGER", "ATTEMPT"])
def test_an_empty_value_counts_as_unset(name: str) -> None:
    assert Settings.from_environment({PREFIX + name: ""}) == Settings()


def test_a_folder_may_start_at_the_home_folder() -> None:
    found = Settings.from_environment({"HOROVOD_FT_EVENTS": "~/events"}).events
    assert found == Path.home() / "events"


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_FT_TIMEOUT", "7")
    assert Settings.from_environment().timeout_s == 7


def test_a_typing_error_in_a_name_is_not_ignored() -> None:
    with pytest.raises(ConfigurationError) as raised:
        Settings.from_environment({"HOROVOD_FT_POLCY": "rollback", "HOROVOD_FT_EVENT": "/x"})
    message = str(raised.value)
    assert message.startswith("unknown environment variables HOROVOD_FT_EVENT, HOROVOD_FT_POLCY: ")
    assert all(PREFIX + name in message for name in KNOWN)


def test_variables_of_horovod_itself_are_none_of_our_business() -> None:
    assert Settings.from_environment({"HOROVOD_FUSION_THRESHOLD": "0"}) == Settings()


@pytest.mark.parametrize("value", ["", "soon", "0", "-1", "nan", "inf"])
def test_a_timeout_that_is_no_positive_number_is_refused(value: str) -> None:
    with pytest.raises(ConfigurationError, match=f"HOROVOD_FT_TIMEOUT='{value}' is not a positive number of seconds"):
        Settings.from_environment({"HOROVOD_FT_TIMEOUT": value})


@pytest.mark.parametrize("value", ["first", "-1", "1.5"])
def test_an_attempt_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(ConfigurationError, match=f"HOROVOD_FT_ATTEMPT='{value}' is not a number"):
        Settings.from_environment({"HOROVOD_FT_ATTEMPT": value})


@pytest.mark.parametrize("value", ["", "zero", "-1", "1.5"])
def test_a_rank_that_is_none_names_the_variable(value: str) -> None:
    with pytest.raises(ConfigurationError, match=f"HOROVOD_RANK='{value}' is not a rank.*unset it"):
        Settings.from_environment({"HOROVOD_RANK": value})


# --- folders -------------------------------------------------------------------------------------------------------


def test_a_folder_is_made_with_its_parents_and_left_empty(tmp_path: Path) -> None:
    folder = writable_folder(tmp_path / "a" / "b", "VARIABLE")
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError) as raised:
        writable_folder(tmp_path / "file" / "sub", "HOROVOD_FT_EVENTS")
    message = str(raised.value)
    assert f"cannot write into '{tmp_path}/file/sub' (Not a directory)" in message
    assert "set HOROVOD_FT_EVENTS to a folder that this user may write to, or leave it unset" in message


def test_a_folder_that_takes_no_files_is_explained() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot write into '/proc/self/fdinfo' .* set VARIABLE"):
        writable_folder(Path("/proc/self/fdinfo"), "VARIABLE")


def test_a_probe_that_another_hosts_worker_has_removed_is_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two containers that share a folder may both hold process 7."""
    monkeypatch.setattr(Path, "touch", lambda self: None)
    assert writable_folder(tmp_path, "VARIABLE") == tmp_path
