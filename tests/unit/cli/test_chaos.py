"""A command under a fault plan: what it is given, what is said afterwards, and the exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from horovod_ft.cli.chaos import EXIT_NOT_FIRED, match, run
from horovod_ft.errors import ConfigurationError
from horovod_ft.faults.plan import parse_plan
from tests.unit.cli.conftest import Call, Told
from tests.unit.cli.made import Run

PLAN = """
[[fault]]
worker = 1
step = 5
phase = "backward"

[[fault]]
worker = 2
step = 7
phase = "allreduce"
after = 3
"""
FIRST, SECOND = (str(fault) for fault in parse_plan(PLAN))


class Job:
    """Stands for the command: remembers what it was given, records faults, and ends with a status."""

    def __init__(self) -> None:
        self.fires: list[str] = []
        self.code = 0
        self.command: list[str] = []
        self.env: dict[str, str] = {}

    def __call__(self, command: Sequence[str], env: Mapping[str, str]) -> int:
        self.command, self.env = list(command), dict(env)
        made = Run()
        for fault in self.fires:
            made.add(1.0, "fault", int(fault.split()[2]), fault=fault)
        made.write(Path(self.env["HOROVOD_FT_EVENTS"]))
        return self.code


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Job:
    fake = Job()
    monkeypatch.setattr("horovod_ft.cli.chaos.run", fake)
    monkeypatch.chdir(tmp_path)
    return fake


Chaos = Callable[..., Told]


@pytest.fixture
def chaos(call: Call) -> Chaos:
    def run(*options: str, plan: str = PLAN) -> Told:
        return call("chaos", "--plan", plan, *options, "--", "horovodrun", "-np", "3", "python", "train.py")

    return run


def row(told: Told, fault: str) -> list[str]:
    """What the table says of an entry."""
    line = next(line for line in told.err.splitlines() if fault in line)
    return line.replace(fault, "").split()


# --- the exit code and the table -----------------------------------------------------------------------------------


def test_all_fired(chaos: Chaos, job: Job) -> None:
    job.fires = [FIRST, SECOND]
    told = chaos()
    assert told.code == 0
    assert row(told, FIRST) == ["yes", "1"]
    assert row(told, SECOND) == ["yes", "2"]


def test_one_never_fired(chaos: Chaos, job: Job) -> None:
    job.fires = [FIRST]
    told = chaos()
    assert told.code == EXIT_NOT_FIRED == 3
    assert row(told, FIRST) == ["yes", "1"]
    assert row(told, SECOND) == ["never"]


@pytest.mark.parametrize("fires", [[FIRST, SECOND], [FIRST], []])
def test_a_command_that_fails_gives_its_own_code(chaos: Chaos, job: Job, fires: list[str]) -> None:
    job.fires, job.code = fires, 134
    told = chaos()
    assert told.code == 134
    assert "Fault plan" in told.err


def test_standard_output_is_left_to_the_command(chaos: Chaos, job: Job) -> None:
    assert chaos().out == ""


def test_it_says_how_to_see_the_rest(chaos: Chaos, job: Job, tmp_path: Path) -> None:
    told = chaos("--events", str(tmp_path / "my events"))
    assert f"horovod-ft report '{tmp_path / 'my events'}'\n" in told.err


def test_an_entry_for_a_host_fires_in_each_of_its_workers() -> None:
    plan = parse_plan("[[fault]]\nhost = 'a'\nphase = 'data'\n")
    made = Run()
    for worker in ("a:0:11", "a:1:12"):
        made.add(1.0, "fault", worker, fault=str(plan[0]))
    made.add(1.0, "init", "b:2:13")
    (entry,) = match(plan, made.events)
    assert entry.workers == ("0", "1")


# --- what the command is given -------------------------------------------------------------------------------------


def test_options_after_the_command_are_its_own(chaos: Chaos, job: Job) -> None:
    chaos()
    assert job.command == ["horovodrun", "-np", "3", "python", "train.py"]


def test_the_two_dashes_are_not_needed(call: Call, job: Job) -> None:
    call("chaos", "--plan", PLAN, "train", "--plan", "mine", "--help")
    assert job.command == ["train", "--plan", "mine", "--help"]


def test_the_plan_as_text(chaos: Chaos, job: Job) -> None:
    chaos()
    assert parse_plan(job.env["HOROVOD_FT_FAULTS"]) == parse_plan(PLAN)


def test_the_plan_as_a_file_is_handed_on_as_text(chaos: Chaos, job: Job, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(PLAN)
    chaos(plan="plan.toml")
    assert job.env["HOROVOD_FT_FAULTS"] == PLAN


def test_the_environment_is_handed_on(chaos: Chaos, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_FT_POLICY", "rollback")
    chaos()
    assert job.env["HOROVOD_FT_POLICY"] == "rollback"


def test_events_go_where_they_are_wanted(chaos: Chaos, job: Job, tmp_path: Path) -> None:
    chaos("--events", "here")
    assert job.env["HOROVOD_FT_EVENTS"] == str(tmp_path / "here")


def test_or_where_the_environment_says(
    chaos: Chaos, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_FT_EVENTS", str(tmp_path / "there"))
    chaos()
    assert job.env["HOROVOD_FT_EVENTS"] == str(tmp_path / "there")


def test_or_into_a_new_folder(chaos: Chaos, job: Job, tmp_path: Path) -> None:
    chaos()
    assert Path(job.env["HOROVOD_FT_EVENTS"]).parent.parent == tmp_path / "runs"


# --- what is refused before anything starts ------------------------------------------------------------------------


def refused(told: Told, job: Job, why: str) -> bool:
    return told.code == 2 and why in told.err and not job.command


def test_a_plan_that_cannot_be_read(chaos: Chaos, job: Job) -> None:
    assert refused(chaos(plan="none.toml"), job, "cannot read the fault plan none.toml")


def test_a_plan_that_is_wrong(chaos: Chaos, job: Job) -> None:
    assert refused(chaos(plan="[[fault]]\nworker = 1\nphase = 'lunch'"), job, "the fault plan in --plan is wrong")


def test_a_folder_with_the_events_of_another_run(chaos: Chaos, job: Job, tmp_path: Path) -> None:
    Run().form(1).write(tmp_path / "old")
    assert refused(chaos("--events", "old"), job, "give --events a new or an empty folder")


def test_a_folder_that_cannot_be_written(chaos: Chaos, job: Job) -> None:
    assert refused(chaos("--events", "/dev/null/events"), job, "set --events to a folder")


def test_a_variable_that_is_misspelt(chaos: Chaos, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_FT_POLCY", "rollback")
    assert refused(chaos(), job, "HOROVOD_FT_POLCY")


def test_no_command(call: Call, job: Job) -> None:
    assert refused(call("chaos", "--plan", PLAN), job, "COMMAND")


def test_no_plan(call: Call, job: Job) -> None:
    assert refused(call("chaos", "--", "true"), job, "--plan")


def test_a_command_that_does_not_exist(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    told = call("chaos", "--plan", PLAN, "--", "no-such-program")
    assert told.code == 2
    assert "cannot run no-such-program: No such file or directory" in told.err


# --- running it ----------------------------------------------------------------------------------------------------

ENV = dict(os.environ)


def test_its_output_passes_through_unchanged(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["sh", "-c", "printf 'a\\tb'; printf c >&2"], ENV) == 0
    assert capfd.readouterr() == ("a\tb", "c")


def test_it_can_read_our_standard_input() -> None:
    code = "import os; from horovod_ft.cli.chaos import run; raise SystemExit(run(['cat'], os.environ))"
    assert subprocess.run([sys.executable, "-c", code], input=b"in", capture_output=True, check=True).stdout == b"in"


def test_its_status_is_returned() -> None:
    assert run(["sh", "-c", "exit 7"], ENV) == 7


def test_a_signal_that_ends_it_is_told_as_shells_do() -> None:
    assert run(["sh", "-c", "kill -KILL $$"], ENV) == 128 + signal.SIGKILL


def test_a_program_that_is_not_executable(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no program")
    with pytest.raises(ConfigurationError, match="Permission denied"):
        run([str(tmp_path / "text")], ENV)


@pytest.mark.parametrize("name", ["INT", "TERM", "HUP"])
def test_signals_to_us_go_to_the_command(name: str) -> None:
    asked = f"trap 'exit 9' {name}; kill -{name} $PPID; while :; do sleep 0.01; done"
    assert run(["sh", "-c", asked], ENV) == 9


def test_our_own_handlers_are_back_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM)
    run(["true"], ENV)
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_command_does_not_outlive_us() -> None:
    code = "import os; from horovod_ft.cli.chaos import run; run(['sh', '-c', 'echo up; exec sleep 60'], os.environ)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n"
        parent.kill()
        assert parent.stdout.read() == b""  # the end of the pipe: nobody holds it any more
