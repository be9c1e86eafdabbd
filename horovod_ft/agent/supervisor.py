"""Run a launcher to its end: signals to us are passed on once, its end has a bound, and no process of it stays behind.

Nothing here knows of Horovod. Linux only: orphans of the launcher come to this process (``PR_SET_CHILD_SUBREAPER``).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType

import psutil

from horovod_ft.errors import ConfigurationError

#: What a terminal or a batch system sends to end a job.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: prctl(2): the signal that a process gets when its parent dies; orphans among its descendants become its children.
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
#: Processes that end because their launcher has ended get this long, and then as long again after a SIGTERM.
SETTLE_S, TERM_S = 2.0, 5.0


class Signals:
    """Signals as something that can be waited for. A context manager, for the main thread.

    The first signal that is to end the job is remembered, later ones are ignored: ``timeout`` and shells send two. A
    signal that was ignored before, as ``nohup`` has it, stays so.

    Attributes:
        stopped: the first signal; None before it.
    """

    def __init__(self) -> None:
        self.stopped: int | None = None

    def __enter__(self) -> Signals:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        heard = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._note) for number in (*heard, signal.SIGCHLD)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._read)
        os.close(self._write)

    def _note(self, number: int, _: FrameType | None) -> None:
        if number != signal.SIGCHLD and self.stopped is None:
            self.stopped = number

    def wait(self, timeout_s: float | None) -> None:
        """Until the next signal, at most so long. Those since the last wait count: none is missed."""
        select.select([self._read], [], [], timeout_s)
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)

    def pause(self, seconds: float) -> None:
        """Wait, unless a signal ends the job."""
        until = time.monotonic() + seconds
        while self.stopped is None and (left := until - time.monotonic()) > 0:
            self.wait(left)


def attend(command: Sequence[str], env: Mapping[str, str], signals: Signals, grace_s: float) -> int:
    """Run a program with our standard streams, in a session of its own, until it and all its descendants are gone.

    When a signal ends the job its process group gets it, once: SIGINT as such, the others as SIGTERM, because
    ``horovodrun`` dies of a SIGHUP without ending its workers first. It is killed when it has not ended
    ``grace_s`` seconds after that, and gets a SIGTERM when this process dies.

    Returns:
        its status, negative for a signal.

    Raises:
        ConfigurationError: it cannot be started.
    """
    with _adopting() as left_over:
        process = start(command, env)
        try:
            _until_ended(process, signals, grace_s)
        finally:
            if process.poll() is None:  # an error of our own
                process.kill()
                process.wait()
            _sweep(left_over)
    return process.returncode


def start(command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a program with our standard streams, in a session of its own. It gets a SIGTERM when this process dies.

    Raises:
        ConfigurationError: it cannot be started.
    """
    try:
        return subprocess.Popen(
            command, env=env, start_new_session=True,
            preexec_fn=bound_to(os.getpid()),  # noqa: PLW1509  this process has one thread
        )  # fmt: skip
    except OSError as error:
        raise ConfigurationError(f"cannot run {command[0]}: {error.strerror or error}") from error


def _until_ended(process: subprocess.Popen[bytes], signals: Signals, grace_s: float) -> None:
    deadline: float | None = None
    while process.poll() is None:
        if signals.stopped is not None and deadline is None:
            os.killpg(process.pid, signal.SIGINT if signals.stopped == signal.SIGINT else signal.SIGTERM)
            deadline = time.monotonic() + grace_s
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return
        signals.wait(left)


def bound_to(parent: int) -> Callable[[], None]:
    """What a child does before it becomes another program: see to it that SIGTERM comes when its parent dies."""
    prctl = ctypes.CDLL(None).prctl

    def bind() -> None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if os.getppid() != parent:  # it has died already
            os.kill(os.getpid(), signal.SIGTERM)

    return bind


@contextlib.contextmanager
def _adopting() -> Iterator[Callable[[], list[psutil.Process]]]:
    """Meanwhile no descendant gets lost to init. Gives what lists those that were not there before."""
    prctl = ctypes.CDLL(None).prctl
    ours = psutil.Process()
    before = set(ours.children(recursive=True))
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield lambda: [process for process in ours.children(recursive=True) if process not in before]
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _sweep(left_over: Callable[[], list[psutil.Process]]) -> None:
    """Wait for processes to end; ask them to; kill them. Blocks for at most about 8 s, and leaves none."""
    psutil.wait_procs(left_over(), timeout=SETTLE_S)
    _signal(left_over(), signal.SIGTERM)
    psutil.wait_procs(left_over(), timeout=TERM_S)
    while alive := left_over():  # a process may have started another one since it was listed
        _signal(alive, signal.SIGKILL)
        psutil.wait_procs(alive, timeout=1.0)


def _signal(processes: Sequence[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)
