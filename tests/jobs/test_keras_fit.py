"""Fault tolerance inside ``model.fit``: workers die at named moments, and training ends as if none had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from horovod_ft.ledger import verify_ledger
from tests.jobs.keras_jobs import KerasJobs, add_a_worker

pytestmark = pytest.mark.job

Left = dict[str, dict[str, Any]]
EPOCHS, BATCHES = 2, 9
#: Workers that each job begins with, and how many are left after each of its cases.
JOBS: dict[str, tuple[int, dict[str, int]]] = {
    "moments": (5, {"quiet": 5, "forward": 4, "allreduce": 3, "rank_zero": 2, "backward": 1}),
    "epochs": (4, {"parts": 4, "last_of_epoch": 3, "validation": 2, "last_validation": 1}),
    "kinds": (5, {"lost": 5, "flipped": 5, "two_at_once": 3, "eagerly": 2, "plain": 1}),
    "models": (5, {"commit": 4, "own_state": 3, "half": 2, "brain": 1}),
    "forward": (5, {"late": 5, "whole_update": 4, "part_of_it": 3, "rows": 2, "half_forward": 1}),
    "calls": (5, {"call": 4, "call_forward": 3, "call_restart": 2}),
    "twice": (6, {"agreement": 4, "completion": 2}),
    "twice_more": (6, {"reform": 4, "transfer": 2}),
    "options": (5, {"passes": 4, "passes_forward": 3, "fp16": 2}),
}
CASES = [(job, case) for job, (_, cases) in JOBS.items() for case in cases]
#: With statistics and dropout of their own, or when a share is lost, workers do not end where one process does.
UNLIKE = {
    "own_state", "newcomer_calls", "part_of_it", "rows", "half_forward", "call_forward", "completion", "passes_forward"
}  # fmt: skip
ALIKE = [(job, case) for job, case in CASES if case not in UNLIKE]
#: How many graphs there are of a step, if not one: its three stages may be apart, and the last pass is another.
GRAPHS = {**dict.fromkeys(JOBS["forward"][1], 3), "call_forward": 3, "completion": 3, "passes": 2, "passes_forward": 6}
COARSE = {"half": 5e-3, "fp16": 5e-3, "brain": 5e-2}
#: Batches in a call of the training function.
CALLS = {"last_of_epoch": 4, "newcomer_calls": 4, **dict.fromkeys(JOBS["calls"][1], 4)}
#: Batches of an epoch and batches for an update, if not ``BATCHES`` and one.
PASSES = {"passes": (10, 2), "passes_forward": (10, 2)}
#: The step that may lose the share of a worker; and those cases in which it must, since nobody has some gradients.
LOSSY = {**dict.fromkeys(JOBS["forward"][1], 5), "call_forward": 7, "completion": 5, "passes_forward": 3}
LOSES = {"call_forward", "completion", "passes_forward"}
jobs = KerasJobs("tests.jobs.keras_fit", 220.0)


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the workers of a job have left something. Each job runs once."""
    job = request.node.callspec.params["job"]
    return jobs.once(job, JOBS[job][0], tmp_path_factory)


def left_by(folder: Path, case: str) -> Left:
    left: Left = {path.stem: json.loads(path.read_text()) for path in folder.glob(f"{case}-*.json")}
    for one in left.values():
        del one["heard"]  # not all of them hear the same
    return left


def heard_by(folder: Path, case: str) -> list[list[str]]:
    """Kinds of events, for each worker that is left."""
    return [json.loads(path.read_text())["heard"] for path in folder.glob(f"{case}-*.json")]


@pytest.mark.parametrize(("job", "case"), CASES)
def test_survivors_go_on_to_the_end_and_are_equal(folder: Path, job: str, case: str) -> None:
    left = left_by(folder, case)
    assert len(left) == JOBS[job][1][case]
    first, *others = ({**one, "apart": None} for one in left.values())
    for other in others:
        assert other == first
    assert first["size"] == len(left)
    assert first["waiting"] == []  # every fault has struck


@pytest.mark.parametrize(
    ("job", "case", "event"),
    [("kinds", "lost", "decision"), ("forward", "late", "decision"), ("kinds", "flipped", "healed")],
)
def test_what_nobody_dies_of_is_mended_too(folder: Path, job: str, case: str, event: str) -> None:
    assert all(event in heard for heard in heard_by(folder, case))


@pytest.mark.parametrize(("job", "case"), ALIKE)
def test_they_end_where_one_process_without_failures_ends(folder: Path, job: str, case: str) -> None:
    (apart,) = [one["apart"] for one in left_by(folder, case).values() if "apart" in one]
    if case in ("plain", "whole_update"):  # some rows, those of a worker that is gone, do not count in metrics
        del apart["history"]
    assert max(apart.values()) < COARSE.get(case, 1e-5), apart


