"""What a check of the doctor answers, and how it runs other programs. Knows nothing of any particular check."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


class Status(Enum):
    """How a check ended. Only FAILED makes the doctor's exit code other than 0."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True)
class Check:
    """One row of the doctor's table.

    Attributes:
        name: what was looked at.
        status: the outcome.
        detail: what was found.
        remedy: what to do about it; empty when nothing has to be done.
    """

    name: str
    status: Status
    detail: str
    remedy: str = ""


def ok(name: str, detail: str) -> Check:
    return Check(name, Status.OK, detail)


def warning(name: str, detail: str, remedy: str = "") -> Check:
    return Check(name, Status.WARNING, detail, remedy)


def failed(name: str, detail: str, remedy: str) -> Check:
    """A check that fails always has a remedy."""
    return Check(name, Status.FAILED, detail, remedy)


@dataclass(frozen=True)
class Ran:
    """A program that was run to its end, or to the bound.

    Attributes:
        returncode: negative for a signal; None when it was ended at the bound or could not be started at all.
        out: its standard output.
        err: its standard error, or why it could not be started.
    """

    returncode: int | None
    out: str = ""
    err: str = ""

    @property
    def good(self) -> bool:
        return self.returncode == 0

    def why(self) -> str:
        """One line that says what went wrong."""
        if self.returncode is not None and self.returncode < 0:
            with contextlib.suppress(ValueError):
                return f"it was ended by {signal.Signals(-self.returncode).name}"
        lines = [line for line in self.err.splitlines() if line.strip()]
        return lines[-1].strip() if lines else f"it ended with status {self.returncode}"


#: Time for a program to clean up after SIGTERM: mpirun ends its workers, which nobody else would.
GRACE_S = 5.0


def run(command: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None) -> Ran:
    """Run a program in a process group of its own, which is ended at the bound. Blocks for at most about ``timeout_s``.

    Args:
        command: the program and its arguments.
        timeout_s: when it is ended.
        env: added to the environment.
    """
    try:
        process = subprocess.Popen(
            command, env={**os.environ, **(env or {})}, text=True, errors="replace", start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
    except OSError as error:
        return Ran(None, err=f"{command[0]} cannot be run: {error.strerror or error}")
    with process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException as error:  # a Ctrl-C leaves nothing behind either
            _end(process)
            if isinstance(error, subprocess.TimeoutExpired):
                return Ran(None, err=f"no answer within {timeout_s:.0f} s")
            raise
    return Ran(process.returncode, out, err)


def _end(process: subprocess.Popen[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=GRACE_S)
            return
