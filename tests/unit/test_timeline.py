"""What the timeline reads out of events."""

from __future__ import annotations

import random

import pytest

from horovod_ft.timeline import labels, lost_workers, parts, recoveries, world_sizes
from tests.unit.cli.made import GAP, RECOVERED, SINCE_COMMIT, STAGE_ENDS, Run, lost_one, name


def test_a_run_without_failures_has_no_recovery() -> None:
    run = Run().form()
    run.add(9.0, "finished", 0)
    assert recoveries(run.events) == []


def test_one_recovery_of_all_its_workers() -> None:
    (recovery,) = recoveries(lost_one().events)
    assert (recovery.generation, recovery.step, recovery.lost, recovery.size) == (1, 4, (1,), 2)


def test_it_begins_when_the_first_worker_notices() -> None:
    (recovery,) = recoveries(lost_one().events)
    assert recovery.at == pytest.approx(1005.01)


def test_the_gap_is_that_of_the_worker_with_the_longest() -> None:
    run = Run().form(2)
    run.recover(0, 5.0, lost=[], resumed=False)
    run.recover(1, 5.0, lost=[], resumed=False)
    run.add(5.4, "resumed", 0, generation=1, gap_s=0.4)
    run.add(5.3, "resumed", 1, generation=1, gap_s=0.3)
    (recovery,) = recoveries(run.events)
    assert recovery.gap_s == 0.4


def test_stages_are_medians_and_the_slowest() -> None:
    run = Run().form()
    for worker, delay in enumerate((0.01, 0.02, 0.09)):
        run.notice(worker, 5.0)
        run.add(5.0 + delay, "sockets_cut", worker)
        run.add(5.1, "recovered", worker, generation=1)
    (recovery,) = recoveries(run.events)
    assert recovery.stages["sockets_cut"] == pytest.approx(0.02)
    assert recovery.slowest["sockets_cut"] == pytest.approx(0.09)


def test_the_stages_of_a_worker_add_up_to_its_gap() -> None:
    (part,) = parts(_alone().events)
    assert sum(part.seconds.values()) == pytest.approx(GAP)
    assert part.gap_s == GAP


def test_each_stage_begins_where_the_one_before_ends() -> None:
    (part,) = parts(_alone().events)
    assert part.stages[0].start == pytest.approx(1005.0 - SINCE_COMMIT)
    for before, after in zip(part.stages, part.stages[1:], strict=False):
        assert after.start == pytest.approx(before.stop)


def test_the_stage_before_the_notice_counts_from_the_last_commit() -> None:
    (recovery,) = recoveries(_alone().events)
    assert recovery.stages["failure_detected"] == pytest.approx(SINCE_COMMIT)
    assert recovery.stages["reformed"] == pytest.approx(STAGE_ENDS["reformed"] - STAGE_ENDS["drained"])


def test_events_that_are_no_stages_are_passed_over() -> None:
    run = _alone()
    run.add(5.003, "drained", 0)
    run.add(5.004, "warning", 0, text="something")
    assert recoveries(run.events) == recoveries(_alone().events)


def test_the_order_of_the_events_does_not_matter() -> None:
    events = lost_one().events
    shuffled = random.Random(1).sample(events, len(events))
    assert recoveries(shuffled) == recoveries(events)


def test_two_failures_in_a_row_are_two_recoveries() -> None:
    run = Run().form()
    for worker in (0, 2):
        run.recover(worker, 5.0, lost=[1])
    run.recover(0, 6.0, lost=[1], generation=2, size=1, step=9)
    first, second = recoveries(run.events)
    assert (first.generation, first.size, first.step) == (1, 2, 4)
    assert (second.generation, second.size, second.step) == (2, 1, 9)
    assert second.gap_s == GAP


def test_a_failure_before_the_first_commit_after_a_recovery_begins_the_next_one() -> None:
    run = Run().form()
    run.recover(0, 5.0, lost=[1], resumed=False)
    run.recover(0, 5.5, lost=[1], generation=2, size=1, since=0.5 + SINCE_COMMIT)
    first, second = recoveries(run.events)
    assert first.gap_s == pytest.approx(SINCE_COMMIT + RECOVERED)
    assert second.stages["failure_detected"] == pytest.approx(5.5 - 5.124)


def test_a_failure_during_a_recovery_is_part_of_it() -> None:
    run = Run().form(4)
    run.notice(0, 5.0)
    run.add(5.1, "reformed", 0, size=3)
    run.add(5.2, "agreed", 0, newest=4, lost=[1])
    run.notice(0, 5.3, during="recovery")
    run.add(5.4, "reformed", 0, size=2)
    run.add(5.5, "agreed", 0, newest=5, lost=[1, 3])
    run.add(5.6, "recovered", 0, generation=1, size=2)
    run.add(5.7, "resumed", 0, generation=1, size=2, gap_s=0.727)
    (recovery,) = recoveries(run.events)
    assert (recovery.lost, recovery.step, recovery.size, recovery.gap_s) == ((1, 3), 5, 2, 0.727)
    assert recovery.stages["reformed"] == pytest.approx(0.1 + 0.1)
    assert recovery.stages["failure_detected"] == pytest.approx(SINCE_COMMIT + 0.1)


