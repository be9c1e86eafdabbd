"""When the next save is due. The clock is a number that a test sets."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_ft.checkpoint.schedule import Schedule, best_interval_s, mtbf_s, parse_every
from horovod_ft.errors import ConfigurationError

HOUR = 3600.0

# --- the best interval ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mtbf_h", "minutes"), [(24.0, 117), (6.0, 57), (0.25, 9.1)])
def test_it_is_what_daly_predicts_for_a_cost_of_five_minutes(mtbf_h: float, minutes: float) -> None:
    """The three values are those of figures 3 to 5 of the paper."""
    found = best_interval_s(5 * 60, mtbf_h * HOUR) / 60
    assert found == pytest.approx(minutes, abs=0.5 if minutes > 10 else 0.05)


def lost(interval_s: float, cost_s: float, mtbf_s: float) -> float:
    """Time to solution per second of work, from Daly's complete model (without the constant time of a restart)."""
    return mtbf_s * math.expm1((interval_s + cost_s) / mtbf_s) / interval_s


@given(st.floats(1e-3, 0.3), st.floats(10.0, 1e7))
def test_no_other_interval_loses_much_less(part: float, mtbf: float) -> None:
    cost = part * mtbf
    best = lost(best_interval_s(cost, mtbf), cost, mtbf)
    assert all(best <= 1.001 * lost(best_interval_s(cost, mtbf) * factor, cost, mtbf) for factor in (0.5, 0.8, 1.25, 2))


def test_for_a_small_cost_it_is_the_first_order_form() -> None:
    assert best_interval_s(1e-3, 1e6) == pytest.approx(math.sqrt(2 * 1e-3 * 1e6), rel=1e-3)


def test_a_cost_beyond_reason_gives_the_mean_time_between_failures() -> None:
    assert best_interval_s(20.0, 10.0) == 10.0
    assert best_interval_s(1000.0, 10.0) == 10.0


# --- the mean time between failures --------------------------------------------------------------------------------


def test_before_anything_is_seen_it_is_the_prior() -> None:
    assert mtbf_s(0.0, 0, prior_s=500.0) == 500.0


def test_time_without_failures_raises_it_and_a_failure_lowers_it() -> None:
    assert mtbf_s(1000.0, 0, prior_s=500.0) == 1500.0
    assert mtbf_s(1000.0, 2, prior_s=500.0) == 500.0


def test_with_much_seen_the_prior_does_not_matter() -> None:
    assert mtbf_s(1e6, 1000, prior_s=10.0) == pytest.approx(mtbf_s(1e6, 1000, prior_s=10_000.0), rel=0.02)


# --- every ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", ["car", 0, -5, 0.0, -1.0, math.inf, math.nan, True, None, "5"])
def test_what_is_no_schedule_is_refused(every: Any) -> None:
    with pytest.raises(ConfigurationError, match="every is"):
        parse_every(every)


