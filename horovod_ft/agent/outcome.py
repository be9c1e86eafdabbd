"""How an attempt at a job has ended, and whether another one may do better.

Horovod's launcher ends with status 1 whatever has happened. What tells the cases apart is the error that ended it,
which the launcher's process leaves in a file: its class, and its text with the worker that failed first and how that
one ended (``horovod/runner/gloo_run.py``, ``launch_gloo`` and ``launch_gloo_elastic``: "The first process to do so
was: Process name: ... Exit code: ..."). In elastic mode it counts only the workers of the last group. A worker's status
comes through a shell and ``safe_shell_exec.py``: 128 + n for signal n.

Worth another attempt:

* The first worker to fail was ended by one of ``LOST``: SIGKILL (a host or a container gone, out of memory), SIGABRT
  (as Horovod ends all workers when one is lost while a group's connections are made), SIGTERM or SIGHUP (preempted),
  SIGSEGV or SIGBUS. So are jobs that fell below ``--min-np`` and got no new hosts: the lost worker was the first.
* It ended with 75, EX_TEMPFAIL of ``sysexits.h``: it asks for another attempt, as horovod_ft does when a wait inside a
  recovery has reached its bound.
* It ended with 255: ``ssh`` says so when it loses the host. A script that ends with ``sys.exit(-1)`` does, too.
* The launcher itself was ended by one of ``LOST``.
* A job that had run before found too few hosts (``elastic/driver.py``, ``wait_for_available_slots``).

Not worth one, because it would most likely end in the same way: any other status of the first worker, such as 1 for an
exception in the script, 2 for wrong arguments, 126 and 127 for a program that cannot be run, 130 for a Ctrl-C; wrong
arguments of the launcher; too few hosts for the first attempt; ``--reset-limit`` exceeded; every other error.
"""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from horovod_ft.errors import TRY_AGAIN

LOST = (signal.SIGKILL, signal.SIGABRT, signal.SIGTERM, signal.SIGHUP, signal.SIGSEGV, signal.SIGBUS)
SSH_LOST = 255
FIRST_TO_FAIL = re.compile(r"Process name: (?P<worker>\S+)\s+Exit code: (?P<status>-?\d+)")
TOO_FEW_HOSTS = "TimeoutException"


@dataclass(frozen=True)
class Ending:
    """The end of one attempt.

    Attributes:
        status: of the launcher, as ``subprocess`` has it: negative for a signal.
        error: class of the exception that ended it; empty if there was none or nothing is known of it.
        message: its text.
    """

    status: int
    error: str = ""
    message: str = ""


@dataclass(frozen=True)
class Verdict:
    """Whether another attempt is worth while, and what happened, to be read after "because"."""

    recoverable: bool
    reason: str


def describe(error: BaseException) -> str:
    """The content of the file in which the launcher's process leaves the error that ended it."""
    return json.dumps({"error": type(error).__name__, "message": str(error)})


def ending(status: int, outcome: Path) -> Ending:
    """How an attempt has ended.

    Args:
        status: of the launcher.
        outcome: the file with the error; there is none if the launcher ended in another way.
    """
    try:
        told = json.loads(outcome.read_text())
        return Ending(status, str(told["error"]), str(told["message"]))
    except (OSError, ValueError, KeyError, TypeError):  # killed before it had written all
        return Ending(status)


def judge(end: Ending, *, ran_before: bool) -> Verdict:
    """Say whether a failed job may succeed if it is started again.

    Args:
        end: its status is not 0.
        ran_before: it was not the first attempt.
    """
    if end.status < 0:
        return Verdict(-end.status in LOST, f"the launcher was ended by {_signal_name(-end.status)}")
    first = FIRST_TO_FAIL.search(end.message)
    if first is not None:
        return _judge_worker(first["worker"], int(first["status"]))
    if end.error == TOO_FEW_HOSTS:
        return Verdict(ran_before, f"there were too few hosts: {_first_line(end.message)}")
    if end.error:
        return Verdict(False, f"the launcher failed: {end.error}: {_first_line(end.message)}")
    return Verdict(False, f"the launcher ended with status {end.status}")


def _judge_worker(worker: str, status: int) -> Verdict:
    # Not through the shell when the process in between is ended itself: multiprocessing tells that as -n.
    number = -status if status < 0 else status - 128
    if status == SSH_LOST:
        return Verdict(True, f"the connection to worker {worker} was lost, or it ended with status {status}")
    if number > 0:
        return Verdict(number in LOST, f"worker {worker} was ended by {_signal_name(number)}")
    if status == TRY_AGAIN:
        return Verdict(True, f"worker {worker} asked for another attempt, with status {status}")
    return Verdict(False, f"worker {worker} ended with status {status}, which is of the script's own making")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