@pytest.mark.parametrize(("job", "case"), CASES)
def test_keras_sees_each_batch_and_each_epoch_once(folder: Path, job: str, case: str) -> None:
    for one in left_by(folder, case).values():
        in_a_call, (batches, passes) = CALLS.get(case, 1), PASSES.get(case, (BATCHES, 1))
        ends = range(in_a_call - 1, batches + in_a_call - 1, in_a_call)
        assert one["batches"] == [[epoch, end] for epoch in range(EPOCHS) for end in ends]
        assert {len(values) for values in one["history"].values()} == {EPOCHS}
        # One for the logs of each epoch; the last is to come.
        assert one["steps"] == EPOCHS * batches // passes + EPOCHS - 1


@pytest.mark.parametrize(("job", "case"), [(job, case) for job, case in CASES if case != "plain"])
def test_each_sample_is_trained_on_once_an_epoch(folder: Path, job: str, case: str) -> None:
    report = verify_ledger(folder / f"ledger-{case}")
    lossy = case in LOSSY and report.complete and report.lossy.keys() == {LOSSY[case]}
    assert lossy or (report.exact and case not in LOSES), report.problems
    batches, passes = PASSES.get(case, (BATCHES, 1))
    assert (report.epochs, report.steps) == (EPOCHS, EPOCHS * (batches // passes + 1))
    assert (report.redone > 0) == (case == "call_restart")


@pytest.mark.parametrize(("job", "case"), CASES)
def test_a_failure_does_not_make_tensorflow_compile_the_step_anew(folder: Path, job: str, case: str) -> None:
    assert {one["traced"] for one in left_by(folder, case).values()} == {GRAPHS.get(case, 1)}


@pytest.mark.parametrize(
    ("job", "first"), [("newcomer", [4, 5]), ("newcomer_calls", [7]), ("newcomer_forward", [4, 5])]
)
def test_a_newcomer_enters_at_the_batch_of_the_others_and_stops_with_them(
    tmp_path: Path, job: str, first: list[int]
) -> None:
    """All hear of it at the same step, at the latest one after the next; its first call may be one of several."""
    left = left_by(jobs.run(tmp_path, job, 2, add_a_worker), job)
    assert [one["size"] for one in left.values()] == [3, 3, 3]
    batches = [one.pop("batches") for one in left.values()]
    in_a_call = CALLS.get(job, 1)
    ends = range(in_a_call - 1, BATCHES + in_a_call - 1, in_a_call)
    complete = [[epoch, end] for epoch in range(3) for end in ends]
    newcomers, *others = sorted(batches, key=len)
    assert others == [complete, complete]
    assert newcomers == complete[-len(newcomers) :]
    assert newcomers[0] in [[1, batch] for batch in first]
    aparts = [one.pop("apart") for one in left.values() if "apart" in one]
    assert len(aparts) == (job not in UNLIKE)
    assert all(max(apart.values()) < 1e-5 for apart in aparts)
    assert list(left.values()) == [next(iter(left.values()))] * 3
    report = verify_ledger(tmp_path / f"ledger-{job}")
    assert report.exact, report.problems


def test_going_back_to_a_checkpoint_goes_unnoticed_by_keras(tmp_path: Path) -> None:
    """The steps since then are computed again, and callbacks, history and epochs stay where they are."""
    left = left_by(jobs.run(tmp_path, "restart", 3), "restart")
    assert len(left) == 2
    (apart,) = [one.pop("apart") for one in left.values() if "apart" in one]
    assert max(apart.values()) < 1e-5
    first, second = left.values()
    assert first == second
    assert first["batches"] == [[epoch, batch] for epoch in range(EPOCHS) for batch in range(BATCHES)]
    report = verify_ledger(tmp_path / "ledger-restart")
    assert report.exact, report.problems
    assert report.redone > 0


def test_a_job_that_has_lost_all_workers_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    jobs.run(tmp_path, "dies", 2, ends_well=False)
    left = left_by(jobs.run(tmp_path, "again", 2), "again")
    assert len(left) == 2
    (apart,) = [one.pop("apart") for one in left.values() if "apart" in one]
    assert max(apart.values()) < 1e-5
    for one in left.values():
        assert one["batches"][0] > [0, 0]
        assert one["batches"][-1] == [1, BATCHES - 1]


def test_rank_zero_writes_what_keras_saves_and_the_next_one_takes_over(tmp_path: Path) -> None:
    left = left_by(jobs.run(tmp_path, "files", 3), "files")
    assert left.keys() == {"files-1", "files-2"}
    assert {one["saved"] for one in left.values()} == {one["digest"] for one in left.values()}
    assert len({one["digest"] for one in left.values()}) == 1
    first, second = sorted(path.name for path in tmp_path.glob("wrote-*"))
    assert first == "wrote-0-0"
    assert second in ("wrote-1-1", "wrote-1-2")
    assert [path.name for path in tmp_path.glob("*.keras")] == ["model.keras"]
