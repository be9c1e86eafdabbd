"""A group that never changes."""

from __future__ import annotations

import pytest

from horovod_ft.errors import RecoveryError
from horovod_ft.membership.base import Group
from horovod_ft.membership.static import StaticMembership
from tests.unit.membership.fake_binding import FakeBinding


@pytest.fixture
def binding() -> FakeBinding:
    return FakeBinding(2, 4)


@pytest.fixture
def membership(binding: FakeBinding) -> StaticMembership:
    return StaticMembership(binding)


def test_starting_joins_the_launchers_group(membership: StaticMembership, binding: FakeBinding) -> None:
    assert membership.start() == membership.group == Group(2, 4)
    assert binding.calls == ["init"]


def test_collectives_and_failures_are_the_bindings(membership: StaticMembership, binding: FakeBinding) -> None:
    assert membership.comm is binding
    assert membership.failure_types == binding.failure_types


def test_it_never_hears_of_changes(membership: StaticMembership) -> None:
    membership.watch()
    assert not membership.changed()
    assert not membership.preempted()


def test_a_failure_ends_the_job_with_the_command_that_survives_one(membership: StaticMembership) -> None:
    membership.start()
    assert membership.abort() == 0
    with pytest.raises(RecoveryError, match=r"not started in elastic mode. Start it with horovodrun --min-np"):
        membership.reform()


def test_the_generation_is_the_members(membership: StaticMembership) -> None:
    membership.start()
    membership.adopt_generation(3)
    assert membership.group == Group(2, 4, 3)


def test_stopping_leaves_the_group(membership: StaticMembership, binding: FakeBinding) -> None:
    membership.start()
    membership.stop()
    assert binding.calls == ["init", "shutdown"]
