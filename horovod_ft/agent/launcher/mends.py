"""Faults of Horovod's launcher, mended in the process that runs it: one function a fault.

Each takes the module that it changes, as imported, and makes sure that what it changes is there and is used as it was
in Horovod 0.28.1. A mend that has become void must not pass for one that works.
"""

from __future__ import annotations

import functools
import inspect
import platform
import socketserver
from collections.abc import Callable
from importlib import metadata
from typing import Any

from horovod_ft.errors import InstallationError
from horovod_ft.installation import HOROVOD

#: Waiting connections. The kernel lowers it to ``net.core.somaxconn``.
BACKLOG = 1024


def queue_connections(http_server: Any, backlog: int = BACKLOG) -> None:
    """Let the rendezvous server keep as many connections waiting as a group makes at once.

    As released it keeps 5, the default of ``socketserver``. A worker opens a new connection for each of its questions,
    one every 10 ms while it waits for the others. The kernel drops what finds no room, and the worker's kernel tries
    again after a second, then after two more. It shows in ``hvd.init()``, at the start and after each failure: with 8
    workers it takes seconds instead of a fraction of one.

    Args:
        http_server: the module ``horovod.runner.http.http_server``. The server must not have been made yet.
        backlog: number of connections.

    Raises:
        InstallationError: the server is made in another way.
    """
    server = getattr(http_server, "RendezvousHTTPServer", None)
    _require(
        isinstance(server, type) and issubclass(server, socketserver.TCPServer),
        "RendezvousHTTPServer in horovod.runner.http.http_server is no socketserver.TCPServer",
    )
    assert server is not None
    server.request_queue_size = max(server.request_queue_size, backlog)


def keep_exit_statuses(process: Any) -> None:
    """Leave the exit status of a worker to the thread that waits for it.

    Whenever a process is started, Python's ``multiprocessing`` collects those that have ended. The launcher starts one
    for each run of the discovery script, in another thread than those that wait for the workers. If a worker ends in
    the moment between, the waiting thread gets no status: the launcher prints "exit with status code None", and a job
    that has succeeded counts as failed. The launcher waits for each process that it starts, so nothing else needs the
    collecting.

    Args:
        process: the module ``multiprocessing.process``.

    Raises:
        InstallationError: this Python collects in another way.
    """
    start = getattr(getattr(process, "BaseProcess", None), "start", None)
    _require(
        callable(getattr(process, "_cleanup", None)) and "_cleanup" in _names_in(start),
        f"multiprocessing.process of Python {platform.python_version()} does not collect ended processes in _cleanup",
    )
    process._cleanup = lambda: None


def discover_every(driver: Any, seconds: float) -> None:
    """Set the pause between two runs of the discovery script, which is a constant of 1 s as released.

    A shorter one notices new hosts sooner. A longer one takes less from the recovery: the launcher answers nobody while
    the script runs.

    Args:
        driver: the module ``horovod.runner.elastic.driver``.
        seconds: the pause.

    Raises:
        InstallationError: the driver waits in another way.
    """
    discover = getattr(getattr(driver, "ElasticDriver", None), "_discover_hosts", None)
    _require(
        isinstance(getattr(driver, "DISCOVER_HOSTS_FREQUENCY_SECS", None), float)
        and "DISCOVER_HOSTS_FREQUENCY_SECS" in _names_in(discover),
        "horovod.runner.elastic.driver does not wait for DISCOVER_HOSTS_FREQUENCY_SECS",
    )
    driver.DISCOVER_HOSTS_FREQUENCY_SECS = seconds


def take_gloo_for_granted(launch: Any) -> None:
    """Start an elastic job without loading TensorFlow and torch into the launcher first.

    As released it loads the extensions of all frameworks, to learn whether Horovod was built with Gloo: seconds at each
    start. Without Gloo each worker says so itself. ``--check-build`` still looks, and so do jobs that are not elastic.

    Args:
        launch: the module ``horovod.runner.launch``.

    Raises:
        InstallationError: the launcher asks in another way.
    """
    _require(
        callable(getattr(launch, "gloo_built", None))
        and "gloo_built" in _names_in(getattr(launch, "_run_elastic", None)),
        "horovod.runner.launch does not ask gloo_built() before it runs an elastic job",
    )

    def grant(_: Any) -> None:
        launch.gloo_built = lambda verbose=False: True

    _before_elastic(launch, grant)


def start_with_least(launch: Any) -> None:
    """Begin an elastic job as soon as ``--min-np`` slots are there, with all that are.

    For a job that is started again: the hosts it has lost may be gone for good, and as released the launcher waits for
    ``-np`` slots, by default for ten minutes, and gives up.

    Args:
        launch: the module ``horovod.runner.launch``.

    Raises:
        InstallationError: the launcher has other arguments.
    """
    _require(
        {"num_proc", "min_num_proc"} <= set(_names_in(getattr(launch, "_run_elastic", None))),
        "_run_elastic() in horovod.runner.launch does not read num_proc and min_num_proc",
    )

    def lower(args: Any) -> None:
        args.num_proc = args.min_num_proc or args.num_proc

    _before_elastic(launch, lower)


#: What the driver that takes the place of Horovod's overrides or calls, by the method that has to use it.
DRIVEN = {
    "start": {"_activate_workers"},
    "_activate_workers": {"wait_for_available_slots", "_update_host_assignments", "_start_worker_processes"},
    "_start_worker_process": {"get_host_event", "_host_manager", "expect"},
    "_handle_worker_exit": {"_worker_registry", "record_failure", "record_success"},
    "_update_host_assignments": {"_host_assignments", "_get_host_assignments"},
    "register_worker_server": {"_worker_clients"},
}


def drive_with(gloo_run: Any, made: Callable[..., Any]) -> None:
    """Have an elastic job run by another driver: one that starts workers again on hosts that come back.

    Args:
        gloo_run: the module ``horovod.runner.gloo_run``.
        made: makes it, from the arguments of Horovod's ``ElasticDriver``.

    Raises:
        InstallationError: Horovod's driver works in another way.
    """
    driver = getattr(gloo_run, "ElasticDriver", None)
    _require(
        "ElasticDriver" in _names_in(getattr(gloo_run, "launch_gloo_elastic", None))
        and all(used <= set(_names_in(getattr(driver, method, None))) for method, used in DRIVEN.items()),
        "ElasticDriver in horovod.runner.gloo_run does not form groups and start workers as it did",
    )
    gloo_run.ElasticDriver = made


def _before_elastic(launch: Any, change: Callable[[Any], None]) -> None:
    """Have something done with the parsed arguments before an elastic job runs."""
    _require(
        "_run_elastic" in _names_in(getattr(launch, "_run", None)),
        "_run() in horovod.runner.launch does not call _run_elastic()",
    )
    original = launch._run_elastic

    @functools.wraps(original)
    def run_elastic(args: Any) -> Any:
        change(args)
        return original(args)

    launch._run_elastic = run_elastic


def _names_in(function: Any) -> tuple[str, ...]:
    """Globals and attributes that a function uses, itself and not one around it; none if it is no function."""
    inner = inspect.unwrap(function) if callable(function) else None
    code = getattr(inner, "__code__", None)
    return code.co_names if code is not None else ()


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise InstallationError(
            f"horovod-ft run mends the launcher of Horovod {HOROVOD}, and cannot do so with the installed one, "
            f"Horovod {metadata.version('horovod')}: {otherwise}. Use horovodrun as it is, or install Horovod {HOROVOD}"
        )
