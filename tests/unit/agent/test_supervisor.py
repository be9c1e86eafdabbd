"""Running a program to its end: its output and status, signals to it, its bound, and what it leaves behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from horovod_ft.agent import supervisor
from horovod_ft.agent.notice import Notice
from horovod_ft.agent.supervisor import PR_SET_CHILD_SUBREAPER, Signals, attend
from horovod_ft.errors import ConfigurationError

ENV = dict(os.environ)
PR_GET_CHILD_SUBREAPER = 37


@pytest.fixture
def signals() -> Iterator[Signals]:
    with Signals() as heard:
        yield heard


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "SETTLE_S", 0.2)
    monkeypatch.setattr(supervisor, "TERM_S", 0.3)


def sh(script: str, signals: Signals, grace_s: float = 10.0) -> int:
    return attend(["sh", "-c", script], ENV, signals, grace_s)


def python(script: str, signals: Signals, notice: Notice, grace_s: float = 10.0) -> int:
    """Run a script that has the launcher's end of the line as ``line``."""
    start = f"import os, signal, socket, sys, time; line = socket.socket(fileno={notice.theirs})\n"
    return attend([sys.executable, "-S", "-c", start + script], ENV, signals, grace_s, notice)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid)


# --- a program -----------------------------------------------------------------------------------------------------


def test_its_output_passes_through_unchanged(signals: Signals, capfd: pytest.CaptureFixture[str]) -> None:
    assert sh("printf 'a\\tb'; printf c >&2", signals) == 0
    assert capfd.readouterr() == ("a\tb", "c")


def test_its_status_is_returned(signals: Signals) -> None:
    assert sh("exit 7", signals) == 7


def test_a_signal_that_ends_it_is_told_as_subprocess_does(signals: Signals) -> None:
    assert sh("kill -KILL $$", signals) == -signal.SIGKILL
    assert signals.stopped is None


def test_a_program_that_does_not_exist(signals: Signals) -> None:
    with pytest.raises(ConfigurationError, match="cannot run no-such-program: No such file or directory"):
        attend(["no-such-program"], ENV, signals, 1.0)


