"""Hosts that come back: as Horovod's driver was released, and mended. Its processes, hosts and clock are pretended."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("horovod.runner.elastic.driver")

from horovod.runner.elastic import discovery
from horovod.runner.elastic import driver as released

from horovod_ft.agent.launcher import driver as mended
from horovod_ft.agent.launcher.driver import Driver

BOUND_S = 10.0
LOST, DONE = 137, 0


class Process:
    """A worker's process, which runs until the test ends it, whatever the driver asks of it."""

    def __init__(self, slot: str) -> None:
        self.slot = slot
        self.end: Future[int] = Future()


class Job:
    """A driver with three workers on hosts a, b and c, of which all are needed.

    Attributes:
        hosts: what discovery lists.
        processes: all that were started, the oldest first.
        formed: set when the driver has formed a group after the first.
    """

    def __init__(self, kind: Callable[..., Any], hosts: dict[str, int], min_np: int) -> None:
        self.hosts = hosts
        self.processes: list[Process] = []
        self.formed = threading.Event()
        self._began = threading.Condition()
        self._reports = ThreadPoolExecutor()
        self._failed: queue.Queue[str] = queue.Queue()
        self._heeded: queue.Queue[str] = queue.Queue()
        self.driver = kind(
            self, SimpleNamespace(find_available_hosts_and_slots=lambda: dict(self.hosts)),
            min_num_proc=min_np, max_num_proc=min_np, timeout=BOUND_S, cooldown_range=(1, 2),
        )  # fmt: skip
        self._tell_apart()
        self.driver.wait_for_available_slots(min_np)
        self.driver.start(min_np, self._run)
        self.wait_for(min_np)
        self.formed.clear()

    def _tell_apart(self) -> None:
        """Have the driver tell when it has failed a host, and when it is through with the end of a worker."""
        hosts, heed = self.driver._host_manager, self.driver._handle_worker_exit
        blacklist = hosts.blacklist

        def fail(host: str) -> None:
            blacklist(host)
            self._failed.put(host)

        def heed_end(slot_info: Any, status: int, moment: float) -> None:
            heed(slot_info, status, moment)
            self._heeded.put(f"{slot_info.hostname}{slot_info.local_rank}")

        hosts.blacklist = fail
        self.driver._handle_worker_exit = heed_end

    def _run(self, slot_info: Any, events: Any) -> tuple[int, float]:
        process = Process(f"{slot_info.hostname}{slot_info.local_rank}")
        with self._began:
            self.processes.append(process)
            self._began.notify_all()
        return process.end.result(), 0.0

    # --- as a rendezvous server ------------------------------------------------------------------------------------

    def init(self, _: Any) -> None:
        self.formed.set()

    def stop(self) -> None:
        """There is no server."""

    # --- what a test makes happen ----------------------------------------------------------------------------------

    def ready(self, *slots: str) -> list[Future[None]]:
        """Workers ask for their new ranks. Each waits until all have reported and the driver has formed the group."""
        return [self._reports.submit(self.driver.record_ready, slot[0], int(slot[1])) for slot in slots]

    def end(self, slot: str, status: int) -> None:
        """The newest process of the slot ends."""
        [process for process in self.processes if process.slot == slot][-1].end.set_result(status)

    def wait_for(self, count: int) -> list[str]:
        """Wait until so many have been started. Returns the slots of all."""
        with self._began:
            assert self._began.wait_for(lambda: len(self.processes) >= count, BOUND_S), self.slots()
        return self.slots()

    def wait_until_failed(self, host: str) -> None:
        while self._failed.get(timeout=BOUND_S) != host:
            pass

    def wait_until_heeded(self, slot: str) -> None:
        """The driver has done what it does when a worker ends."""
        while self._heeded.get(timeout=BOUND_S) != slot:
            pass

    def slots(self) -> list[str]:
        return sorted(process.slot for process in self.processes)

    def rank(self, slot: str) -> int:
        return int(self.driver.get_slot_info(slot[0], int(slot[1])).rank)

    def failures(self) -> int:
        return int(self.driver._worker_registry.count("FAILURE"))

    def close(self) -> None:
        for process in self.processes:
            if not process.end.done():
                process.end.set_result(LOST)
        if not self.driver.finished():
            self.driver.stop()
        self._reports.shutdown(cancel_futures=True)


