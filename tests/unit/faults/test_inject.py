"""Faults happen once, at their moment, on their worker, and are on record before they do."""

from __future__ import annotations

import signal
import subprocess
from typing import Any

import pytest

from horovod_ft.events import Event, EventBus
from horovod_ft.faults import inject
from horovod_ft.faults.inject import FaultInjected, Injector
from horovod_ft.faults.plan import Fault


class Bench:
    """An injector of worker 1 on host ``a``, and what it did, in order."""

    def __init__(self, *faults: Fault) -> None:
        self.did: list[Any] = []
        bus = EventBus("a:1:7")
        bus.subscribe(self._record)
        self.injector = Injector(
            faults, 1, "a", bus, send=self.did.append, sleep=lambda seconds: self.did.append(f"slept {seconds}")
        )

    def _record(self, event: Event) -> None:
        self.did.append((event.kind, event.data["fault"]))


KILL = Fault("data", worker=1, step=3)
ON_RECORD = ("fault", str(KILL))


def test_a_kill_is_on_record_before_it_happens() -> None:
    bench = Bench(KILL)
    bench.injector.at("data", 3)
    assert bench.did == [ON_RECORD, signal.SIGKILL]


@pytest.mark.parametrize(("phase", "step"), [("data", 2), ("data", 4), ("forward", 3)])
def test_at_any_other_moment_nothing_happens(phase: Any, step: int) -> None:
    bench = Bench(KILL)
    bench.injector.at(phase, step)
    assert bench.did == []


def test_a_fault_happens_once() -> None:
    bench = Bench(KILL)
    bench.injector.at("data", 3)
    bench.injector.at("data", 3)
    assert bench.did == [ON_RECORD, signal.SIGKILL]
    assert bench.injector.waiting == []


def test_faults_of_other_workers_are_not_waited_for() -> None:
    assert Bench(Fault("data", worker=0), Fault("data", host="b")).injector.waiting == []


def test_of_two_faults_at_one_moment_the_first_comes_first() -> None:
    slow = Fault("data", worker=1, step=3, kind="slow", seconds=2.0)
    bench = Bench(slow, KILL)
    bench.injector.at("data", 3)
    assert bench.injector.waiting == [KILL]


def test_a_slow_worker_sleeps_and_goes_on() -> None:
    bench = Bench(Fault("data", worker=1, kind="slow", seconds=2.5))
    bench.injector.at("data", 1)
    assert bench.did[-1] == "slept 2.5"


def test_an_exception_says_that_it_was_asked_for() -> None:
    bench = Bench(Fault("optimizer", worker=1, kind="exception"))
    with pytest.raises(FaultInjected, match="asked for by the fault plan: exception worker 1 at step 1 in optimizer"):
        bench.injector.at("optimizer", 1)


def test_a_worker_that_is_stopped_for_good_gets_one_signal() -> None:
    bench = Bench(Fault("data", worker=1, kind="stop"))
    bench.injector.at("data", 1)
    assert bench.did[-1] == signal.SIGSTOP


def test_a_worker_that_is_stopped_for_a_time_is_woken_by_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(inject, "subprocess", subprocess)
    monkeypatch.setattr(subprocess, "Popen", lambda command, **more: started.append(command))
    bench = Bench(Fault("data", worker=1, kind="stop", seconds=1.5))
    bench.injector.at("data", 1)
    assert started[0][2].startswith("sleep 1.5; kill -CONT ")
    assert bench.did[-1] == signal.SIGSTOP


def test_a_fault_that_is_due_can_be_looked_at_first() -> None:
    bench = Bench(KILL)
    assert bench.injector.pending("data", 3) == KILL
    assert bench.did == []


@pytest.mark.parametrize("phase", ["reform", "agreement", "transfer"])
def test_a_fault_in_a_recovery_comes_with_the_first_recovery_from_its_step_on(phase: Any) -> None:
    bench = Bench(Fault(phase, worker=1, step=3))
    bench.injector.at(phase, 2)
    assert bench.did == []
    bench.injector.at(phase, 5)
    assert bench.did[-1] == signal.SIGKILL


def test_sync_is_another_name_for_the_agreement() -> None:
    bench = Bench(Fault("sync", worker=1))
    bench.injector.at("agreement", 1)
    assert bench.did[-1] == signal.SIGKILL
