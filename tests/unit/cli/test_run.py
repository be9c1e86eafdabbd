"""``horovod-ft run``: whose argument is whose, when a job is started again, and with which status it ends."""

from __future__ import annotations

import importlib
import inspect
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from horovod_ft.agent.budget import Budget
from horovod_ft.agent.notice import Notice
from horovod_ft.agent.outcome import Ending, describe
from horovod_ft.agent.supervisor import Signals
from horovod_ft.cli.run import EXIT_GIVEN_UP, repeat, run, with_border
from tests.unit.agent.test_outcome import failed
from tests.unit.cli.conftest import Call, Told

DONE, LOST, WRONG = Ending(0), failed(137), failed(1)

# --- whose argument is whose ---------------------------------------------------------------------------------------

OURS = {"--restarts": True, "--grace": True, "--help": False}


@pytest.mark.parametrize(
    ("arguments", "ours"),
    [
        ("", 0),
        ("-np 4 python train.py", 0),
        ("--restarts 3 -np 4 python train.py", 2),
        ("--restarts=3 -np 4 python train.py", 1),
        ("--restarts 3 --grace 5 --verbose --restarts 4", 4),
        ("--help -np 4", 1),
        ("--restarts -np 4", 2),
        ("--restart 3 -np 4", 0),
        ("python train.py --restarts 3", 0),
        ("--restarts", 1),
    ],
)
def test_everything_from_the_first_argument_that_is_not_ours(arguments: str, ours: int) -> None:
    words = arguments.split()
    rest = words[ours:]
    assert with_border(words, OURS) == [*words[:ours], *(["--", *rest] if rest else [])]


def test_a_border_of_the_users_own_is_kept() -> None:
    words = ["--restarts", "3", "--", "--restarts", "4"]
    assert with_border(words, OURS) == words


def test_no_option_of_ours_is_one_of_horovodrun() -> None:
    launcher = inspect.getsource(importlib.import_module("horovod.runner.launch"))
    for name in inspect.signature(run).parameters:
        assert f"'--{name.replace('_', '-')}'" not in launcher


# --- when a job is started again -----------------------------------------------------------------------------------


class Job:
    """Stands for the launcher: ends each attempt as told, the last way again and again."""

    def __init__(self, *ends: Ending) -> None:
        self.ends = list(ends)
        self.attempts: list[int] = []

    def __call__(self, number: int) -> Ending:
        self.attempts.append(number)
        return self.ends.pop(0) if len(self.ends) > 1 else self.ends[0]


class Pauses:
    """Stands for ``Signals``: remembers the pauses, and hears a signal in the last of them if told to."""

    def __init__(
        self, stopped: int | None = None, stop_in_pause: int | None = None, *, passed_on: bool = False
    ) -> None:
        self.stopped = stopped
        self.passed_on = passed_on
        self.seconds: list[float] = []
        self._stop_in_pause = stop_in_pause

    def pause(self, seconds: float) -> None:
        self.seconds.append(seconds)
        self.stopped = self._stop_in_pause


def budget(restarts: int) -> Budget:
    return Budget(restarts, within_s=100.0, pause_s=1.0, longest_pause_s=60.0, mono=lambda: 0.0)


def test_a_job_that_succeeds_runs_once() -> None:
    job = Job(DONE)
    assert repeat(job, budget(3), Pauses()) == 0
    assert job.attempts == [0]


def test_a_lost_job_is_started_again(capsys: pytest.CaptureFixture[str]) -> None:
    job, pauses = Job(LOST, LOST, DONE), Pauses()
    assert repeat(job, budget(3), pauses) == 0
    assert (job.attempts, pauses.seconds) == ([0, 1, 2], [1.0, 2.0])
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.splitlines() == [
        "horovod-ft run: the job is lost: worker node7[0] was ended by SIGKILL; attempt 2 begins in 1 s, "
        "restart 1 of 3 within 100 s",
        "horovod-ft run: the job is lost: worker node7[0] was ended by SIGKILL; attempt 3 begins in 2 s, "
        "restart 2 of 3 within 100 s",
    ]


