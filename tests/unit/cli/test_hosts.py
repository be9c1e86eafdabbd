"""Can a job survive the loss of one of its hosts?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from horovod_ft.cli.check import Check, Ran, Status
from horovod_ft.cli.hosts import check_cooldown, check_names, check_spare, discover, host_checks, parse_hosts
from horovod_ft.errors import ConfigurationError


def found(address: str = "10.0.0.1") -> Callable[[str], str]:
    return lambda name: address


def statuses(checks: Iterator[Check]) -> dict[str, Status]:
    return {check.name: check.status for check in checks}


# --- reading hosts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["a:1,b:2", "a:1\nb:2\n", " a:1 , b:2,\n"])
def test_hosts_with_slots(text: str) -> None:
    assert parse_hosts(text) == {"a": 1, "b": 2}


@pytest.mark.parametrize("text", ["a", "a:0", "a:x", "a b:1", "a:1:2", ":1"])
def test_what_is_no_host(text: str) -> None:
    with pytest.raises(ConfigurationError, match="is not NAME:SLOTS"):
        parse_hosts(text)


def test_a_host_that_is_listed_twice() -> None:
    with pytest.raises(ConfigurationError, match="'a' is listed more than once"):
        parse_hosts("a:1,a:1")


# --- discovery -----------------------------------------------------------------------------------------------------


def script(folder: Path, mode: int = 0o755) -> Path:
    path = folder / "hosts of mine.sh"
    path.write_text("echo a:1\necho b:2\n")
    path.chmod(mode)
    return path


def answering(ran: Ran) -> Callable[[Sequence[str], float], Ran]:
    return lambda command, timeout_s: ran


def test_a_script_is_run_as_the_launcher_does(tmp_path: Path) -> None:
    check, hosts = discover(script(tmp_path))
    assert (check.status, hosts) == (Status.OK, {"a": 1, "b": 2})
    assert check.detail.endswith("lists 2 hosts with 3 slots")


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    check, hosts = discover(tmp_path / "none.sh")
    assert (check.status, hosts) == (Status.FAILED, {})
    assert "is not a file" in check.detail


def test_a_script_that_is_not_executable(tmp_path: Path) -> None:
    path = script(tmp_path, 0o644)
    check, _ = discover(path)
    assert check.status is Status.FAILED
    assert check.remedy == f"chmod +x {path}"


@pytest.mark.parametrize(
    ("ran", "why"),
    [
        (Ran(3, "", "boom"), "boom"),
        (Ran(0, "\n"), "it lists no host"),
        (Ran(0, "a:x\n"), "'a:x' is not NAME:SLOTS"),
        (Ran(None, err="no answer within 10 s"), "no answer within 10 s"),
    ],
)
def test_a_script_that_does_not_list_hosts(tmp_path: Path, ran: Ran, why: str) -> None:
    check, hosts = discover(script(tmp_path), answering(ran))
    assert (check.status, hosts) == (Status.FAILED, {})
    assert why in check.detail
    assert "one line NAME:SLOTS a host" in check.remedy


def test_a_script_that_is_slower_than_the_launcher_polls(tmp_path: Path) -> None:
    clock = iter((0.0, 1.5))
    check, hosts = discover(script(tmp_path), answering(Ran(0, "a:1\n")), lambda: next(clock))
    assert (check.status, hosts) == (Status.WARNING, {"a": 1})
    assert "takes 1.5 s" in check.detail


def test_a_script_that_leaves_the_slots_to_the_launcher(tmp_path: Path) -> None:
    check, hosts = discover(script(tmp_path), answering(Ran(0, "a\nb\n")))
    assert (check.status, hosts) == (Status.WARNING, {"a": 1, "b": 1})
    assert "--slots-per-host" in check.remedy


# --- names ---------------------------------------------------------------------------------------------------------


def test_names_that_resolve() -> None:
    assert check_names({"a": 1, "b": 1}, found()).status is Status.OK


def test_names_that_do_not() -> None:
    def resolve(name: str) -> str:
        if name == "b":
            raise OSError("Name or service not known")
        return "10.0.0.1"

    check = check_names({"a": 1, "b": 1, "c": 1}, resolve)
    assert check.status is Status.FAILED
    assert check.detail == "no address for b"
    assert "/etc/hosts" in check.remedy


# --- room for a failure --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "np", "min_np"),
    [
        ({"a": 1, "b": 1}, 2, 1),
        ({"a": 2, "b": 4, "c": 2}, 8, 4),
        ({"a": 1, "b": 1, "c": 1}, 2, None),  # one host in reserve
        ({"a": 1, "b": 1}, None, None),
        (None, 4, 3),
    ],
)
def test_enough_is_left(hosts: dict[str, int] | None, np: int | None, min_np: int | None) -> None:
    assert check_spare(hosts, np, min_np, cooldown=False).status is Status.OK


@pytest.mark.parametrize(
    ("hosts", "np", "min_np", "remedy"),
    [
        ({"a": 2, "b": 2}, 4, 3, "give --min-np 2 or less"),
        ({"a": 2, "b": 2}, 4, None, "give --min-np 2 or less"),
        (None, 4, 4, "give --min-np 3 or less"),
        ({"a": 4}, 4, 1, "use at least two hosts"),
        (None, 1, 1, "use at least two hosts"),
    ],
)
def test_too_little_is_left(hosts: dict[str, int] | None, np: int, min_np: int | None, remedy: str) -> None:
    check = check_spare(hosts, np, min_np, cooldown=False)
    assert check.status is Status.FAILED
    assert remedy in check.remedy


def test_with_a_cooldown_the_job_would_hang() -> None:
    assert "and hangs" in check_spare({"a": 1, "b": 1}, 2, 2, cooldown=True).detail
    assert "hangs" not in check_spare({"a": 1, "b": 1}, 2, 2, cooldown=False).detail


def test_without_min_np_it_says_that_np_counts() -> None:
    assert "without --min-np it is -np" in check_spare({"a": 1, "b": 1}, 2, None, cooldown=False).detail


def test_without_hosts_it_says_what_it_assumes() -> None:
    assert "if each worker has a host of its own" in check_spare(None, 4, 2, cooldown=False).detail


# --- the cool-down -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "told"), [(10, 100, "20 to 30 s"), (10, 25, "20 to 25 s"), (1, 2, "2 s after")]
)
def test_a_cooldown_that_horovodrun_takes(low: int, high: int, told: str) -> None:
    check = check_cooldown(low, high)
    assert (check.status, check.detail.startswith(told)) == (Status.OK, True)


@pytest.mark.parametrize(("low", "high"), [(0, 10), (10, 5), (1, 3601)])
def test_a_cooldown_that_it_refuses(low: int, high: int) -> None:
    check = check_cooldown(low, high)
    assert check.status is Status.FAILED
    assert "from 1 to 3600" in check.remedy


# --- together ------------------------------------------------------------------------------------------------------


def test_nothing_known_nothing_checked() -> None:
    assert list(host_checks(None)) == []


def test_a_sound_job() -> None:
    checks = host_checks({"a": 2, "b": 2}, 4, 2, (10, 100), found())
    assert statuses(checks) == dict.fromkeys(("host names", "room for a failure", "cool-down"), Status.OK)


def test_min_np_above_np_is_all_there_is_to_say() -> None:
    assert statuses(host_checks(None, 2, 3)) == {"--min-np": Status.FAILED}


def test_fewer_slots_than_workers() -> None:
    assert statuses(host_checks({"a": 1, "b": 1}, 4, 1, None, found()))["slots"] is Status.FAILED
