"""The story of a run: one row for what many workers recorded."""

from __future__ import annotations

from typing import Any

import pytest

from horovod_ft.cli.chronicle import chronicle
from tests.unit.cli.made import Run, lost_one


def test_no_events_no_story() -> None:
    assert chronicle([]) == []


def test_the_story_of_a_lost_worker() -> None:
    rows = chronicle(lost_one().events)
    assert [(row.kind, row.workers) for row in rows] == [
        ("formed", ("0", "1", "2")),
        ("fault", ("1",)),
        ("failure_detected", ("0", "2")),
        ("recovered", ("0", "2")),
        ("resumed", ("0", "2")),
        ("finished", ("0", "2")),
    ]


def test_what_it_says() -> None:
    assert [row.text for row in chronicle(lost_one().events)] == [
        "training begins with 3 workers",
        "fault: kill worker 1 at step 5 in backward",
        "failure noticed, during training",
        "recovered: the group has 2 workers now",
        "goes on: 0.200 s from the last step to this one",
        "finished",
    ]


def test_a_row_has_the_time_of_the_first_worker_since_the_first_event() -> None:
    noticed = next(row for row in chronicle(lost_one().events) if row.kind == "failure_detected")
    assert noticed.at_s == pytest.approx(5.01)


def test_a_row_has_the_most_steps_of_its_workers() -> None:
    run = Run()
    run.add(1.0, "finished", 0, step=7)
    run.add(1.0, "finished", 1, step=8)
    assert [row.step for row in chronicle(run.events)] == [8]


def test_two_failures_in_one_generation_are_two_rows() -> None:
    run = Run().form(2)
    for worker in (0, 1):
        run.notice(worker, 5.0)
        run.notice(worker, 6.0, during="recovery")
    noticed = [row for row in chronicle(run.events) if row.kind == "failure_detected"]
    assert [row.text for row in noticed] == ["failure noticed, during training", "failure noticed, during recovery"]
    assert [row.workers for row in noticed] == [("0", "1"), ("0", "1")]


def test_faults_of_one_moment_stay_apart() -> None:
    run = Run()
    run.add(1.0, "fault", 0, fault="kill worker 0 at step 5 in data")
    run.add(1.0, "fault", 1, fault="kill worker 1 at step 5 in data")
    assert len(chronicle(run.events)) == 2


@pytest.mark.parametrize(
    ("kind", "data", "text"),
    [
        ("joined", {}, "joined a group of 3"),
        ("resizing", {}, "workers come or go: forming the group anew"),
        ("regrouped", {}, "regrouped: the group has 3 workers now"),
        ("aborted", {"reason": "enough"}, "gave up: enough"),
        ("warning", {"text": "look out"}, "warning: look out"),
    ],
)
def test_other_kinds(kind: str, data: dict[str, Any], text: str) -> None:
    run = Run()
    run.add(1.0, kind, 0, **data)
    assert [row.text for row in chronicle(run.events)] == [text]


def test_one_worker_is_no_workers() -> None:
    run = Run().form(1)
    assert chronicle(run.events)[0].text == "training begins with 1 worker"


def test_workers_are_in_order_of_their_numbers() -> None:
    run = Run().form(11)
    assert chronicle(run.events)[0].workers == tuple(map(str, range(11)))


def test_a_batch_that_was_carried_forward_says_what_is_lost() -> None:
    run = Run()
    told: dict[str, Any] = {"gone": [1], "gradients": 6, "elements": 200, "lossy_elements": 50}
    run.add(1.0, "forward", 0, step=4, **{**told, "lossy": ["a", "b"]})
    run.add(2.0, "forward", 0, generation=1, step=5, **{**told, "gone": [1, 3], "lossy": [], "lossy_elements": 0})
    assert [row.text for row in chronicle(run.events)] == [
        "carried forward without rank 1: 2 of 6 gradients (25% of the update) lack its part",
        "carried forward without the ranks 1, 3: nothing is lost of the update",
    ]


@pytest.mark.parametrize(("lost", "told"), [(1, "1 step will be"), (3, "3 steps will be")])
def test_going_back_to_a_copy_says_how_far(lost: int, told: str) -> None:
    run = Run()
    run.add(1.0, "restarted", 0, to=4, lost_steps=lost)
    assert [row.text for row in chronicle(run.events)] == [f"went back to step 4: {told} computed again"]


def test_a_checkpoint_that_was_restored_says_which_and_how_fast() -> None:
    run = Run()
    for worker, seconds in ((0, 0.25), (1, 0.5)):
        run.add(1.0, "restored", worker, to=8, folder="step-0000000008-ab", nbytes=200_000_000, duration_s=seconds)
    told = "restored step 8 from step-0000000008-ab: 200.0 MB in 0.50 s"
    assert [row.text for row in chronicle(run.events)] == [told]


@pytest.mark.parametrize(
    ("kind", "told"),
    [("save_late", "the one before is still being written"), ("preempted", "about to be ended from outside")],
)
def test_what_became_of_checkpoints(kind: str, told: str) -> None:
    run = Run()
    run.add(1.0, kind, 0)
    assert told in chronicle(run.events)[0].text
