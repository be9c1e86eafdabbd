"""Durable checkpoints in real jobs: whatever dies, and whatever becomes of the files, training ends as if nothing had.

A job of two epochs has 18 steps, and saves after the first, the fourth, the eighth and so on.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from horovod_ft.checkpoint import Candidate, CheckpointStore, Level
from horovod_ft.testing.local_job import LocalJob
from tests.jobs.harness import (
    LAUNCHER,
    Outcome,
    Result,
    check_close,
    check_like_reference,
    check_sound,
    fault,
    run_job,
)
from tests.jobs.task import reference

pytestmark = pytest.mark.job

#: What starts a job again that was lost.
RUN = [
    sys.executable, "-m", "horovod_ft.cli.main", "run", "--restarts", "2", "--backoff", "0.1",
]  # fmt: skip
ALL = (0, 1, 2)


def store_of(folder: Path) -> Path:
    return folder / "checkpoints"


def run_saving(folder: Path, faults: list[str] | None = None, **config: Any) -> Outcome:
    told = {"every": 4, "launcher": RUN, "checkpoint": str(store_of(folder)), **config}
    return run_job(folder, faults or [], **told)


def everybody(step: int, phase: str = "forward", workers: tuple[int, ...] = ALL) -> list[str]:
    return [fault(worker, step, phase) for worker in workers]


def restored_from(outcome: Outcome) -> list[int]:
    """The steps that the jobs of all attempts went on from."""
    found = {(event.generation, event.data["to"]) for event in outcome.kinds("restored")}
    return [step for _, step in sorted(found)]


def by_rank(outcome: Outcome) -> list[Result]:
    return sorted(outcome.results, key=lambda result: int(result.scalars["rank"]))


def valid(folder: Path) -> list[int]:
    return [one.step for one in CheckpointStore(store_of(folder)).candidates(Level.FULL) if one.usable]


def check_whole(outcome: Outcome, workers: set[int], restored: list[int]) -> None:
    """All attempts together have trained on every sample once, and ended with the parameters of a run in one go."""
    check_sound(outcome, workers)
    check_like_reference(outcome)
    assert restored_from(outcome) == restored
    assert outcome.results[0].scalars["steps"] == 18
    assert 18 in valid(Path(outcome.config.folder))


# --- everybody dies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_all_workers_die_at_once(tmp_path: Path, optimizer: str) -> None:
    outcome = run_saving(tmp_path, everybody(11), optimizer=optimizer, settle_through=8)
    check_whole(outcome, {0, 1, 2}, [8])
    assert outcome.ledger.redone == 2


@pytest.mark.parametrize("model", ["batchnorm", "dropout"])
def test_what_each_worker_has_of_its_own_is_restored(tmp_path: Path, model: str) -> None:
    """Buffers and random generators: each worker ends as in a job which nothing happened to."""
    broken = run_saving(tmp_path / "broken", everybody(11), model=model, samples=96, settle_through=8)
    check_sound(broken, {0, 1, 2})
    assert restored_from(broken) == [8]
    unbroken = run_saving(tmp_path / "unbroken", model=model, samples=96)
    for left, right in zip(by_rank(broken), by_rank(unbroken), strict=True):
        assert left.scalars == right.scalars
        check_close(left.arrays, right.arrays)


def test_the_job_is_lost_before_there_is_a_checkpoint(tmp_path: Path) -> None:
    check_whole(run_saving(tmp_path, everybody(1)), {0, 1, 2}, [])


def test_the_job_is_lost_after_its_last_step(tmp_path: Path) -> None:
    """The last state is saved before the training function's result counts."""
    outcome = run_saving(tmp_path, everybody(18, "save_done", (0,)) + everybody(18, "reform", (1, 2)))
    check_sound(outcome, outcome.start_ranks())
    check_like_reference(outcome)


def test_a_second_failure_while_the_group_is_rebuilt(tmp_path: Path) -> None:
    """Horovod ends all survivors then, or none: both times training goes on."""
    outcome = run_saving(tmp_path, [fault(1, 7, "forward"), fault(2, 7, "reform")], settle_through=4)
    check_sound(outcome, outcome.start_ranks())
    check_like_reference(outcome)


def test_the_last_replica_dies_while_it_is_sent(tmp_path: Path) -> None:
    """Worker 1 alone has the newest step; it dies while the others receive it."""
    outcome = run_saving(
        tmp_path, [fault(1, 11, "forward"), fault(0, 11, "transfer"), fault(2, 11, "transfer")], settle_through=8
    )
    check_sound(outcome, outcome.start_ranks())
    check_like_reference(outcome)


def test_the_last_worker_dies_while_horovodrun_waits_for_more_hosts(tmp_path: Path) -> None:
    """Nobody is left to wait for them, so the job is started again at once, not after ``--elastic-timeout``."""

    def leave_nobody(job: LocalJob) -> None:
        job.wait_for("a failure", lambda job: any(event.kind == "failure_detected" for event in job.events()))
        time.sleep(2.0)  # the survivor asks horovodrun for its new rank, and nothing says when
        job.kill(0)

    plan = [fault(1, 11, "forward")]
    outcome = run_saving(tmp_path, plan, workers=2, min_workers=2, during=leave_nobody, settle_through=8)
    check_sound(outcome, {0, 1})
    check_like_reference(outcome)
    assert restored_from(outcome) == [8]


