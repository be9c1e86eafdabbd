"""Workers of job tests by fork from a process that has imported torch: four seconds of computing less a worker.

``horovodrun`` starts ``client.py`` in place of ``python -m MODULE``. The client hands its arguments, environment and
standard streams to the zygote, which forks; the fork runs the module as ``__main__``. The client ends as the fork ends,
by the same signal or with the same status. A fork whose client is gone is killed. Nothing of ours is imported before
the fork.

``JOBS_FROM_SCRATCH=1`` starts every worker as a new interpreter instead.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CLIENT = Path(__file__).with_name("client.py")
ROOT = Path(__file__).parent.parent.parent
PRELOADED = ("numpy", "torch", "torch._dynamo", "torch.utils.data", "horovod.torch", "msgspec", "cloudpickle")
STANDARD = (0, 1, 2)


class Zygote:
    """The test session's side. The process ends when this one does, at the latest.

    Args:
        path: of the socket.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        ready_read, ready_write = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.jobs.zygote", str(path), str(ready_write)],
            stdin=subprocess.PIPE, pass_fds=[ready_write], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        os.close(ready_write)
        with os.fdopen(ready_read, "rb") as ready:
            if ready.read(1) != b"x":
                raise RuntimeError("the zygote ended before it was ready: see its error above")

    def command(self, module: str, *arguments: str) -> list[str]:
        """In place of ``python -m module arguments``."""
        return [sys.executable, "-I", "-S", str(CLIENT), str(self._path), module, *arguments]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


class _Order(Exception):  # noqa: N818  a way out of the server's loop, in the fork
    def __init__(self, module: str) -> None:
        self.module = module


class _Server:
    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(64)
        self._forks: dict[int, socket.socket] = {}
        self._wake, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        """Until standard input ends. In a fork it raises _Order."""
        while True:
            watched: list[Any] = [0, self._wake, self._listener, *self._forks.values()]
            readable, _, _ = select.select(watched, [], [])
            if 0 in readable:
                return self._end()
            if self._wake in readable:
                os.read(self._wake, 1024)
            self._kill_orphans(readable)
            self._report_ended()
            if self._listener in readable:
                self._fork()

    def _fork(self) -> None:
        connection, _ = self._listener.accept()
        data, fds, _, _ = socket.recv_fds(connection, 2**20, 3)
        pid = os.fork()
        if pid:
            for fd in fds:
                os.close(fd)
            self._forks[pid] = connection
            connection.sendall(f"{pid}\n".encode())
            return
        order = json.loads(data)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd, standard in zip(fds, STANDARD, strict=True):
            os.dup2(fd, standard)
            os.close(fd)
        for other in (self._listener, connection, *self._forks.values()):
            other.close()
        os.setsid()
        os.environ.clear()
        os.environ.update(order["environ"])
        os.chdir(order["cwd"])
        sys.argv = [order["module"], *order["arguments"]]
        raise _Order(order["module"])

    def _kill_orphans(self, readable: Sequence[Any]) -> None:
        for pid, connection in self._forks.items():
            if connection in readable:  # clients say nothing after their order: it is the end
                os.kill(pid, signal.SIGKILL)

    def _report_ended(self) -> None:
        for pid, connection in list(self._forks.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._forks[pid]
                with connection, contextlib.suppress(OSError):
                    connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())

    def _end(self) -> None:
        for pid in self._forks:
            os.kill(pid, signal.SIGKILL)


def main() -> None:
    path, ready = sys.argv[1], int(sys.argv[2])
    for module in PRELOADED:
        __import__(module)
    gc.freeze()  # so that a collection in a fork does not touch, and thereby copy, what all share
    server = _Server(path)
    os.write(ready, b"x")
    os.close(ready)
    try:
        server.serve()
    except _Order as order:
        module = order.module
    else:
        return
    sys.modules["numpy"].random.seed()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
