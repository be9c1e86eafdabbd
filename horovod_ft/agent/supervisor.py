"""Run a launcher to its end: it is told of signals that will end it, its end has a bound, and no process of it stays.

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
from typing import TypeAlias

import psutil

from horovod_ft.agent.notice import Notice
from horovod_ft.errors import ConfigurationError

#: What a terminal or a batch system sends to end a job.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: prctl(2): the signal that a process gets when its parent dies; orphans among its descendants become its children.
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
#: Processes that end because their launcher has ended get this long, and then as long again after a SIGTERM.
SETTLE_S, TERM_S = 2.0, 5.0
#: ``timeout`` and shells send two signals at once. What comes so soon after the first is taken for the same one.
REPEATED_S = 1.0
#: A launcher that has not said by then whether anybody was told has told nobody.
ANSWER_S = 5.0
#: A job that was told and has used its grace is killed so long after the SIGTERM; Horovod needs up to 10 s to end it.
AFTER_GRACE_S = 12.0


class Signals:
    """Signals as something that can be waited for. A context manager, for the main thread.

    The first signal is remembered. A later one of ``ENDING`` says that the end is wanted now, unless it comes within
    REPEATED_S. A signal that was ignored before, as ``nohup`` has it, stays so.

    Args:
        preempt: a signal to listen to besides those of ``ENDING``; it may be one of them.
        mono: the clock, in seconds.

    Attributes:
        stopped: the first signal; None before it.
        insisted: another one has come that wants the end now.
        passed_on: set by ``attend`` when it ends the job.
    """

    def __init__(self, preempt: int | None = None, mono: Callable[[], float] = time.monotonic) -> None:
        self.stopped: int | None = None
        self.insisted = False
        self.passed_on = False
        self._listens_to = {*ENDING, *(() if preempt is None else (preempt,))}
        self._mono = mono
        self._stopped_at = 0.0

    def __enter__(self) -> Signals:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        heard = [number for number in self._listens_to if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._note) for number in (*heard, signal.SIGCHLD)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._read)
        os.close(self._write)

    def _note(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGCHLD:
            return
        if self.stopped is None:
            self.stopped, self._stopped_at = number, self._mono()
        elif number in ENDING and self._mono() - self._stopped_at >= REPEATED_S:
            self.insisted = True

    def wait(self, timeout_s: float | None, *others: Notice) -> None:
        """Until the next signal or answer, at most so long. Signals since the last wait count: none is missed."""
        select.select([self._read, *(other.fileno() for other in others)], [], [], timeout_s)
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)

    def pause(self, seconds: float) -> None:
        """Wait, unless a signal ends the job."""
        until = time.monotonic() + seconds
        while self.stopped is None and (left := until - time.monotonic()) > 0:
            self.wait(left)


def attend(
    command: Sequence[str], env: Mapping[str, str], signals: Signals, grace_s: float, notice: Notice | None = None
) -> int:
    """Run a program with our standard streams, in a session of its own, until it and all its descendants are gone.

    When a signal ends the job its process group gets it, once: SIGINT as such, the others as SIGTERM, because
    ``horovodrun`` dies of a SIGHUP without ending its workers first. It is killed when it has not ended
    ``grace_s`` seconds after that, and gets a SIGTERM when this process dies.

    A job that can hear of it is told of the signal of ``notice`` first, and has ``grace_s`` seconds to end by itself:
    only then, or when another signal insists, it is ended like that, and killed AFTER_GRACE_S seconds later if need be.

    Returns:
        its status, negative for a signal.

    Raises:
        ConfigurationError: it cannot be started.
    """
    with _adopting() as left_over:
        process = start(command, env, () if notice is None else (notice.theirs,))
        try:
            if notice is not None:
                notice.handed_over()
            _until_ended(process, signals, grace_s, notice)
        finally:
            if process.poll() is None:  # an error of our own
                process.kill()
                process.wait()
            _sweep(left_over)
    return process.returncode


def start(command: Sequence[str], env: Mapping[str, str], inherited: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Start a program with our standard streams, in a session of its own. It gets a SIGTERM when this process dies.

    Args:
        command: the program and its arguments.
        env: its environment.
        inherited: file descriptors that it gets besides.

    Raises:
        ConfigurationError: it cannot be started.
    """
    try:
        return subprocess.Popen(
            command, env=env, start_new_session=True, pass_fds=inherited,
            preexec_fn=bound_to(os.getpid()),  # noqa: PLW1509  this process has one thread
        )  # fmt: skip
    except OSError as error:
        raise ConfigurationError(f"cannot run {command[0]}: {error.strerror or error}") from error


Process: TypeAlias = "subprocess.Popen[bytes]"


def _until_ended(process: Process, signals: Signals, grace_s: float, notice: Notice | None) -> None:
    _wait(process, signals, lambda: signals.stopped is not None)
    bound_s = grace_s
    if notice is not None and signals.stopped == notice.number and _told(process, signals, grace_s, notice):
        bound_s = min(grace_s, AFTER_GRACE_S)
    if process.poll() is None:
        _end(process, signals, bound_s)


def _told(process: Process, signals: Signals, grace_s: float, notice: Notice) -> bool:
    """Let a job that hears of its end have its grace. Returns whether it was told."""
    deadline = time.monotonic() + grace_s
    notice.ask()
    _wait(process, signals, lambda: notice.answered() or signals.insisted, min(ANSWER_S, grace_s), notice)
    if not (notice.answered() and notice.told):  # asked once more: it may have answered and ended since
        if process.poll() is None:
            notice.say(f"nobody in the job listens to a notice of {notice.name}: it is ended at once")
        return False
    notice.say(f"told the job that {notice.name} ends it; it has {grace_s:g} s for a last checkpoint")
    _wait(process, signals, lambda: signals.insisted, deadline - time.monotonic())
    if process.poll() is None:
        notice.say("another signal has come: the job is ended" if signals.insisted else "its time is up: it is ended")
    return True


def _wait(
    process: Process, signals: Signals, until: Callable[[], bool], timeout_s: float | None = None, *others: Notice
) -> None:
    """Until the process has ended, something holds, or the time is up."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while process.poll() is None and not until():
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            return
        signals.wait(left, *others)


def _end(process: Process, signals: Signals, bound_s: float) -> None:
    signals.passed_on = True
    os.killpg(process.pid, signal.SIGINT if signals.stopped == signal.SIGINT else signal.SIGTERM)
    _wait(process, signals, lambda: False, bound_s)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


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
