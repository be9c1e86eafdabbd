"""The lives of the workers, for the chart."""

from __future__ import annotations

import pytest

from horovod_ft.cli.lanes import Lane, lanes
from tests.unit.cli.made import EPOCH, Run, lost_one


def life(lane: Lane) -> list[tuple[str, int, float, float]]:
    """What, generation, start and stop; to the millisecond."""
    return [(s.what, s.generation, round(s.start - EPOCH, 3), round(s.stop - EPOCH, 3)) for s in lane.stretches]


def test_a_survivor() -> None:
    lane = lanes(lost_one().events)[0]
    assert life(lane) == [
        ("starting", 0, 0.0, 1.0),
        ("training", 0, 1.0, 5.01),
        ("regrouping", 0, 5.01, 5.134),
        ("training", 1, 5.134, 9.0),
    ]
    assert not lane.vanished


def test_a_killed_worker_ends_with_its_fault() -> None:
    lane = lanes(lost_one().events)[1]
    assert life(lane) == [("starting", 0, 0.0, 1.0), ("training", 0, 1.0, 5.0)]
    assert lane.vanished


def test_a_worker_that_died_without_a_word_ends_when_the_others_notice() -> None:
    events = [event for event in lost_one().events if event.kind != "fault"]
    lane = lanes(events)[1]
    assert lane.stretches[-1].stop == pytest.approx(EPOCH + 5.01)
    assert lane.vanished


def test_nobody_noticed_so_it_lives_to_the_last_event() -> None:
    run = Run().form(2)
    run.add(7.0, "finished", 0)
    assert lanes(run.events)[1].stretches[-1].stop == EPOCH + 7.0


def test_a_worker_that_was_taken_away_ends_where_it_asked_for_a_place() -> None:
    run = Run().form(2)
    run.add(5.0, "resizing", 1, rank=1)
    run.add(7.0, "regrouped", 0, generation=1, size=1)
    lane = lanes(run.events)[1]
    assert (lane.stretches[-1].stop, lane.vanished) == (EPOCH + 5.0, True)


def test_what_is_recorded_after_the_end_does_not_make_it_vanish() -> None:
    run = Run().form(1)
    run.add(5.0, "finished", 0)
    run.add(5.1, "warning", 0, text="the fault plan's entry never fired")
    (lane,) = lanes(run.events)
    assert (lane.stretches[-1].stop, lane.vanished) == (EPOCH + 5.0, False)


def test_giving_up_is_an_end_too() -> None:
    run = Run().form(1)
    run.add(5.0, "aborted", 0, reason="enough")
    assert not lanes(run.events)[0].vanished


def test_between_two_trainings_there_is_a_hole() -> None:
    run = Run().form(1)
    run.add(5.0, "finished", 0)
    run.add(7.0, "regrouped", 0, generation=1)
    run.add(9.0, "finished", 0, generation=1)
    (lane,) = lanes(run.events)
    assert life(lane)[1:] == [("training", 0, 1.0, 5.0), ("training", 1, 7.0, 9.0)]


def test_a_second_notice_during_a_recovery_changes_nothing() -> None:
    run = lost_one()
    run.notice(0, 5.05, during="recovery")
    assert [stretch.what for stretch in lanes(run.events)[0].stretches].count("regrouping") == 1


def test_newcomers_come_after_those_who_began_the_run() -> None:
    run = Run()
    run.add(4.0, "init", "late:1:900", rank=1)
    run.add(5.0, "joined", "late:1:900", generation=1, rank=1)
    run.form(3, at=6.0)
    assert [lane.label for lane in lanes(run.events)] == ["0", "1@node1", "2", "1@late"]
