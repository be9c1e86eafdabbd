"""Groups formed by horovodrun's driver: in which order Horovod is called, and that no announcement is lost."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("horovod.common.elastic")

from horovod_ft.membership import driver
from horovod_ft.membership.base import Group
from horovod_ft.membership.driver import DriverMembership, HostChanges
from horovod_ft.membership.notice import NO_TIME, PREEMPTED
from tests.unit.membership.fake_binding import FakeBinding, LostError


class FakeCutter:
    """Stands for the sockets of this process."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def forming(self) -> None:
        self._calls.append("forming")

    def formed(self) -> None:
        self._calls.append("formed")

    def cut(self) -> int:
        self._calls.append("cut")
        return 6


class Notifications:
    """Stands for Horovod's notification manager."""

    def __init__(self) -> None:
        self.listeners: list[Any] = []
        self.inits = 0

    def init(self) -> None:
        self.inits += 1

    def register_listener(self, listener: Any) -> None:
        self.listeners.append(listener)

    def remove_listener(self, listener: Any) -> None:
        self.listeners.remove(listener)

    def announce(self) -> None:
        for listener in self.listeners:
            listener.on_hosts_updated(12345, 1)

    def preempt(self) -> None:
        for listener in self.listeners:
            listener.on_hosts_updated(NO_TIME, PREEMPTED)


@pytest.fixture
def binding() -> FakeBinding:
    return FakeBinding(1, 3)


@pytest.fixture
def notifications(monkeypatch: pytest.MonkeyPatch) -> Notifications:
    fake = Notifications()
    monkeypatch.setattr(driver, "notification_manager", fake)
    return fake


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its one element is the present moment."""
    now = [100.0]
    monkeypatch.setattr(driver, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.fixture
def membership(
    binding: FakeBinding, notifications: Notifications, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> DriverMembership:
    @contextmanager
    def wait(what: str, timeout_s: float) -> Iterator[None]:
        binding.calls.append(f"wait {timeout_s:.0f}")
        yield

    monkeypatch.setattr(driver, "explained_wait", wait)
    monkeypatch.setattr(driver, "SocketCutter", lambda: FakeCutter(binding.calls))
    return DriverMembership(binding, timeout_s=30)


def test_starting_records_the_sockets_that_the_group_brings(membership: DriverMembership, binding: FakeBinding) -> None:
    assert membership.start() == membership.group == Group(1, 3)
    assert binding.calls == ["forming", "init", "formed"]


def test_a_failure_cuts_the_groups_sockets(membership: DriverMembership, binding: FakeBinding) -> None:
    membership.start()
    assert membership.abort() == 6
    assert binding.calls[-1] == "cut"


def test_reforming_leaves_the_old_group_and_waits_with_a_bound_for_the_new(
    membership: DriverMembership, binding: FakeBinding
) -> None:
    membership.start()
    binding.calls.clear()
    binding.place = (0, 2)
    assert membership.reform() == Group(0, 2)
    assert binding.calls == ["shutdown", "wait 30", "forming", "init", "formed"]


def test_the_generation_stays_until_the_members_have_agreed(membership: DriverMembership) -> None:
    membership.start()
    membership.adopt_generation(4)
    assert membership.reform().generation == 4
    membership.adopt_generation(5)
    assert membership.group.generation == 5


def test_a_group_that_cannot_form_is_a_failure_as_any_other(membership: DriverMembership, binding: FakeBinding) -> None:
    def fail() -> None:
        raise LostError

    membership.start()
    binding.during_init = fail
    with pytest.raises(LostError):
        membership.reform()


# --- announcements -------------------------------------------------------------------------------------------------


def test_it_listens_once_it_watches(membership: DriverMembership, notifications: Notifications) -> None:
    membership.start()
    assert not membership.changed()
    membership.watch()
    membership.watch()
    assert (notifications.inits, len(notifications.listeners)) == (1, 1)
    notifications.announce()
    assert membership.changed()


def test_an_announcement_that_came_before_the_group_formed_is_dealt_with_by_it(
    membership: DriverMembership, notifications: Notifications, clock: list[float]
) -> None:
    membership.watch()
    notifications.announce()
    clock[0] += 1
    membership.reform()
    assert not membership.changed()


def test_an_announcement_that_comes_while_the_group_forms_is_kept(
    membership: DriverMembership, notifications: Notifications, binding: FakeBinding, clock: list[float]
) -> None:
    membership.watch()

    def announce() -> None:
        clock[0] += 1
        notifications.announce()

    binding.during_init = announce
    membership.reform()
    assert membership.changed()


def test_an_announcement_is_kept_until_a_group_has_formed(membership: DriverMembership) -> None:
    changes = HostChanges()
    changes.on_hosts_updated(0, 1)
    changes.forget_before(100.0)
    assert changes.pending()
    changes.forget_before(100.5)
    assert not changes.pending()


def test_stopping_leaves_the_group_and_listens_no_more(
    membership: DriverMembership, notifications: Notifications, binding: FakeBinding
) -> None:
    membership.start()
    membership.watch()
    membership.stop()
    assert notifications.listeners == []
    assert binding.calls[-1] == "shutdown"


# --- a notice that the job is about to be ended ----------------------------------------------------------------------


def test_a_notice_is_no_change_of_hosts(membership: DriverMembership, notifications: Notifications) -> None:
    membership.watch()
    assert not membership.preempted()
    notifications.preempt()
    assert membership.preempted()
    assert not membership.changed()


def test_a_change_of_hosts_is_no_notice(membership: DriverMembership, notifications: Notifications) -> None:
    membership.watch()
    notifications.announce()
    assert not membership.preempted()


def test_a_notice_outlives_the_group(
    membership: DriverMembership, notifications: Notifications, clock: list[float]
) -> None:
    membership.watch()
    notifications.preempt()
    clock[0] += 1
    membership.reform()
    assert membership.preempted()


def test_horovod_sends_no_such_result_itself() -> None:
    worker = importlib.import_module("horovod.runner.elastic.worker")
    assert max(worker.HostUpdateResult) < PREEMPTED


def test_a_state_of_horovods_own_passes_over_a_notice() -> None:
    elastic = importlib.import_module("horovod.common.elastic")
    state = elastic.ObjectState(lambda value, **_: value, lambda: 0)
    state.on_hosts_updated(NO_TIME, PREEMPTED)
    state.check_host_updates()
    state.on_hosts_updated(1, 1)
    with pytest.raises(elastic.HostsUpdatedInterrupt):
        state.check_host_updates()