def test_without_a_commit_after_it_the_gap_ends_with_the_recovery() -> None:
    run = Run().form(2)
    run.recover(0, 5.0, lost=[1], size=1, resumed=False)
    (recovery,) = recoveries(run.events)
    assert recovery.gap_s == pytest.approx(SINCE_COMMIT + RECOVERED)
    assert "resumed" not in recovery.stages


def test_a_group_that_changes_before_the_next_commit_does_not_hide_the_recovery() -> None:
    run = Run().form(2)
    run.recover(0, 5.0, lost=[1], size=1, resumed=False)
    run.add(5.2, "resizing", 0, generation=1, size=1)
    run.add(5.3, "reformed", 0, generation=1, size=2)
    run.add(5.4, "regrouped", 0, generation=2, size=2)
    run.add(5.5, "resumed", 0, generation=2, size=2, gap_s=0.1)
    assert [recovery.generation for recovery in recoveries(run.events)] == [1]


def test_a_worker_that_does_not_come_through_has_no_part() -> None:
    run = lost_one()
    run.notice(1, 5.05)
    run.add(5.06, "sockets_cut", 1)
    assert {part.worker for part in parts(run.events)} == {name(0), name(2)}


def test_a_newcomer_that_lives_through_a_failure_has_joined_and_not_recovered() -> None:
    run = lost_one()
    run.notice(7, 5.05, during="recovery")
    run.add(5.06, "sockets_cut", 7)
    run.add(5.13, "joined", 7, generation=1, size=2)
    assert {part.worker for part in parts(run.events)} == {name(0), name(2)}


def test_forming_a_group_for_newcomers_is_no_recovery() -> None:
    run = Run().form(2)
    run.add(5.0, "resizing", 0)
    run.add(5.1, "reformed", 0)
    run.add(5.2, "agreed", 0, newest=4, lost=[])
    run.add(5.3, "transferred", 0)
    run.add(5.4, "regrouped", 0, generation=1, size=3)
    assert recoveries(run.events) == []


def test_world_sizes_over_losses_and_newcomers() -> None:
    run = lost_one()
    run.add(6.0, "regrouped", 0, generation=2, size=4)
    run.add(6.0, "joined", 5, generation=2, size=4)
    assert world_sizes(run.events) == [3, 2, 4]


def test_equal_sizes_in_a_row_count_once() -> None:
    run = lost_one()
    run.add(6.0, "recovered", 0, generation=2, size=2)
    assert world_sizes(run.events) == [3, 2]


def test_no_events_no_sizes() -> None:
    assert world_sizes([]) == []


def test_lost_workers_are_found_by_their_rank_in_the_group_before() -> None:
    run = Run().form(4)
    for rank, worker in enumerate((1, 2, 3)):
        run.recover(worker, 5.0, lost=[0], rank=rank, size=3)
    for rank, worker in enumerate((1, 3)):
        run.recover(worker, 6.0, lost=[1], rank=rank, generation=2)
    first, second = recoveries(run.events)
    assert lost_workers(first, run.events) == {0: name(0)}
    assert lost_workers(second, run.events) == {1: name(2)}


def test_a_lost_newcomer_is_found_too() -> None:
    run = Run().form(2)
    for rank in (0, 1):
        run.add(5.0, "regrouped", rank, generation=1, rank=rank, size=3)
    run.add(5.0, "joined", 9, generation=1, rank=2, size=3)
    run.recover(0, 6.0, lost=[2], generation=2)
    (recovery,) = recoveries(run.events)
    assert lost_workers(recovery, run.events) == {2: name(9)}


def test_a_lost_worker_that_recorded_nothing_has_no_name() -> None:
    events = [event for event in lost_one().events if event.worker != name(1)]
    (recovery,) = recoveries(events)
    assert lost_workers(recovery, events) == {1: None}


def test_a_start_rank_is_label_enough_when_it_is_the_only_one() -> None:
    assert labels(["a:0:11", "b:1:12"]) == {"a:0:11": "0", "b:1:12": "1"}


def test_a_newcomer_with_a_start_rank_that_was_used_is_told_apart_by_its_host() -> None:
    assert labels(["a:0:11", "b:1:12", "c:1:13"]) == {"a:0:11": "0", "b:1:12": "1@b", "c:1:13": "1@c"}


def test_on_the_same_host_it_is_told_apart_by_its_process() -> None:
    assert labels(["a:1:11", "a:1:12"]) == {"a:1:11": "1@a:11", "a:1:12": "1@a:12"}


def test_a_host_name_may_hold_colons() -> None:
    assert labels(["fe80::1:0:11", "fe80::1:1:12"]) == {"fe80::1:0:11": "0", "fe80::1:1:12": "1"}


def _alone() -> Run:
    run = Run().form(1)
    run.recover(0, 5.0, lost=[], size=1)
    return run