# --- somebody dies during a save -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("worker", "phase", "restored"),
    [
        (1, "save_copy", 4), (1, "save_write", 4), (1, "save_sync", 4), (0, "save_copy", 4), (0, "save_write", 4),
        (0, "save_sync", 4), (0, "save_manifest", 4), (0, "save_done", 8),
    ],
)  # fmt: skip
def test_a_death_at_every_stage_of_a_save(tmp_path: Path, worker: int, phase: str, restored: int) -> None:
    """It dies while step 8 is saved, and the others soon after: what was not finished does not count."""
    others = tuple(one for one in ALL if one != worker)
    outcome = run_saving(
        tmp_path, [fault(worker, 8, phase), *everybody(11, "forward", others)], settle_through=4, linger=(worker, 8)
    )
    check_whole(outcome, {0, 1, 2}, [restored])


@pytest.mark.parametrize(("worker", "phase"), [(1, "save_write"), (0, "save_manifest")])
def test_the_others_go_on_and_save_again(tmp_path: Path, worker: int, phase: str) -> None:
    outcome = run_saving(tmp_path, [fault(worker, 4, phase)], settle_through=1, launcher=LAUNCHER)
    check_sound(outcome, {0, 1, 2} - {worker})
    check_like_reference(outcome)
    assert 18 in valid(tmp_path)


def test_a_death_while_a_checkpoint_is_read(tmp_path: Path) -> None:
    """On the second attempt plans do not strike any more, so this is a second job."""
    lost = run_saving(tmp_path / "first", everybody(11), settle_through=8, launcher=LAUNCHER)
    assert lost.finished.returncode != 0
    outcome = run_saving(tmp_path / "second", [fault(1, 8, "restore")], launcher=LAUNCHER,
                         checkpoint=str(store_of(tmp_path / "first")))  # fmt: skip
    check_goes_on(outcome, {0, 2}, since=8)


# --- checkpoint-restart in place -----------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["forward", "allreduce", "commit"])
def test_checkpoint_restart_in_place(tmp_path: Path, phase: str) -> None:
    outcome = run_saving(
        tmp_path, [fault(2, 11, phase)], own_policy="restarts", every=None, settle_through=8, launcher=LAUNCHER
    )
    check_whole(outcome, {0, 1}, [8])
    lost = {event.data["lost_steps"] for event in outcome.kinds("restarted")}
    assert {event.data["to"] for event in outcome.kinds("restarted")} == {8}
    assert lost <= ({2, 3} if phase == "commit" else {2})  # some may have committed step 11 then
    assert outcome.ledger.redone == max(lost)


def test_scripts_that_commit_themselves(tmp_path: Path) -> None:
    outcome = run_saving(tmp_path, everybody(11), commit_every=2, every=2)
    assert outcome.finished.returncode == 0, outcome.finished.output
    check_like_reference(outcome)


# --- files that are not as they were -------------------------------------------------------------------------------


def newest(folder: Path) -> Path:
    found = next(one for one in CheckpointStore(store_of(folder)).candidates() if one.usable)
    return store_of(folder) / found.folder


def flip_a_byte(checkpoint: Path) -> None:
    shard = checkpoint / "shard-00002-of-00003.safetensors"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)


def cut_short(checkpoint: Path) -> None:
    shard = checkpoint / "shard-00001-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])


def lose_a_shard(checkpoint: Path) -> None:
    (checkpoint / "shard-00003-of-00003.safetensors").unlink()


def make_newer(checkpoint: Path) -> None:
    manifest = checkpoint / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"version":1', b'"version":9', 1))