Made = Callable[..., Job]


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """Each look at the clock takes half a second, so that a cooldown is over after a few of them."""
    clock = itertools.count(1000)
    monkeypatch.setattr(discovery, "time", SimpleNamespace(time=lambda: next(clock) / 2))
    monkeypatch.setattr(released, "DISCOVER_HOSTS_FREQUENCY_SECS", 0.001)
    jobs: list[Job] = []

    def make(kind: Callable[..., Any] = Driver, min_np: int = 3, **hosts: int) -> Job:
        jobs.append(Job(kind, hosts or {"a": 1, "b": 1, "c": 1}, min_np))
        return jobs[-1]

    yield make
    for made in jobs:
        made.close()


def done(reports: list[Future[None]]) -> None:
    for report in reports:
        report.result(BOUND_S)


# --- a host that comes back while the driver waits for it ----------------------------------------------------------


def test_as_released_its_worker_is_not_started_again(job: Made) -> None:
    one = job(released.ElasticDriver)
    one.end("a0", LOST)
    done(one.ready("b0", "c0"))
    assert one.rank("a0") == 2
    assert one.slots() == ["a0", "b0", "c0"]


def test_mended_it_is_and_it_comes_last(job: Made) -> None:
    one = job()
    one.end("a0", LOST)
    done(one.ready("b0", "c0"))
    assert one.wait_for(4) == ["a0", "a0", "b0", "c0"]
    assert one.rank("a0") == 2


def test_again_and_again(job: Made) -> None:
    one = job()
    for count in (4, 5, 6):
        one.end("a0", LOST)
        done(one.ready("b0", "c0"))
        one.wait_for(count)
    assert one.slots() == ["a0"] * 4 + ["b0", "c0"]


def test_a_host_that_is_new_gets_its_workers_as_ever(job: Made) -> None:
    one = job()
    one.hosts["d"] = one.hosts.pop("a")
    one.end("a0", LOST)
    done(one.ready("b0", "c0"))
    assert one.wait_for(4) == ["a0", "b0", "c0", "d0"]


# --- old processes -------------------------------------------------------------------------------------------------


def test_all_workers_of_the_host_are_started_again_once_the_old_ones_have_ended(job: Made) -> None:
    one = job(a=2, b=1)
    one.end("a0", LOST)
    reports = one.ready("a1", "b0")
    assert one.formed.wait(BOUND_S)
    assert one.slots() == ["a0", "a1", "b0"]
    one.end("a1", LOST)
    done(reports)
    assert one.wait_for(5) == ["a0", "a0", "a1", "a1", "b0"]


def test_the_end_of_an_old_one_is_no_failure_of_the_new_one(job: Made) -> None:
    one = job(a=2, b=1)
    one.end("a0", LOST)
    reports = one.ready("a1", "b0")
    assert one.formed.wait(BOUND_S)
    one.end("a1", LOST)
    done(reports)
    one.wait_for(5)
    one.wait_until_heeded("a1")
    assert one.failures() == 0


def test_an_old_one_that_does_not_end_is_not_waited_for_without_end(
    job: Made, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mended, "ENDING_S", 0.01)
    one = job(a=2, b=1)
    one.end("a0", LOST)
    done(one.ready("a1", "b0"))
    assert one.wait_for(5) == ["a0", "a0", "a1", "a1", "b0"]
    assert "has not ended" in caplog.text


# --- while the driver waits for slots ------------------------------------------------------------------------------


