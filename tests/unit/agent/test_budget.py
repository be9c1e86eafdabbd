"""Restarts are counted within a span of time, pauses double up to a bound, and a budget that is spent says so."""

from __future__ import annotations

import pytest

from horovod_ft.agent.budget import Budget


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def made(clock: Clock, restarts: int = 3, pause_s: float = 1.0, longest_pause_s: float = 60.0) -> Budget:
    return Budget(restarts, within_s=100.0, pause_s=pause_s, longest_pause_s=longest_pause_s, mono=clock)


def test_so_many_and_no_more(clock: Clock) -> None:
    budget = made(clock)
    assert [budget.take() is None for _ in range(5)] == [False, False, False, True, True]


def test_none_at_all(clock: Clock) -> None:
    assert made(clock, restarts=0).take() is None


def test_pauses_double(clock: Clock) -> None:
    budget = made(clock, restarts=4, pause_s=1.5)
    assert [budget.take() for _ in range(4)] == [1.5, 3.0, 6.0, 12.0]


def test_up_to_a_bound(clock: Clock) -> None:
    budget = made(clock, restarts=2000, longest_pause_s=5.0)
    pauses = [budget.take() for _ in range(1030)]  # 2.0 ** 1024 is more than a float holds
    assert pauses[:5] == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert pauses[-1] == 5.0


def test_a_bound_below_the_first_pause_counts(clock: Clock) -> None:
    assert made(clock, pause_s=10.0, longest_pause_s=2.0).take() == 2.0


def test_restarts_long_ago_are_forgotten(clock: Clock) -> None:
    budget = made(clock, restarts=2)
    budget.take()
    clock.now += 60
    budget.take()
    clock.now += 39.9
    assert budget.take() is None
    clock.now += 0.1  # the first is 100 s ago
    assert budget.used == 1
    assert budget.take() == 2.0
    assert budget.take() is None


def test_what_was_refused_does_not_count(clock: Clock) -> None:
    budget = made(clock, restarts=1)
    budget.take()
    budget.take()
    assert budget.used == 1
