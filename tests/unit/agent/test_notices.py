"""A notice that the job will be ended: the line to the launcher's process, and from there to the workers."""

from __future__ import annotations

import importlib
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from horovod_ft.agent.launcher.notices import answer, tell
from horovod_ft.agent.notice import Notice
from horovod_ft.membership.notice import NO_TIME, PREEMPTED

BOUND_S = 10.0


class Client:
    """Stands for Horovod's client of one worker: remembers what it has told, or fails or hangs instead."""

    def __init__(self, instead: Callable[[], object] = lambda: None) -> None:
        self.told: list[tuple[int, int]] = []
        self._instead = instead

    def notify_hosts_updated(self, timestamp: int, result: int) -> None:
        self._instead()
        self.told.append((timestamp, result))


def refused() -> None:
    raise ConnectionRefusedError


@pytest.fixture
def hung() -> Iterator[Client]:
    """One that hangs until the test is over."""
    over = threading.Event()
    yield Client(lambda: over.wait(BOUND_S))
    over.set()


# --- to the workers ------------------------------------------------------------------------------------------------


def test_a_worker_is_told_once() -> None:
    client = Client()
    assert tell([client], BOUND_S)
    assert client.told == [(NO_TIME, PREEMPTED)]


def test_nobody_is_there() -> None:
    assert not tell([], BOUND_S)


def test_nobody_answers() -> None:
    assert not tell([Client(refused), Client(refused)], BOUND_S)


def test_one_of_them_is_enough(hung: Client) -> None:
    assert tell([Client(refused), hung, Client()], BOUND_S)


def test_one_that_hangs_is_not_waited_for_without_end(hung: Client) -> None:
    assert not tell([hung], 0.01)


def test_the_others_are_told_although_one_hangs(hung: Client) -> None:
    told = threading.Semaphore(0)
    clients = [hung, Client(told.release), Client(told.release)]
    tell(clients, BOUND_S)
    assert all(told.acquire(timeout=BOUND_S) for _ in range(2))


def test_through_horovods_own_service() -> None:
    worker = importlib.import_module("horovod.runner.elastic.worker")
    heard: list[tuple[int, int]] = []
    manager = SimpleNamespace(handle_hosts_updated=lambda timestamp, result: heard.append((timestamp, result)))
    service = worker.WorkerNotificationService(b"key", "lo", manager)
    try:
        client = worker.WorkerNotificationClient(service.addresses(), b"key", 0)
        assert tell([client], BOUND_S)
        assert heard == [(NO_TIME, PREEMPTED)]
    finally:
        service.shutdown()


# --- the line ------------------------------------------------------------------------------------------------------

Line = Callable[[Sequence[Any]], Notice]


@pytest.fixture
def line() -> Iterator[Line]:
    """A notice whose other end is answered for these clients."""
    notices: list[Notice] = []
    threads: list[threading.Thread] = []

    def make(clients: Sequence[Any]) -> Notice:
        notice = Notice(signal.SIGTERM)
        threads.append(answer(socket.socket(fileno=socket.dup(notice.theirs)), lambda: clients))
        notice.handed_over()
        notices.append(notice)
        return notice

    yield make
    for notice in notices:
        notice.__exit__()
    for thread in threads:
        thread.join(BOUND_S)
        assert not thread.is_alive()


def answered(notice: Notice) -> bool | None:
    assert select.select([notice], [], [], BOUND_S)[0]
    assert notice.answered()
    return notice.told


@pytest.mark.parametrize(("clients", "heard"), [([Client()], True), ([Client(refused)], False), ([], False)])
def test_an_answer_says_whether_anybody_was_told(line: Line, clients: Sequence[Client], heard: bool) -> None:
    notice = line(clients)
    assert not notice.answered()
    notice.ask()
    assert answered(notice) is heard


def test_a_launcher_that_has_ended_tells_nobody() -> None:
    with Notice(signal.SIGTERM) as notice:
        notice.handed_over()
        notice.ask()
        assert answered(notice) is False


def test_one_that_does_not_answer_is_not_waited_for() -> None:
    with Notice(signal.SIGTERM) as notice:
        notice.ask()
        assert not notice.answered()