def waiting(one: Job) -> list[Future[None]]:
    """Host a has failed and is away; workers b0 and c0 wait for their new ranks."""
    del one.hosts["a"]
    one.end("a0", LOST)
    reports = one.ready("b0", "c0")
    one.wait_until_failed("a")
    return reports


def waiting_alone(one: Job) -> list[Future[None]]:
    """Host a has failed and is away; worker b0 waits for its new rank."""
    del one.hosts["a"]
    one.end("a0", LOST)
    reports = one.ready("b0")
    one.wait_until_failed("a")
    return reports


def lose(one: Job, slot: str, status: int = LOST) -> None:
    one.end(slot, status)
    assert one.driver._workers[slot[0], int(slot[1])].ended.wait(BOUND_S)


def test_a_worker_that_fails_is_started_again_too(job: Made) -> None:
    one = job()
    reports = waiting(one)
    lose(one, "c0")
    one.hosts["a"] = 1
    done(reports)
    assert one.wait_for(5) == ["a0", "a0", "b0", "c0", "c0"]
    one.wait_until_heeded("c0")
    assert one.failures() == 0


def test_who_has_the_state_of_the_training_gets_rank_0(job: Made) -> None:
    one = job()
    first, second = sorted(["b0", "c0"], key=one.rank)
    reports = waiting(one)
    lose(one, first)
    one.hosts["a"] = 1
    done(reports)
    assert one.rank(second) == 0


def test_a_job_without_anybody_who_has_it_ends(job: Made) -> None:
    one = job(min_np=2, a=1, b=1)
    reports = waiting_alone(one)
    lose(one, "b0")
    one.hosts["a"] = 1
    done(reports)
    assert one.driver.finished()
    assert one.slots() == ["a0", "b0"]


def test_a_job_whose_last_worker_fails_ends_at_once(job: Made) -> None:
    """No host ever comes: nobody would have the state of the training there."""
    one = job()
    reports = waiting(one)
    lose(one, "c0")
    lose(one, "b0")
    done(reports)
    assert one.driver.finished()
    assert one.slots() == ["a0", "b0", "c0"]


def test_a_job_that_nobody_is_left_of_has_failed_with_what_ended_its_workers(job: Made) -> None:
    """Horovod takes a job without any result for one that has succeeded."""
    one = job()
    reports = waiting(one)
    lose(one, "c0")
    lose(one, "b0", 134)
    done(reports)
    results = one.driver.get_results().worker_results
    assert {name: status for name, (status, _) in results.items()} == {"a[0]": LOST, "b[0]": 134, "c[0]": LOST}


def test_so_has_one_whose_hosts_have_all_come_back(job: Made) -> None:
    one = job(min_np=2, a=1, b=1)
    reports = waiting_alone(one)
    one.end("b0", LOST)
    one.hosts["a"] = 1
    done(reports)
    assert {status for status, _ in one.driver.get_results().worker_results.values()} == {LOST}


def test_a_worker_that_succeeds_ends_the_job(job: Made) -> None:
    one = job()
    reports = waiting(one)
    lose(one, "c0", DONE)
    one.hosts["a"] = 1
    done(reports)
    one.wait_for(4)
    one.ready("b0")
    one.end("a0", LOST)
    one.wait_until_heeded("c0")
    assert one.driver.finished()


# --- whom a notice reaches -----------------------------------------------------------------------------------------


def register(one: Job, *slots: str) -> None:
    for slot in slots:
        one.driver._worker_clients[slot[0], int(slot[1])] = slot


def test_running_workers_that_have_registered_listen(job: Made) -> None:
    one = job()
    register(one, "a0", "b0")
    assert sorted(one.driver.listeners()) == ["a0", "b0"]
    lose(one, "a0")
    assert one.driver.listeners() == ["b0"]


def test_a_new_worker_listens_only_when_it_has_registered_itself(job: Made) -> None:
    one = job()
    register(one, "a0", "b0")
    one.end("a0", LOST)
    done(one.ready("b0", "c0"))
    one.wait_for(4)
    assert one.driver.listeners() == ["b0"]