def test_it_does_not_outlive_us() -> None:
    code = (
        "import os; from horovod_ft.agent.supervisor import *\n"
        "with Signals() as signals: attend(['sh', '-c', 'echo up; exec sleep 60'], os.environ, signals, 9.0)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n"
        parent.kill()
        assert parent.stdout.read() == b""  # the end of the pipe: nobody holds it any more


# --- signals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ours", "its"), [("INT", "INT"), ("TERM", "TERM"), ("HUP", "TERM")])
def test_a_signal_is_passed_on(signals: Signals, ours: str, its: str) -> None:
    asked = f"trap 'exit 9' {its}; kill -{ours} $PPID; while :; do sleep 0.01; done"
    assert sh(asked, signals) == 9
    assert signals.stopped == signal.Signals[f"SIG{ours}"]


def test_it_is_passed_on_once(signals: Signals, tmp_path: Path) -> None:
    log = tmp_path / "log"
    asked = (
        f"trap 'echo got >> {log}' TERM; kill -TERM $PPID; while [ ! -s {log} ]; do sleep 0.01; done\n"
        "kill -TERM $PPID; kill -INT $PPID\n"
        "for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do sleep 0.02; done"
    )
    assert sh(asked, signals) == 0
    assert log.read_text() == "got\n"
    assert signals.stopped == signal.SIGTERM


def test_a_program_that_does_not_heed_it_is_killed(signals: Signals) -> None:
    began = time.monotonic()
    assert sh("trap '' TERM; kill -TERM $PPID; while :; do sleep 0.01; done", signals, grace_s=0.3) == -signal.SIGKILL
    assert 0.3 <= time.monotonic() - began < 5


def test_a_signal_from_before_is_passed_on_too(signals: Signals) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    assert sh("exec sleep 60", signals) == -signal.SIGTERM


def test_one_that_is_repeated_at_once_does_not_insist() -> None:
    moments = iter([100.0, 100.9, 101.0])
    with Signals(mono=lambda: next(moments)) as signals:
        for insisted in (False, False, True):
            os.kill(os.getpid(), signal.SIGTERM)
            assert signals.insisted is insisted


def test_a_signal_of_another_kind_insists_too_if_it_ends_jobs() -> None:
    moments = iter([100.0, 105.0])
    with Signals(preempt=signal.SIGUSR1, mono=lambda: next(moments)) as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (signals.stopped, signals.insisted) == (signal.SIGUSR1, False)
        os.kill(os.getpid(), signal.SIGINT)
        assert (signals.stopped, signals.insisted) == (signal.SIGUSR1, True)


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            assert sh("kill -HUP $PPID; exit 3", signals) == 3
            assert signals.stopped is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_handlers_are_back_afterwards() -> None:
    numbers = (*supervisor.ENDING, signal.SIGCHLD)
    before = [signal.getsignal(number) for number in numbers]
    with Signals():
        pass
    assert [signal.getsignal(number) for number in numbers] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_pause_takes_its_time(signals: Signals) -> None:
    began = time.monotonic()
    signals.pause(0.05)
    assert time.monotonic() - began >= 0.05


def test_a_signal_ends_a_pause(signals: Signals) -> None:
    with subprocess.Popen(["sh", "-c", "sleep 0.05; kill -TERM $PPID"]):
        began = time.monotonic()
        signals.pause(30)
        assert time.monotonic() - began < 10
    assert signals.stopped == signal.SIGTERM


def test_the_end_of_a_process_does_not_end_a_pause(signals: Signals) -> None:
    began = time.monotonic()
    with subprocess.Popen(["true"]):
        signals.pause(0.3)
    assert time.monotonic() - began >= 0.3


# --- a notice ------------------------------------------------------------------------------------------------------

#: A launcher gets a SIGTERM, and tells somebody of it when it is asked.
TOLD = "os.kill(os.getppid(), signal.SIGTERM); line.recv(1); line.send(b'y')\n"


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def notice(said: list[str]) -> Iterator[Notice]:
    with Notice(signal.SIGTERM, said.append) as line:
        yield line


def test_a_job_that_was_told_ends_by_itself(signals: Signals, notice: Notice, said: list[str]) -> None:
    assert python(TOLD + "time.sleep(0.05); sys.exit(9)", signals, notice) == 9
    assert (signals.stopped, signals.passed_on) == (signal.SIGTERM, False)
    assert said == ["told the job that SIGTERM ends it; it has 10 s for a last checkpoint"]


def test_when_its_grace_is_over_it_is_ended(signals: Signals, notice: Notice, said: list[str]) -> None:
    began = time.monotonic()
    assert python(TOLD + "time.sleep(60)", signals, notice, grace_s=0.3) == -signal.SIGTERM
    assert 0.3 <= time.monotonic() - began < 5
    assert signals.passed_on
    assert said[1:] == ["its time is up: it is ended"]


def test_and_killed_if_it_does_not_heed_that(signals: Signals, notice: Notice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "AFTER_GRACE_S", 0.1)
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + TOLD + "time.sleep(60)"
    assert python(stubborn, signals, notice, grace_s=0.3) == -signal.SIGKILL


def test_another_signal_ends_it_before(notice: Notice, said: list[str]) -> None:
    moments = iter([100.0, 102.0])
    with Signals(mono=lambda: next(moments)) as signals:
        again = "time.sleep(0.05); os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
        assert python(TOLD + again, signals, notice) == -signal.SIGTERM
    assert signals.passed_on
    assert said[1:] == ["another signal has come: the job is ended"]


@pytest.mark.parametrize("answer", ["line.send(b'n')", "line.close()"])
def test_a_job_in_which_nobody_listens_is_ended_at_once(
    signals: Signals, notice: Notice, said: list[str], answer: str
) -> None:
    asked = f"os.kill(os.getppid(), signal.SIGTERM); line.recv(1); {answer}; time.sleep(60)"
    assert python(asked, signals, notice) == -signal.SIGTERM
    assert said == ["nobody in the job listens to a notice of SIGTERM: it is ended at once"]


def test_so_is_one_whose_launcher_does_not_answer(
    signals: Signals, notice: Notice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "ANSWER_S", 0.05)
    assert python("os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)", signals, notice) == -signal.SIGTERM


def test_other_signals_end_it_without_a_notice(signals: Signals, notice: Notice, said: list[str]) -> None:
    ended = "signal.signal(signal.SIGINT, signal.SIG_DFL); os.kill(os.getppid(), signal.SIGINT); time.sleep(60)"
    assert python(ended, signals, notice) == -signal.SIGINT
    assert said == []


def test_a_signal_that_ends_no_job_otherwise(said: list[str]) -> None:
    with Signals(preempt=signal.SIGUSR2) as signals, Notice(signal.SIGUSR2, said.append) as notice:
        assert python(TOLD.replace("TERM", "USR2") + "sys.exit(3)", signals, notice) == 3
    assert said == ["told the job that SIGUSR2 ends it; it has 10 s for a last checkpoint"]


def test_one_that_answers_and_ends_before_the_answer_is_read_was_told(
    signals: Signals, notice: Notice, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = Signals.wait

    def ended() -> bool:
        return all(child.status() == psutil.STATUS_ZOMBIE for child in psutil.Process().children())

    def late(self: Signals, timeout_s: float | None, *others: Notice) -> None:
        waited(self, timeout_s, *others)
        deadline = time.monotonic() + 10.0
        while others and not ended() and time.monotonic() < deadline:  # it is about to answer, and to end
            time.sleep(0.01)

    monkeypatch.setattr(Signals, "wait", late)
    assert python(TOLD + "sys.exit(3)", signals, notice) == 3
    assert said == ["told the job that SIGTERM ends it; it has 10 s for a last checkpoint"]


# --- what it leaves behind -----------------------------------------------------------------------------------------


def left(file: Path) -> list[int]:
    return [int(pid) for pid in file.read_text().split()]


@pytest.mark.parametrize("trap", ["", "trap '' TERM; "])
def test_orphans_are_ended(signals: Signals, tmp_path: Path, trap: str) -> None:
    """In a session of their own, as Horovod's workers are, and whether or not they heed a SIGTERM."""
    pids = tmp_path / "pids"
    worker = f"{trap}echo $$ >> {pids}; while :; do sleep 0.01; done"
    assert sh(f'setsid sh -c "{worker.replace("$", chr(92) + "$")}" & while [ ! -s {pids} ]; do sleep 0.01; done',
              signals) == 0  # fmt: skip
    (pid,) = left(pids)
    assert gone(pid)


def test_orphans_that_end_by_themselves_are_left_to_it(signals: Signals, tmp_path: Path) -> None:
    file = tmp_path / "file"
    assert sh(f"setsid sh -c 'sleep 0.05; echo done > {file}' & exit 0", signals) == 0
    assert file.read_text() == "done\n"


def test_those_of_a_program_that_had_to_be_killed(signals: Signals, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    asked = (
        f"trap '' TERM; setsid sh -c 'echo $$ > {pids}; exec sleep 60' & while [ ! -s {pids} ]; do sleep 0.01; done\n"
        "kill -TERM $PPID; while :; do sleep 0.01; done"
    )
    assert sh(asked, signals, grace_s=0.1) == -signal.SIGKILL
    (pid,) = left(pids)
    assert gone(pid)


def test_other_processes_of_ours_are_left_alone(signals: Signals) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        sh("exit 0", signals)
        assert other.poll() is None
        other.kill()


def test_orphans_go_to_init_again_afterwards(signals: Signals) -> None:
    sh("exit 0", signals)
    adopts = ctypes.c_int(-1)
    ctypes.CDLL(None).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(adopts), 0, 0, 0)
    assert adopts.value == 0
    assert PR_SET_CHILD_SUBREAPER == 36