@pytest.mark.parametrize("name", ["prior_mtbf_s", "prior_cost_s"])
def test_a_prior_is_positive(name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        Schedule(step=0, now=0.0, **{name: 0.0})


# --- by steps ------------------------------------------------------------------------------------------------------


def due_steps(schedule: Schedule, steps: range) -> list[int]:
    """Steps of one second at which it saves at once."""
    found = []
    for step in steps:
        if schedule.due(step, float(step)):
            found.append(step)
            schedule.saved(step, float(step), 0.0)
    return found


def test_steps_are_counted_from_the_first() -> None:
    assert due_steps(Schedule(10, step=0, now=0.0), range(1, 35)) == [10, 20, 30]


def test_a_run_that_was_restored_saves_at_the_same_steps() -> None:
    assert due_steps(Schedule(10, step=17, now=17.0), range(18, 35)) == [20, 30]


def test_a_save_that_comes_late_does_not_shift_the_others() -> None:
    schedule = Schedule(10, step=0, now=0.0)
    schedule.saved(13, 13.0, 0.0)
    assert due_steps(schedule, range(14, 35)) == [20, 30]


def test_a_save_that_was_missed_is_due_at_the_next_step() -> None:
    assert Schedule(10, step=0, now=0.0).due(11, 11.0)


def test_after_going_back_the_same_steps_are_due_again() -> None:
    schedule = Schedule(10, step=0, now=0.0)
    assert due_steps(schedule, range(1, 25)) == [10, 20]
    schedule.restored(10, 25.0)
    assert due_steps(schedule, range(11, 25)) == [20]


# --- by seconds ----------------------------------------------------------------------------------------------------


def test_seconds_count_from_the_last_save() -> None:
    schedule = Schedule(60.0, step=0, now=100.0)
    assert not schedule.due(1, 159.9)
    assert schedule.due(2, 160.0)
    schedule.saved(2, 163.0, 3.0)
    assert not schedule.due(3, 222.9)
    assert schedule.due(4, 223.0)


def test_a_step_is_not_saved_twice() -> None:
    schedule = Schedule(60.0, step=0, now=0.0)
    schedule.saved(5, 60.0, 1.0)
    assert not schedule.due(5, 1000.0)


# --- auto ----------------------------------------------------------------------------------------------------------


def test_at_first_it_goes_by_the_priors() -> None:
    schedule = Schedule(step=0, now=7.0, prior_mtbf_s=5000.0, prior_cost_s=4.0)
    interval = best_interval_s(4.0, 5000.0)
    assert schedule.interval_s(7.0) == interval
    assert not schedule.due(1, 7.0 + 0.9 * interval)
    assert schedule.due(1, 7.0 + 1.2 * interval)


def test_the_measured_cost_takes_the_place_of_the_prior() -> None:
    schedule = Schedule(step=0, now=0.0, prior_mtbf_s=5000.0)
    schedule.saved(1, 0.0, 9.0)
    assert schedule.interval_s(0.0) == best_interval_s(9.0, 5000.0)


def test_one_save_that_was_held_up_does_not_count() -> None:
    schedule = Schedule(step=0, now=0.0, prior_mtbf_s=5000.0)
    for step, cost in enumerate((2.0, 2.0, 500.0, 2.0, 2.0), 1):
        schedule.saved(step, 0.0, cost)
    assert schedule.interval_s(0.0) == best_interval_s(2.0, 5000.0)


def test_old_costs_are_forgotten() -> None:
    schedule = Schedule(step=0, now=0.0, prior_mtbf_s=5000.0)
    for step in range(1, 21):
        schedule.saved(step, 0.0, 50.0 if step <= 10 else 1.0)
    assert schedule.interval_s(0.0) == best_interval_s(1.0, 5000.0)


def test_failures_bring_saves_closer_together_and_quiet_times_apart() -> None:
    schedule = Schedule(step=0, now=0.0, prior_mtbf_s=5000.0)
    before = schedule.interval_s(1000.0)
    schedule.failed()
    assert schedule.interval_s(1000.0) < before
    assert schedule.interval_s(100_000.0) > before


# --- handing over --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", ["auto", 10, 60.0])
def test_a_worker_that_adopts_a_history_decides_alike_on_its_own_clock(every: Any) -> None:
    old, new = Schedule(every, step=0, now=0.0), Schedule(every, step=0, now=5000.0)
    old.saved(7, 200.0, 3.0)
    old.failed()
    new.adopt(old.export(300.0), 9300.0)
    for step, later in ((7, 1.0), (8, 0.0), (9, 30.0), (10, 61.0), (12, 700.0), (13, 5000.0)):
        assert old.due(step, 300.0 + later) == new.due(step, 9300.0 + later)
    assert old.interval_s(400.0) == pytest.approx(new.interval_s(9400.0))


def test_its_repr_says_what_it_goes_by() -> None:
    assert repr(Schedule(10, step=3, now=0.0)) == "Schedule(Every(steps=10, seconds=None), failures=0, saved_step=3)"
