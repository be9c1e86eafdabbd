"""Real elastic jobs under ``horovodrun`` on one machine, with a pretended host for each worker.

``horovodrun`` counts a failure against the whole host of the worker, so a job on one host does not survive any. It
takes ``127.0.0.1``, ``127.0.0.01``, ``127.0.0.001``... for so many different hosts, while every resolver reads them as
the loopback address: no root, no extra addresses, no ssh.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from horovod_ft.errors import InstallationError
from horovod_ft.events import Event, read_events

MARK = "LOCAL_JOB_ID"


def host_name(index: int) -> str:
    """Name of the pretended host number ``index``, from 0."""
    return "127.0.0." + "0" * index + "1"


@dataclass(frozen=True)
class Finished:
    """A job that has ended.

    Attributes:
        returncode: of ``horovodrun``; None if it had to be killed at the bound.
        output: standard output and error of the launcher and all workers.
        seconds: from start to end.
        leftovers: processes of the job that were still alive after it and had to be killed.
    """

    returncode: int | None
    output: str
    seconds: float
    leftovers: int


class LocalJob:
    """One job. Use as a context manager: whatever happens, its processes are gone afterwards.

    Args:
        command: what each worker runs.
        workers: how many to start with.
        folder: for hosts, events, ledger and log; made if need be.
        min_workers: ``--min-np``.
        max_workers: ``--max-np``.
        env: added to the environment of the workers; empty values remove a name.
        arguments: more arguments for ``horovodrun``.
        launcher: the command to use for ``horovodrun``.
        fixed_hosts: the hosts are given once, with ``-H``. Otherwise ``horovodrun`` runs a discovery script every
            second, and workers can come and go.
    """

    def __init__(
        self,
        command: Sequence[str],
        workers: int,
        folder: Path,
        *,
        min_workers: int = 1,
        max_workers: int = 16,
        env: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
        launcher: Sequence[str] | None = None,
        fixed_hosts: bool = False,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.events_folder = folder / "events"
        self.ledger_folder = folder / "ledger"
        self.hosts = [host_name(index) for index in range(workers)]
        self._used = workers
        self._id = uuid.uuid4().hex
        self._write_hosts()
        script = folder / "discover.sh"
        script.write_text(f"#!/bin/sh\ncat '{folder / 'hosts'}'\n")
        script.chmod(0o755)
        fixed = ["-H", ",".join(f"{name}:1" for name in self.hosts)]
        hosts = fixed if fixed_hosts else ["--host-discovery-script", str(script)]
        self._command = [
            *(launcher or [_launcher()]), "-np", str(workers),
            "--min-np", str(min_workers), "--max-np", str(max_workers),
            "--network-interface", "lo", *hosts, *arguments, *command,
        ]  # fmt: skip
        self._env = self._environment(env or {})
        self._log = folder / "log.txt"
        self._process: subprocess.Popen[bytes] | None = None
        self._began = 0.0

    def _environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        env = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "HOROVOD_FT_EVENTS": str(self.events_folder),
            "HOROVOD_FT_LEDGER": str(self.ledger_folder),
            **extra,
            MARK: self._id,
        }
        return {name: value for name, value in env.items() if value}

    def __enter__(self) -> LocalJob:
        self._began = time.monotonic()
        with self._log.open("wb") as sink:
            self._process = subprocess.Popen(
                self._command, env=self._env, stdout=sink, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    # --- hosts -----------------------------------------------------------------------------------------------------

    def add_host(self) -> str:
        """The discovery script will list one more host, which no worker has used yet. Returns its name."""
        name = host_name(self._used)
        self._used += 1
        self.hosts.append(name)
        self._write_hosts()
        return name

    def remove_host(self, name: str) -> None:
        """The discovery script will no longer list a host."""
        self.hosts.remove(name)
        self._write_hosts()

    def _write_hosts(self) -> None:
        partial = self.folder / "hosts.new"
        partial.write_text("".join(f"{name}:1\n" for name in self.hosts))
        partial.rename(self.folder / "hosts")

    # --- watching --------------------------------------------------------------------------------------------------

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def events(self) -> list[Event]:
        return read_events(self.events_folder)

    def wait_for(self, what: str, condition: Callable[[LocalJob], bool], timeout_s: float = 60.0) -> None:
        """Wait until a condition holds.

        Raises:
            TimeoutError: it does not within ``timeout_s``, or the job ended before; shows the end of the log.
        """
        deadline = time.monotonic() + timeout_s
        while not condition(self):
            ended = not self.running()
            if ended or time.monotonic() > deadline:
                why = "the job ended" if ended else f"{timeout_s:.0f} s went by"
                raise TimeoutError(f"{why} while waiting for {what}; the log ends with:\n{self.output()[-4000:]}")
            time.sleep(0.02)

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self, start_rank: int) -> None:
        """SIGKILL the worker with this start rank, by the process id in its first event."""
        os.kill(self.pid(start_rank), signal.SIGKILL)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Send a signal to the launcher, as someone does who wants to end the job."""
        assert self._process is not None
        self._process.send_signal(number)

    def pid(self, start_rank: int) -> int:
        for event in self.events():
            _, rank, pid = event.worker.rsplit(":", 2)
            if int(rank) == start_rank:
                return int(pid)
        raise ProcessLookupError(f"no worker with start rank {start_rank} has written an event")

    def wait(self, timeout_s: float = 90.0) -> Finished:
        """Wait for the end; a job that has not ended at the bound is killed."""
        assert self._process is not None
        try:
            returncode: int | None = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            returncode = None
        seconds = time.monotonic() - self._began
        if returncode is not None:
            _wait_gone(self._alive(), 3.0)
        return Finished(returncode, self.output(), seconds, self.end())

    def end(self) -> int:
        """Kill every process of this job that is still alive. Returns how many there were."""
        alive = self._alive()
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        _wait_gone(alive, 10.0)
        if self._process is not None:
            self._process.wait()
        return len(alive)

    def _alive(self) -> list[psutil.Process]:
        """Processes that carry this job's mark in their environment."""
        return [process for process in psutil.process_iter() if _has_mark(process, self._id)]


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark
    except psutil.Error:
        return False


def _wait_gone(processes: Iterable[psutil.Process], timeout_s: float) -> None:
    psutil.wait_procs(list(processes), timeout=timeout_s)


def _launcher() -> str:
    beside = Path(sys.executable).parent / "horovodrun"
    found = str(beside) if beside.exists() else shutil.which("horovodrun")
    if found is None:
        raise InstallationError("horovodrun is not on PATH: run scripts/install, then activate its environment")
    return found