def half_write(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()


DAMAGES: dict[str, Any] = {
    "one flipped byte": (flip_a_byte, "shard-00002-of-00003.safetensors has been altered"),
    "cut short": (cut_short, ""),
    "a shard that is missing": (lose_a_shard, ""),
    "a newer format": (make_newer, ""),
    "half written": (half_write, ""),
}


def check_goes_on(outcome: Outcome, workers: set[int], since: int) -> None:
    """A job that has gone on from the checkpoint of another one."""
    told = outcome.finished.output[-6000:]
    assert outcome.finished.returncode == 0, told
    assert outcome.start_ranks() == workers, told
    check_like_reference(outcome)
    assert set(restored_from(outcome)) == {since}
    assert (outcome.ledger.since, outcome.ledger.steps, outcome.ledger.problems) == (since, 18, [])


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_named_and_the_one_before_is_used(tmp_path: Path, damage: str) -> None:
    lost = run_saving(tmp_path / "first", everybody(11), settle_through=8, launcher=LAUNCHER)
    assert valid(tmp_path / "first") == [8, 4, 1], lost.finished.output
    spoil, told = DAMAGES[damage]
    spoil(newest(tmp_path / "first"))
    outcome = run_saving(tmp_path / "second", launcher=LAUNCHER, checkpoint=str(store_of(tmp_path / "first")))
    check_goes_on(outcome, {0, 1, 2}, since=4)
    assert told in outcome.finished.output


def test_if_none_can_be_used_all_are_listed(tmp_path: Path) -> None:
    run_saving(tmp_path / "first", everybody(11), settle_through=8, launcher=LAUNCHER)
    found: list[Candidate] = list(CheckpointStore(store_of(tmp_path / "first")).candidates())
    for one, spoil in zip(found, (flip_a_byte, cut_short, lose_a_shard), strict=True):
        spoil(store_of(tmp_path / "first") / one.folder)
    outcome = run_saving(tmp_path / "second", launcher=LAUNCHER, checkpoint=str(store_of(tmp_path / "first")))
    assert outcome.finished.returncode not in (0, None)
    assert all(f"{one.folder}: " in outcome.finished.output for one in found), outcome.finished.output


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_another_number_of_workers_goes_on(tmp_path: Path, workers: int) -> None:
    run_saving(tmp_path / "first", everybody(11), settle_through=8, launcher=LAUNCHER)
    outcome = run_saving(tmp_path / "second", workers=workers, launcher=LAUNCHER,
                         checkpoint=str(store_of(tmp_path / "first")))  # fmt: skip
    check_goes_on(outcome, set(range(workers)), since=8)


def test_a_checkpoint_of_another_model_is_refused_with_the_tensor_that_differs(tmp_path: Path) -> None:
    run_saving(tmp_path / "first", everybody(11), settle_through=8, launcher=LAUNCHER)
    outcome = run_saving(tmp_path / "second", model="batchnorm", launcher=LAUNCHER,
                         checkpoint=str(store_of(tmp_path / "first")))  # fmt: skip
    assert outcome.finished.returncode not in (0, None)
    assert "the checkpoint is of another model than this one" in outcome.finished.output
    assert "'model.1.weight'" in outcome.finished.output


# --- a place that cannot be written to -----------------------------------------------------------------------------


@contextlib.contextmanager
def mounted(at: Path, options: str) -> Iterator[None]:
    """A small file system in memory."""
    at.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(at)], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(at)], check=True)


@pytest.mark.parametrize(
    ("options", "told"), [("size=16k", "No space left on device"), ("ro", "Read-only file system")]
)  # fmt: skip
def test_a_disk_that_refuses_does_not_end_training(tmp_path: Path, options: str, told: str) -> None:
    with mounted(tmp_path / "disk", options):
        outcome = run_saving(
            tmp_path / "job", [fault(2, 11, "forward")], launcher=LAUNCHER, checkpoint=str(tmp_path / "disk" / "run")
        )
    check_sound(outcome, {0, 1})
    check_like_reference(outcome)
    assert any(told in event.data["text"] for event in outcome.kinds("warning"))
    assert told in outcome.finished.output


def test_a_disk_that_refuses_ends_training_if_that_is_asked_for(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "ro"):
        outcome = run_saving(tmp_path / "job", launcher=LAUNCHER, checkpoint=str(tmp_path / "disk" / "run"),
                             end_on_error=True)  # fmt: skip
    assert outcome.finished.returncode not in (0, None)
    assert "training ends because a checkpoint could not be saved" in outcome.finished.output


# --- the end is near -----------------------------------------------------------------------------------------------


def test_a_job_that_is_about_to_be_ended_saves_and_leaves(tmp_path: Path) -> None:
    """A preemption notice: long before the grace period is over the job has ended by itself, with a last checkpoint."""

    def preempt(job: LocalJob) -> None:
        job.wait_for("a checkpoint", lambda job: any(event.kind == "saved" for event in job.events()))
        job.stop(signal.SIGTERM)

    ended = run_saving(tmp_path / "first", during=preempt, epochs=150, every=1000)
    assert ended.finished.returncode == 128 + signal.SIGTERM, ended.finished.output
    assert ended.finished.leftovers == 0
    left_at = {event.step for event in ended.kinds("preempted")}
    assert left_at == {valid(tmp_path / "first")[0]}
    outcome = run_saving(tmp_path / "second", epochs=150, every=1000, launcher=LAUNCHER,
                         checkpoint=str(store_of(tmp_path / "first")))  # fmt: skip
    assert set(restored_from(outcome)) == left_at
    check_like_reference(outcome)


# --- what a job before has left ------------------------------------------------------------------------------------


def test_the_one_that_is_called_again_has_nothing_to_do(tmp_path: Path) -> None:
    first = run_saving(tmp_path / "first", launcher=LAUNCHER)
    check_whole(first, {0, 1, 2}, [])
    again = run_saving(tmp_path / "second", launcher=LAUNCHER, checkpoint=str(store_of(tmp_path / "first")))
    assert again.finished.returncode == 0, again.finished.output
    assert restored_from(again) == [18]
    expected = reference(again.config)
    trained = again.results[0].arrays
    assert all(abs(trained[f"model.{name}"] - value).max() < 1e-10 for name, value in expected.items())
