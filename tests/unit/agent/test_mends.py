"""Each mend does what it says, to Horovod's launcher as installed, and refuses one that is made in another way."""

from __future__ import annotations

import importlib
import multiprocessing.process
import socket
import struct
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest

from horovod_ft.agent.launcher import mends
from horovod_ft.errors import InstallationError


def copied(function: FunctionType, module: Any) -> FunctionType:
    """The same code with a copy of a module as its globals, so that nothing real is changed."""
    return FunctionType(function.__code__, module.__dict__, function.__name__, function.__defaults__)


def copy_of(name: str, *functions: str) -> Any:
    """A copy of a module, whose functions use what is in the copy."""
    original = importlib.import_module(name)
    copy = SimpleNamespace(**vars(original))
    for function in functions:
        setattr(copy, function, copied(getattr(original, function), copy))
    return copy


# --- the rendezvous server -----------------------------------------------------------------------------------------

#: Of struct tcp_info: for a listening socket the bound of its queue.
TCPI_SACKED = 28


def queue_of(listening: socket.socket) -> int:
    info = listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 64)
    (bound,) = struct.unpack_from("I", info, TCPI_SACKED)
    return int(bound)


@pytest.fixture
def http_server(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = importlib.import_module("horovod.runner.http.http_server")
    # Set and removed again after the test, whatever it has done.
    monkeypatch.setattr(module.RendezvousHTTPServer, "request_queue_size", 5, raising=False)
    return module


def served(http_server: Any) -> int:
    """The queue of a rendezvous server as the launcher makes it."""
    server = http_server.RendezvousServer()
    server.start()
    try:
        return queue_of(server._httpd.socket)
    finally:
        server.stop()
        server._httpd.server_close()


def test_as_released_the_server_keeps_five_connections_waiting(http_server: Any) -> None:
    assert served(http_server) == 5


def test_mended_it_keeps_as_many_as_the_kernel_allows(http_server: Any) -> None:
    mends.queue_connections(http_server)
    with open("/proc/sys/net/core/somaxconn") as limit:
        assert served(http_server) == min(mends.BACKLOG, int(limit.read()))


def test_a_longer_queue_is_left_alone(http_server: Any) -> None:
    http_server.RendezvousHTTPServer.request_queue_size = 5000
    mends.queue_connections(http_server)
    assert http_server.RendezvousHTTPServer.request_queue_size == 5000


# --- exit statuses -------------------------------------------------------------------------------------------------


class Ended:
    """A process as multiprocessing has it, which counts how often it is asked whether it has ended."""

    def __init__(self) -> None:
        self.asked = 0
        self._popen = self

    def poll(self) -> None:
        self.asked += 1


@pytest.mark.parametrize("mended", [False, True])
def test_an_ended_process_is_not_collected_when_another_one_starts(mended: bool) -> None:
    ended = Ended()
    process = copy_of("multiprocessing.process", "_cleanup")
    process._children = {ended}
    if mended:
        mends.keep_exit_statuses(process)
    process._cleanup()
    assert ended.asked == (0 if mended else 1)


# --- discovery -----------------------------------------------------------------------------------------------------


def test_the_pause_between_discoveries() -> None:
    driver = copy_of("horovod.runner.elastic.driver")
    assert driver.DISCOVER_HOSTS_FREQUENCY_SECS == 1.0
    mends.discover_every(driver, 0.2)
    assert driver.DISCOVER_HOSTS_FREQUENCY_SECS == 0.2


# --- the start of an elastic job -----------------------------------------------------------------------------------


class Launch:
    """``horovod.runner.launch`` with a run that only tells what it was given."""

    def __init__(self) -> None:
        self.module = copy_of("horovod.runner.launch", "_run")
        self.seen: list[tuple[int, bool]] = []
        self.asked = 0
        self.module.gloo_built = self._gloo_built
        self.module._run_elastic = self._run_elastic()

    def _gloo_built(self, verbose: bool = False) -> bool:
        self.asked += 1
        return False

    def _run_elastic(self) -> Callable[[Any], None]:
        """A function that uses the names that the real one uses."""
        launch = self.module

        def run_elastic(args: Any) -> None:
            _ = args.min_num_proc
            self.seen.append((args.num_proc, launch.gloo_built(verbose=False)))

        return run_elastic

    def run(self, np: int, min_np: int | None) -> None:
        args = SimpleNamespace(
            num_proc=np, min_num_proc=min_np, hosts="a:1,b:1", hostfile=None, host_discovery_script="hosts.sh"
        )
        self.module._run(args)


@pytest.fixture
def launch() -> Launch:
    return Launch()


def test_nobody_loads_frameworks_to_learn_of_gloo(launch: Launch) -> None:
    mends.take_gloo_for_granted(launch.module)
    launch.run(4, 2)
    assert (launch.seen, launch.asked) == ([(4, True)], 0)


def test_before_an_elastic_job_the_question_is_answered_as_ever(launch: Launch) -> None:
    mends.take_gloo_for_granted(launch.module)
    assert launch.module.gloo_built() is False
    assert launch.asked == 1


@pytest.mark.parametrize(("min_np", "begins_with"), [(2, 2), (None, 4)])
def test_a_restarted_job_begins_with_the_least(launch: Launch, min_np: int | None, begins_with: int) -> None:
    mends.start_with_least(launch.module)
    launch.run(4, min_np)
    assert launch.seen == [(begins_with, False)]


def test_both_together(launch: Launch) -> None:
    mends.take_gloo_for_granted(launch.module)
    mends.start_with_least(launch.module)
    launch.run(4, 1)
    assert launch.seen == [(1, True)]


# --- the driver ----------------------------------------------------------------------------------------------------


def test_an_elastic_job_is_run_by_the_driver_that_is_given() -> None:
    gloo_run = copy_of("horovod.runner.gloo_run", "launch_gloo_elastic")

    class Made(Exception):  # noqa: N818  the driver has been made, and that is all of it
        pass

    def made(rendezvous: object, discovery: object, *slots: int, **options: object) -> None:
        raise Made(slots)

    mends.drive_with(gloo_run, made)
    settings = SimpleNamespace(
        output_filename=None, discovery=None, min_num_proc=2, max_num_proc=4, elastic_timeout=60, reset_limit=None,
        cooldown_range=None, verbose=0,
    )  # fmt: skip
    with pytest.raises(Made, match=r"2, 4"):
        gloo_run.launch_gloo_elastic([], None, settings, {}, None, None, None)


# --- the launcher as installed, and others -------------------------------------------------------------------------

MENDS: list[tuple[Callable[[Any], None], str]] = [
    (mends.queue_connections, "horovod.runner.http.http_server"),
    (mends.keep_exit_statuses, "multiprocessing.process"),
    (lambda module: mends.discover_every(module, 1.0), "horovod.runner.elastic.driver"),
    (mends.take_gloo_for_granted, "horovod.runner.launch"),
    (mends.start_with_least, "horovod.runner.launch"),
    (lambda module: mends.drive_with(module, object), "horovod.runner.gloo_run"),
]


@pytest.mark.parametrize(("mend", "name"), MENDS[1:])
def test_the_installed_launcher_can_be_mended(mend: Callable[[Any], None], name: str) -> None:
    mend(copy_of(name))


@pytest.mark.parametrize(("mend", "name"), MENDS)
def test_a_launcher_without_it_is_refused(mend: Callable[[Any], None], name: str) -> None:
    with pytest.raises(InstallationError, match=r"Horovod 0\.28\.1.*: .*\. Use horovodrun as it is"):
        mend(SimpleNamespace())


class Otherwise:
    """Names that are there, in functions that do not use them."""

    DISCOVER_HOSTS_FREQUENCY_SECS = 1.0
    RendezvousHTTPServer = object

    class BaseProcess:
        def start(self) -> None:
            """Collects nothing."""

    class ElasticDriver:
        def _discover_hosts(self) -> None:
            """Waits for nothing."""

        def start(self) -> None:
            """Starts nothing."""

    @staticmethod
    def launch_gloo_elastic() -> None: ...

    @staticmethod
    def _cleanup() -> None: ...

    @staticmethod
    def gloo_built(verbose: bool = False) -> bool:
        return verbose

    @staticmethod
    def _run(args: Any) -> None: ...

    @staticmethod
    def _run_elastic(args: Any) -> None: ...


@pytest.mark.parametrize(("mend", "name"), MENDS)
def test_a_launcher_that_does_it_in_another_way_is_refused(mend: Callable[[Any], None], name: str) -> None:
    with pytest.raises(InstallationError, match="Use horovodrun as it is"):
        mend(Otherwise)


def test_a_launcher_whose_elastic_jobs_start_in_another_way_is_refused() -> None:
    launch = copy_of("horovod.runner.launch")
    launch._run = Otherwise._run
    with pytest.raises(InstallationError, match="does not call _run_elastic"):
        mends.start_with_least(launch)


def test_nothing_of_the_above_has_changed_python() -> None:
    assert multiprocessing.process._cleanup.__module__ == "multiprocessing.process"  # type: ignore[attr-defined]