def test_a_spent_budget_gives_up(capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(LOST)
    assert repeat(job, budget(2), Pauses()) == EXIT_GIVEN_UP == 75
    assert job.attempts == [0, 1, 2]
    assert "given up, after 2 of 2 restarts within 100 s" in capsys.readouterr().err


def test_without_restarts_it_says_how_to_get_some(capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(LOST)
    assert repeat(job, budget(0), Pauses()) == EXIT_GIVEN_UP
    assert job.attempts == [0]
    assert "--restarts says how often it may be started again, and is 0" in capsys.readouterr().err


def test_an_error_of_the_script_ends_it_with_its_own_status(capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(WRONG)
    assert repeat(job, budget(3), Pauses()) == 1
    assert job.attempts == [0]
    assert "would again: worker node7[0] ended with status 1" in capsys.readouterr().err


def test_so_it_does_after_a_restart() -> None:
    job = Job(LOST, WRONG)
    assert repeat(job, budget(3), Pauses()) == 1
    assert job.attempts == [0, 1]


def test_a_launcher_stopped_by_another_hand_is_told_as_shells_do() -> None:
    assert repeat(Job(Ending(-2)), budget(3), Pauses()) == 130


def test_hosts_that_do_not_come_back_are_waited_for_again() -> None:
    few = Ending(1, "TimeoutException", "Timed out")
    assert repeat(Job(few), budget(3), Pauses()) == 1
    job = Job(LOST, few, DONE)
    assert repeat(job, budget(3), Pauses()) == 0
    assert job.attempts == [0, 1, 2]


@pytest.mark.parametrize("end", [DONE, LOST, WRONG, Ending(-15)])
def test_a_signal_to_us_ends_it_however_it_ended(end: Ending, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(end)
    assert repeat(job, budget(3), Pauses(stopped=signal.SIGTERM, passed_on=True)) == 128 + signal.SIGTERM
    assert job.attempts == [0]
    assert capsys.readouterr().err == "horovod-ft run: the job was ended by SIGTERM\n"


@pytest.mark.parametrize("end", [failed(75), LOST, WRONG])
def test_so_it_does_when_the_job_was_told_and_has_ended_by_itself(end: Ending) -> None:
    job = Job(end)
    assert repeat(job, budget(3), Pauses(stopped=signal.SIGUSR1)) == 128 + signal.SIGUSR1
    assert job.attempts == [0]


def test_a_job_that_succeeds_within_its_grace_has_succeeded(capsys: pytest.CaptureFixture[str]) -> None:
    assert repeat(Job(DONE), budget(3), Pauses(stopped=signal.SIGTERM)) == 0
    assert capsys.readouterr().err == ""


def test_a_signal_in_a_pause_starts_nothing_more() -> None:
    job = Job(LOST)
    assert repeat(job, budget(3), Pauses(stop_in_pause=signal.SIGINT)) == 128 + signal.SIGINT
    assert job.attempts == [0]


# --- the command ---------------------------------------------------------------------------------------------------


#: What ``horovod-ft run`` may listen to.
HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Attended:
    """Stands for ``attend``: remembers what it is to run, and leaves an error behind if told to."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.environments: list[dict[str, str]] = []
        self.graces: list[float] = []
        self.notices: list[str | None] = []
        self.heard: list[signal.Signals] = []
        self.errors: list[Exception] = []

    def __call__(
        self, command: Sequence[str], env: Mapping[str, str], signals: Signals, grace_s: float, notice: Notice | None
    ) -> int:
        assert ("--notices" in command) is (notice is not None)
        self.notices.append(None if notice is None else notice.name)
        self.heard = [number for number in HEARD if signal.getsignal(number) == signals._note]
        self.commands.append(list(command))
        self.environments.append(dict(env))
        self.graces.append(grace_s)
        if not self.errors:
            return 0
        Path(command[command.index("--outcome") + 1]).write_text(describe(self.errors.pop(0)))
        return 1


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> Attended:
    fake = Attended()
    monkeypatch.setattr("horovod_ft.cli.run.attend", fake)
    return fake


Ran = Callable[..., Told]


@pytest.fixture
def ran(call: Call) -> Ran:
    def command(*options: str) -> Told:
        return call("run", *options, "-np", "4", "--min-np", "2", "python", "train.py", "--restarts", "9", "-h")

    return command


def test_the_launcher_gets_its_arguments_as_they_are(ran: Ran, attended: Attended) -> None:
    assert ran("--restarts", "3").code == 0
    (command,) = attended.commands
    border = command.index("--")
    assert command[:3] == [sys.executable, "-m", "horovod_ft.agent.launcher"]
    assert command[border + 1 :] == ["-np", "4", "--min-np", "2", "python", "train.py", "--restarts", "9", "-h"]
    assert not {"--restarted", "--discovery-interval"} & set(command[:border])


def test_our_options_reach_it(ran: Ran, attended: Attended) -> None:
    ran("--discovery-interval", "0.25", "--grace=7")
    (command,) = attended.commands
    assert command[command.index("--discovery-interval") + 1] == "0.25"
    assert attended.graces == [7.0]


def test_by_default_the_job_is_told_of_a_sigterm(ran: Ran, attended: Attended) -> None:
    ran()
    assert attended.notices == ["SIGTERM"]
    assert attended.heard == [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.mark.parametrize("name", ["USR1", "usr2", "HUP", "INT"])
def test_or_of_another_signal(ran: Ran, attended: Attended, name: str) -> None:
    ran("--preempt-signal", name)
    assert attended.notices == [f"SIG{name.upper()}"]
    assert signal.Signals[f"SIG{name.upper()}"] in attended.heard


def test_or_of_none(ran: Ran, attended: Attended) -> None:
    ran("--preempt-signal", "none")
    assert attended.notices == [None]


def test_each_attempt_is_told_to_the_workers(ran: Ran, attended: Attended) -> None:
    attended.errors = [RuntimeError(LOST.message), RuntimeError(LOST.message)]
    assert ran("--restarts", "3", "--backoff", "0").code == 0
    assert [env["HOROVOD_FT_ATTEMPT"] for env in attended.environments] == ["0", "1", "2"]
    assert ["--restarted" in command for command in attended.commands] == [False, True, True]


def test_by_default_nothing_is_started_again(ran: Ran, attended: Attended) -> None:
    attended.errors = [RuntimeError(LOST.message)]
    assert ran().code == EXIT_GIVEN_UP
    assert len(attended.commands) == 1


def test_a_variable_that_is_misspelt(ran: Ran, attended: Attended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_FT_POLCY", "rollback")
    told = ran()
    assert (told.code, attended.commands) == (2, [])
    assert "HOROVOD_FT_POLCY" in told.err


def test_without_horovod(ran: Ran, attended: Attended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horovod_ft.installation.importlib.util.find_spec", lambda name: None)
    told = ran()
    assert (told.code, attended.commands) == (2, [])
    assert "Horovod is not installed. Run scripts/install" in told.err


@pytest.mark.parametrize(
    "options",
    [
        ("--restarts", "-1"),
        ("--restarts", "many"),
        ("--backoff", "-1"),
        ("--discovery-interval", "0"),
        ("--preempt-signal", "KILL"),
    ],
)
def test_a_value_that_cannot_be_used(ran: Ran, attended: Attended, options: tuple[str, str]) -> None:
    told = ran(*options)
    assert (told.code, attended.commands) == (2, [])
    assert options[0] in told.err


def test_nothing_to_run(call: Call, attended: Attended) -> None:
    told = call("run", "--restarts", "3")
    assert (told.code, attended.commands) == (2, [])
    assert "ARGUMENTS" in told.err
