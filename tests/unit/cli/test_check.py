"""How the doctor runs other programs, and what it says of those that fail."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from horovod_ft.cli import check
from horovod_ft.cli.check import Ran, run


def test_a_program_that_ends_well() -> None:
    assert run(["sh", "-c", "echo out; echo err >&2"], 10) == Ran(0, "out\n", "err\n")


def test_the_environment_is_added_to() -> None:
    assert run(["sh", "-c", "echo $ADDED $HOME"], 10, {"ADDED": "yes"}).out == f"yes {os.environ['HOME']}\n"


def test_a_program_that_does_not_exist() -> None:
    ran = run(["no-such-program"], 10)
    assert not ran.good
    assert ran.why() == "no-such-program cannot be run: No such file or directory"


def test_a_program_that_does_not_end_is_ended() -> None:
    ran = run(["sleep", "60"], 0.05)
    assert ran == Ran(None, err="no answer within 0 s")


def test_what_it_has_started_is_ended_with_it() -> None:
    ran = run(["sh", "-c", "sleep 60 & echo $! >&2; exit 0"], 0.1)  # the sleep holds the pipes
    assert ran.returncode is None
    assert _sleeping_in_other_sessions() == []


def _sleeping_in_other_sessions() -> list[str]:
    """Processes that this test may have left behind."""
    return [
        process.name()
        for process in psutil.Process().children(recursive=True)
        if process.name() == "sleep" and process.status() != psutil.STATUS_ZOMBIE
    ]


def test_a_program_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "GRACE_S", 0.1)
    assert run(["sh", "-c", "trap '' TERM; while :; do sleep 0.01; done"], 0.1).returncode is None


def test_a_signal_is_named() -> None:
    assert Ran(-signal.SIGSEGV).why() == "it was ended by SIGSEGV"


def test_the_last_line_of_its_errors_says_why() -> None:
    assert Ran(1, err="Traceback\n  ...\nImportError: libmpi.so\n\n").why() == "ImportError: libmpi.so"


def test_without_a_word_its_status_says_why() -> None:
    assert Ran(3).why() == "it ended with status 3"
