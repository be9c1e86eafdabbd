"""Durable checkpoints on a fake world: saved while training runs, restored when a job begins and when nothing else is
left, and never in the way of anything.
"""

from __future__ import annotations

import errno
import itertools
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_ft import restoring, saving
from horovod_ft.checkpoint import CheckpointStore
from horovod_ft.checkpoint.inspection import Level
from horovod_ft.checkpoint.local import LocalStorage
from horovod_ft.checkpoint.manifest import Manifest
from horovod_ft.checkpoint.options import Checkpoints
from horovod_ft.checkpoint.partition import Piece
from horovod_ft.checkpoint.remote import FsspecStorage
from horovod_ft.checkpoint.saver import Captured, SaveEnded
from horovod_ft.checkpoint.tensors import TensorSpec
from horovod_ft.data import Deal
from horovod_ft.errors import (
    CheckpointError,
    ConfigurationError,
    DivergenceError,
    JobLostError,
    MismatchError,
    NoCheckpointError,
    RecoveryError,
    StorageError,
    UnsupportedStateError,
)
from horovod_ft.faults.plan import Fault
from horovod_ft.guard import ReplicaGuard
from horovod_ft.ledger import verify_ledger
from horovod_ft.policies.checkpoint_restart import CheckpointRestart
from horovod_ft.policies.rollback import MiniBatchRollback
from horovod_ft.policy import Failure, Restart
from horovod_ft.testing.fake_world import Breakage
from tests.unit.inline_saver import InlineSaver
from tests.unit.test_recovery import check_ledger, check_like_no_failure, committing_every
from tests.unit.toy import DEFAULT, Ended, Job, Result, Toy, expected, run_toys

#: Of a job of two epochs with four steps each.
STEPS = 8


@pytest.fixture(autouse=True)
def _inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "Saver", InlineSaver)


class ScriptError(Exception):
    """An error of the script's own, which ends the job on all workers."""


def into(folder: Path | str, every: int | None = 2, **more: Any) -> Callable[[Toy], None]:
    def prepare(toy: Toy) -> None:
        toy.checkpoints = Checkpoints(folder, every=every, **more)

    return prepare


def saved(folder: Path) -> list[int]:
    return [one.step for one in CheckpointStore(folder).candidates() if one.usable]


def stopping(folder: Path | str, before: int, every: int = 2) -> Callable[[Toy], None]:
    """The script ends with an error before this step, on all workers."""

    def prepare(toy: Toy) -> None:
        into(folder, every, keep_last=None)(toy)

        def stop(deal: Deal) -> None:
            if toy.steps + 1 == before:
                raise ScriptError

        toy.before_step = stop

    return prepare


def run_first(folder: Path | str, job: Job = DEFAULT, *, size: int = 3, before: int = 6) -> None:
    ended = run_toys(size, job=job, prepare=stopping(folder, before))
    assert {type(error) for error in ended.errors.values()} == {ScriptError}


def told(ended: Ended, kind: str, name: str) -> set[Any]:
    return {event.data[name] for index in ended.toys for event in ended.events(index, kind)}


# --- saving --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
def test_checkpoints_are_saved_while_training_runs(tmp_path: Path, size: int) -> None:
    """One after the first step, so that a store which cannot be written to is found out at once."""
    ended = run_toys(size, prepare=into(tmp_path, 3, keep_last=None))
    check_like_no_failure(ended)
    assert saved(tmp_path) == [8, 6, 3, 1]


def test_the_last_state_is_saved_if_it_is_not_already(tmp_path: Path) -> None:
    run_toys(2, prepare=into(tmp_path, 4, keep_last=None))
    assert saved(tmp_path) == [8, 4, 1]
    assert len(list(tmp_path.iterdir())) == 3


def test_it_goes_by_the_steps_that_a_policy_says(tmp_path: Path) -> None:
    run_toys(2, prepare=into(tmp_path, None, keep_last=None), policy=lambda index: CheckpointRestart(5))
    assert saved(tmp_path) == [8, 5, 1]


def test_a_death_between_two_saves_changes_who_saves_what(tmp_path: Path) -> None:
    ended = run_toys(3, [Breakage(0, "gradient.0", 4)], prepare=into(tmp_path, 3, keep_last=None))
    check_like_no_failure(ended, dead=[0])
    assert saved(tmp_path) == [8, 6, 3, 1]
    assert [one.manifest.size for one in CheckpointStore(tmp_path).candidates() if one.manifest] == [2, 2, 3, 3]


def test_a_save_that_lacks_a_part_ends_and_the_next_one_is_whole(tmp_path: Path) -> None:
    """Worker 1 dies on its way to the save of step 3."""
    death = Fault("save_copy", worker=1, step=3)
    ended = run_toys(3, faults=[death], prepare=into(tmp_path, 3, keep_last=None))
    check_like_no_failure(ended, dead=[1])
    assert saved(tmp_path) == [8, 6, 1]
    assert "somebody is dead" in " ".join(told(ended, "warning", "text"))


def test_accumulated_gradients_are_saved_with_the_step_that_they_belong_to(tmp_path: Path) -> None:
    job = Job(passes=2)
    check_like_no_failure(run_toys(2, job=job, prepare=into(tmp_path, 1, keep_last=None)), job)
    assert saved(tmp_path) == [4, 3, 2, 1]


class Slow(InlineSaver):
    """On worker 0 the first save is under way until the last step."""

    def submit(self, captured: Captured) -> None:
        super().submit(captured)
        self.busy = captured.rank == 0 and captured.step == 1

    def wait(self, timeout_s: float) -> bool:
        self.busy = False
        return True


def test_what_is_due_while_another_save_is_under_way_waits_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "Saver", Slow)
    ended = run_toys(2, prepare=into(tmp_path, 2, keep_last=None))
    check_like_no_failure(ended)
    assert saved(tmp_path) == [8, 1]
    assert [len(ended.events(index, "save_late")) for index in (0, 1)] == [1, 1]


def test_replicas_are_compared_before_they_are_saved(tmp_path: Path) -> None:
    def prepare(toy: Toy) -> None:
        into(tmp_path, 3, keep_last=None)(toy)
        toy.guarded = ReplicaGuard(100)

        def spoil(deal: Deal) -> None:
            if toy.steps == 2 and toy.membership.index == 1:
                toy.running[1] = 1  # its weights are spoilt after the update of this step, below
                toy.weights[0, 0] += 1

        toy.before_step = spoil

    ended = run_toys(3, prepare=prepare)
    check_like_no_failure(ended)
    assert [event.step for event in ended.events(0, "healed")] == [3]


class Lasting(InlineSaver):
    """The first save of a run lasts until ``ends``: whoever captures meanwhile takes its memory away."""

    ends = threading.Event()

    def submit(self, captured: Captured) -> None:
        super().submit(captured)
        self.busy = captured.step == 1 and not self.ends.is_set()

    def wait(self, timeout_s: float) -> bool:
        return not self.busy


def recording(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps at which the state is captured, from here on."""
    assert toy.durable is not None
    steps: list[int] = []
    capture = toy.durable.capture

    def note(pieces: Sequence[Piece]) -> Any:
        steps.append(toy.steps)
        return capture(pieces)

    monkeypatch.setattr(toy.durable, "capture", note)
    return steps


def test_the_last_state_does_not_take_the_memory_of_a_save_that_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "Saver", Lasting)
    captured: dict[int, list[int]] = {}

    def prepare(toy: Toy) -> None:
        into(tmp_path, 100)(toy)
        captured[toy.membership.index] = recording(toy, monkeypatch)

    ended = run_toys(2, prepare=prepare)
    check_like_no_failure(ended)
    assert captured == {0: [1], 1: [1]}
    assert "the save before it has not ended" in " ".join(told(ended, "warning", "text"))


def test_nor_does_another_run_of_the_same_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "Saver", Lasting)
    captured: list[list[int]] = []

    def script(toy: Toy) -> Result:
        with pytest.raises(ScriptError):
            toy.run()
        into(tmp_path, 2)(toy)
        captured.append(recording(toy, monkeypatch))
        toy.before_step = lambda deal: None
        return toy.run()

    ended = run_toys(1, prepare=stopping(tmp_path, 4), script=script)
    check_like_no_failure(ended)
    assert captured == [[]]


@pytest.mark.parametrize("preempted", [False, True])
def test_so_they_are_before_the_last_state_is_saved(tmp_path: Path, preempted: bool) -> None:
    def prepare(toy: Toy) -> None:
        into(tmp_path, 100, keep_last=None)(toy)
        toy.guarded = ReplicaGuard(100)

        def spoil(deal: Deal) -> None:
            if toy.steps == STEPS - 2 and toy.membership.index == 1:
                toy.weights[0, 1] += 1  # in its part of a checkpoint
            if toy.steps == STEPS - 2 and preempted:
                toy.membership.preempt()

        toy.before_step = spoil

    run_toys(3, prepare=prepare)
    check_like_no_failure(run_toys(3, prepare=into(tmp_path), attempt=1))


@pytest.mark.parametrize("every", [1, 3, 100])
def test_what_comes_after_the_last_explicit_commit_is_saved_with_what_belongs_to_it(
    tmp_path: Path, every: int
) -> None:
    """Not the weights of the end with the place of the last commit: a job would train on those samples again."""
    job = Job(ledger=tmp_path / "ledger")
    for attempt in range(2):
        ended = run_toys(
            2, job=job, script=committing_every(every), prepare=into(tmp_path / "run", 100), attempt=attempt
        )
        for result in ended.results.values():
            np.testing.assert_array_equal(result.weights, expected(job))
    assert verify_ledger(tmp_path / "ledger").exact


def test_nobody_waits_for_the_part_of_a_worker_that_died_before_the_group_broke_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    savers: dict[int, InlineSaver] = {}

    class Kept(InlineSaver):
        def submit(self, captured: Captured) -> None:
            savers.setdefault(captured.rank, self)
            super().submit(captured)

    monkeypatch.setattr(saving, "Saver", Kept)
    again = Breakage(2, "decision of the recovery policy", 1, dies=False)
    ended = run_toys(3, [Breakage(1, "gradient.0", 4), again], prepare=into(tmp_path, 100))
    check_like_no_failure(ended, dead=[1])
    assert [savers[rank].breaks for rank in (0, 2)] == [1, 1]


# --- errors --------------------------------------------------------------------------------------------------------


class Full(InlineSaver):
    def _write_part(self, captured: Captured, folder: str) -> None:
        raise StorageError("cannot write: No space left on device")


def test_a_save_that_fails_is_told_at_the_next_step_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "Saver", Full)
    ended = run_toys(2, prepare=into(tmp_path))
    check_like_no_failure(ended)
    warned = ended.events(0, "warning")
    assert warned[0].step == 2
    assert warned[0].data["text"] == "the checkpoint of step 1 was not saved: cannot write: No space left on device"


@pytest.mark.parametrize("breakages", [[], [Breakage(2, "gradient.0", 3, dies=False)]], ids=["", "told in vain"])
def test_nobody_waits_for_a_part_that_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breakages: Sequence[Breakage]
) -> None:
    """Also if the group breaks before all have heard of it."""
    savers: dict[int, InlineSaver] = {}

    class FullOnOne(Full):
        def _write_part(self, captured: Captured, folder: str) -> None:
            savers[captured.rank] = self
            if captured.rank == 1:
                super()._write_part(captured, folder)

    monkeypatch.setattr(saving, "Saver", FullOnOne)
    check_like_no_failure(run_toys(3, breakages, prepare=into(tmp_path, 100)))
    assert [savers[rank].breaks for rank in range(3)] == [2, 2, 2]  # that of step 1, and the last one


def test_nor_does_the_last_checkpoint_wait_for_such_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is about to be ended has no time to wait in vain."""
    calls: list[str] = []

    class LastFull(Full):
        def _write_part(self, captured: Captured, folder: str) -> None:
            if captured.rank == 1 and captured.step == STEPS:
                super()._write_part(captured, folder)
            InlineSaver._write_part(self, captured, folder)

        def submit(self, captured: Captured) -> None:
            super().submit(captured)
            if captured.rank == 0:
                calls.append(f"save {captured.step}")
                self.broken = lambda: calls.append("broken")  # type: ignore[method-assign]
                self.wait = lambda timeout_s: not calls.append("wait")  # type: ignore[func-returns-value,method-assign]

    monkeypatch.setattr(saving, "Saver", LastFull)
    run_toys(3, prepare=into(tmp_path, 100))
    assert calls == ["save 1", "wait", "save 8", "broken", "wait"]


def test_a_step_that_is_saved_once_more_gets_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of the first try cannot get into the second."""
    folders: list[str] = []

    class FullOnce(Full):
        def _write_part(self, captured: Captured, folder: str) -> None:
            folders.append(folder)
            if folders.count(folder) == 1 and len(folders) == 2:
                super()._write_part(captured, folder)
            InlineSaver._write_part(self, captured, folder)

    monkeypatch.setattr(saving, "Saver", FullOnce)
    run_toys(1, prepare=into(tmp_path, STEPS))
    assert [folder[:15] for folder in folders] == ["step-0000000001", "step-0000000008", "step-0000000008"]
    assert folders[1] != folders[2]
    assert saved(tmp_path) == [8, 1]


def test_too_little_memory_for_a_copy_ends_nothing(tmp_path: Path) -> None:
    def prepare(toy: Toy) -> None:
        into(tmp_path)(toy)
        toy_durable, capture = toy.durable, toy.durable.capture  # type: ignore[union-attr]

        def refuse(pieces: Any) -> Any:
            if toy.steps == 4 and toy.membership.index == 1:
                raise RuntimeError("can't allocate memory")
            return capture(pieces)

        toy_durable.capture = refuse  # type: ignore[union-attr,method-assign]

    ended = run_toys(2, prepare=prepare)
    check_like_no_failure(ended)
    assert "the checkpoint of step 4 was not saved: can't allocate memory" in told(ended, "warning", "text")


def test_another_run_of_a_state_knows_the_checkpoints_of_the_one_before(tmp_path: Path) -> None:
    """A failure in its first step goes back to them."""

    def prepare(toy: Toy) -> None:
        into(tmp_path, None)(toy)

        def stop(deal: Deal) -> None:
            if toy.steps == 4:
                raise ScriptError

        toy.before_step = stop

    def script(toy: Toy) -> Result:
        with pytest.raises(ScriptError):
            toy.run()
        toy.before_step = lambda deal: None
        return toy.run()

    broken = [Breakage(1, "gradient.0", 5, dies=False)]
    ended = run_toys(2, broken, prepare=prepare, script=script, policy=lambda index: CheckpointRestart(2))
    check_like_no_failure(ended)
    assert told(ended, "restarted", "to") == {4}


def test_it_ends_training_on_all_workers_if_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FullOnOne(Full):
        def _write_part(self, captured: Captured, folder: str) -> None:
            if captured.rank == 1:
                super()._write_part(captured, folder)

    monkeypatch.setattr(saving, "Saver", FullOnOne)
    ended = run_toys(3, prepare=into(tmp_path, end_on_error=True))
    assert {type(error) for error in ended.errors.values()} == {CheckpointError}
    assert "could not be saved: " in str(ended.errors[0])
    assert "worker 1: cannot write: No space left on device" in str(ended.errors[0])


def test_so_does_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FullAtTheEnd(Full):
        def _write_part(self, captured: Captured, folder: str) -> None:
            if captured.rank == 1 and captured.step == STEPS:
                super()._write_part(captured, folder)
            InlineSaver._write_part(self, captured, folder)

    monkeypatch.setattr(saving, "Saver", FullAtTheEnd)
    ended = run_toys(2, prepare=into(tmp_path, 100, end_on_error=True))
    assert {type(error) for error in ended.errors.values()} == {CheckpointError}


def test_what_goes_wrong_after_a_checkpoint_is_saved_does_not_count_against_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CannotClearUp(InlineSaver):
        def endings(self) -> list[SaveEnded]:
            error = StorageError("cannot delete an older one")
            return [replace(ended, error=error) if ended.committed else ended for ended in super().endings()]

    monkeypatch.setattr(saving, "Saver", CannotClearUp)
    ended = run_toys(1, prepare=into(tmp_path, end_on_error=True))
    check_like_no_failure(ended)
    assert ended.events(0, "warning")[0].data["text"] == (
        "after the checkpoint of step 1 was saved: cannot delete an older one"
    )


def test_a_script_may_train_on_when_what_ended_it_is_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = [True]

    class FullForNow(Full):
        def _write_part(self, captured: Captured, folder: str) -> None:
            if full:
                super()._write_part(captured, folder)
            InlineSaver._write_part(self, captured, folder)

    monkeypatch.setattr(saving, "Saver", FullForNow)

    def script(toy: Toy) -> Result:
        with pytest.raises(CheckpointError):
            toy.run()
        full.clear()
        return toy.run()

    check_like_no_failure(run_toys(1, prepare=into(tmp_path, end_on_error=True), script=script))


def test_what_cannot_be_saved_is_found_before_anything_is_trained(tmp_path: Path) -> None:
    def prepare(toy: Toy) -> None:
        into(tmp_path)(toy)
        assert toy.durable is not None
        toy.durable.shared = lambda: {"thing": object()}  # type: ignore[method-assign]

    ended = run_toys(2, prepare=prepare)
    assert {type(error) for error in ended.errors.values()} == {UnsupportedStateError}
    assert "state.thing" in str(ended.errors[0])


def test_so_is_a_tensor_that_cannot_be_saved(tmp_path: Path) -> None:
    def refuse() -> list[TensorSpec]:
        raise UnsupportedStateError("tensor 'weights' is sparse")

    def prepare(toy: Toy) -> None:
        into(tmp_path)(toy)
        assert toy.durable is not None
        toy.durable.tensors = refuse  # type: ignore[method-assign]

    ended = run_toys(2, prepare=prepare)
    assert {type(error) for error in ended.errors.values()} == {UnsupportedStateError}


def test_what_could_not_be_saved_is_saved_when_the_script_has_mended_it(tmp_path: Path) -> None:
    def script(toy: Toy) -> Result:
        assert toy.durable is not None
        sound, toy.durable.shared = toy.durable.shared, lambda: {"thing": object()}  # type: ignore[method-assign]
        with pytest.raises(UnsupportedStateError):
            toy.run()
        toy.durable.shared = sound  # type: ignore[method-assign]
        return toy.run()

    run_toys(1, prepare=into(tmp_path, 4, keep_last=None), script=script)
    assert saved(tmp_path) == [8, 4, 1]


def test_a_state_that_cannot_be_saved_at_all_is_refused(tmp_path: Path) -> None:
    def prepare(toy: Toy) -> None:
        into(tmp_path)(toy)
        toy.durable = None

    ended = run_toys(1, prepare=prepare)
    assert isinstance(ended.errors[0], ConfigurationError)


def test_a_policy_that_needs_checkpoints_needs_a_place_for_them() -> None:
    ended = run_toys(1, policy=lambda index: CheckpointRestart())
    assert "needs a place for checkpoints" in str(ended.errors[0])


def test_all_workers_have_a_place_for_checkpoints_or_none_has(tmp_path: Path) -> None:
    """As for scripts that save on worker 0 alone."""

    def prepare(toy: Toy) -> None:
        if toy.membership.index == 0:
            into(tmp_path)(toy)

    ended = run_toys(2, prepare=prepare)
    assert {type(error) for error in ended.errors.values()} == {DivergenceError}
    assert "worker 0 has a place for checkpoints, and worker 1 has none" in str(ended.errors[1])


@pytest.mark.parametrize("every", [4, 3.0])
def test_one_place_says_how_often(tmp_path: Path, every: float) -> None:
    ended = run_toys(1, prepare=into(tmp_path, 3), policy=lambda index: CheckpointRestart(every))
    assert "leave one of them out" in str(ended.errors[0])


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker, a thread here, is on a host of its own."""
    monkeypatch.setattr(restoring, "here", lambda: str(threading.get_ident()))


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are on one host."""
    monkeypatch.setattr(restoring, "here", lambda: "host")


# --- a job that begins ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_job_goes_on_from_the_newest_checkpoint_with_any_number_of_workers(tmp_path: Path, size: int) -> None:
    job = Job(ledger=tmp_path / "ledger")
    run_first(tmp_path / "run", job)
    ended = run_toys(size, job=job, prepare=into(tmp_path / "run"), attempt=1)
    check_like_no_failure(ended, job)
    assert told(ended, "restored", "to") == {4}


@pytest.mark.usefixtures("together")
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_so_it_does_where_all_are_on_one_host_and_nothing_is_sent(tmp_path: Path, size: int) -> None:
    job = Job(ledger=tmp_path / "ledger")
    run_first(tmp_path / "run", job)
    nothing = [Breakage(index, "transfer.0", 1, (), dies=True) for index in range(size)]
    ended = run_toys(size, nothing, job=job, prepare=into(tmp_path / "run"), attempt=1, must_break=False)
    check_like_no_failure(ended, job)
    assert told(ended, "restored", "to") == {4}


@pytest.mark.usefixtures("together")
def test_from_an_object_store_each_shard_is_fetched_once_even_on_one_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, url = Job(ledger=tmp_path / "ledger"), f"memory://{tmp_path.name}"
    run_first(url, job)
    fetched: list[str] = []
    opened = FsspecStorage.open

    def noted(storage: FsspecStorage, folder: str, file: str) -> BinaryIO:
        fetched.append(file)
        return opened(storage, folder, file)

    monkeypatch.setattr(FsspecStorage, "open", noted)
    ended = run_toys(3, job=job, prepare=into(url), attempt=1)
    check_like_no_failure(ended, job)
    shards = [file for file in fetched if file.endswith(".safetensors")]
    assert len(shards) == len(set(shards)) == 3


@pytest.mark.usefixtures("together")
def test_what_is_damaged_is_passed_over_on_one_host(tmp_path: Path) -> None:
    run_first(tmp_path)
    spoil(tmp_path, 0)
    ended = run_toys(3, prepare=into(tmp_path), attempt=1)
    check_like_no_failure(ended)
    assert told(ended, "restored", "to") == {2}


def test_each_worker_gets_its_own_values_back_and_a_new_one_random_streams_of_its_own(tmp_path: Path) -> None:
    drawn: dict[int, int] = {}

    def prepare(toy: Toy) -> None:
        stopping(tmp_path, 6)(toy)
        toy.draws.value = 100 * toy.membership.index

    run_toys(2, prepare=prepare)

    def look(toy: Toy) -> None:
        into(tmp_path)(toy)

        def first(deal: Deal) -> None:
            drawn.setdefault(toy.membership.index, toy.draws.value)

        toy.before_step = first

    ended = run_toys(3, prepare=look, attempt=1)
    assert drawn == {0: 4, 1: 104, 2: 4}
    assert [call for call in ended.toys[2].calls if call.startswith("joined")] == ["joined 100000 2"]
    assert not [call for call in ended.toys[1].calls if call.startswith("joined")]


def test_a_job_that_was_done_has_nothing_to_do(tmp_path: Path) -> None:
    run_toys(2, prepare=into(tmp_path))
    ended = run_toys(2, prepare=into(tmp_path))
    check_like_no_failure(ended)
    assert told(ended, "restored", "to") == {STEPS}


def test_a_job_begins_anew_where_nothing_was_finished(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.begin(7, "abc")
    ended = run_toys(2, prepare=into(tmp_path))
    check_like_no_failure(ended)
    assert not told(ended, "restored", "to")


def test_an_attempt_that_begins_anew_gives_up_what_the_one_before_has_done(tmp_path: Path) -> None:
    job = Job(ledger=tmp_path / "ledger")
    ended = run_toys(2, job=job, prepare=stopping(tmp_path / "run", 6))
    assert ended.errors
    check_like_no_failure(run_toys(2, job=job, attempt=1), job)


def spoil(folder: Path, nth: int) -> str:
    """Flip a byte of a shard of the nth newest."""
    found = [one.folder for one in CheckpointStore(folder).candidates()][nth]
    file = sorted((folder / found).glob("shard-*"))[-1]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_is_damaged_is_passed_over_whoever_reads_it(tmp_path: Path, size: int) -> None:
    run_first(tmp_path)
    bad = spoil(tmp_path, 0)
    ended = run_toys(size, prepare=into(tmp_path), attempt=1)
    check_like_no_failure(ended)
    assert told(ended, "restored", "to") == {2}
    assert f"the checkpoint {bad} cannot be used" in ended.events(0, "warning")[0].data["text"]


def test_what_can_be_seen_to_be_damaged_without_reading_it_is_named_too(tmp_path: Path) -> None:
    run_first(tmp_path)
    newest = next(iter(CheckpointStore(tmp_path).candidates())).folder
    next((tmp_path / newest).glob("shard-*")).unlink()
    ended = run_toys(2, prepare=into(tmp_path), attempt=1)
    assert told(ended, "restored", "to") == {2}
    (warned,) = ended.events(0, "warning")
    assert warned.data["text"].startswith(f"the checkpoint {newest} cannot be used: shard-0000")


def test_if_none_can_be_used_the_error_lists_them_all_and_why(tmp_path: Path) -> None:
    run_first(tmp_path)
    bad = [spoil(tmp_path, nth) for nth in range(len(saved(tmp_path)))]
    ended = run_toys(2, prepare=into(tmp_path), attempt=1)
    assert {type(error) for error in ended.errors.values()} == {NoCheckpointError}
    assert all(folder in str(ended.errors[1]) for folder in bad)
    assert "has been altered" in str(ended.errors[1])


@pytest.mark.parametrize("size", [1, 2])
def test_a_job_does_not_begin_anew_with_what_was_read_of_a_checkpoint_that_vanishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    run_first(tmp_path)
    read = CheckpointStore.read_worker

    def vanish(store: CheckpointStore, manifest: Manifest, rank: int) -> Any:
        shutil.rmtree(tmp_path, ignore_errors=True)
        return read(store, manifest, rank)

    monkeypatch.setattr(CheckpointStore, "read_worker", vanish)
    ended = run_toys(size, prepare=into(tmp_path), attempt=1)
    assert [type(error) for error in ended.errors.values()] == [NoCheckpointError] * size


def test_a_store_that_cannot_be_listed_a_second_time_is_the_same_error_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_first(tmp_path)
    for folder in tmp_path.iterdir():
        (folder / "values.json").unlink()
    folders, listed = LocalStorage.folders, itertools.count(1)

    def refuse(storage: LocalStorage) -> list[str]:
        if next(listed) == 2:
            raise OSError(errno.EIO, "Input/output error")
        return folders(storage)

    monkeypatch.setattr(LocalStorage, "folders", refuse)
    ended = run_toys(2, prepare=into(tmp_path), attempt=0)
    assert {type(error) for error in ended.errors.values()} == {StorageError}


def test_a_later_attempt_that_cannot_reach_them_asks_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were there before: a storage that is not mounted yet comes back."""
    run_first(tmp_path)

    def refuse(storage: LocalStorage) -> list[str]:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(LocalStorage, "folders", refuse)
    for attempt, kind in enumerate([StorageError, JobLostError]):
        ended = run_toys(2, prepare=into(tmp_path), attempt=attempt)
        assert {type(error) for error in ended.errors.values()} == {kind}


def test_a_checkpoint_of_another_model_is_refused_with_the_tensor(tmp_path: Path) -> None:
    run_first(tmp_path)
    ended = run_toys(2, job=Job(updates=2), prepare=into(tmp_path), attempt=1)
    assert {type(error) for error in ended.errors.values()} == {MismatchError}
    assert "'weights': shape (1, 3) in the checkpoint, (2, 3) here" in str(ended.errors[0])


def test_a_state_that_did_not_fit_can_still_be_trained(tmp_path: Path) -> None:
    """Nothing of the checkpoint was read."""
    job = Job(updates=2)
    run_first(tmp_path)

    def script(toy: Toy) -> Result:
        with pytest.raises(MismatchError):
            toy.run()
        toy.checkpoints = None
        return toy.run()

    check_like_no_failure(run_toys(2, job=job, prepare=into(tmp_path), script=script), job)


NAMES = ["standing", "checkpoint", "values", "hosts", "restored", "transfer.0"]


@pytest.mark.parametrize("reaches", [(), (0,), (2,), (0, 2)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_death_while_a_job_is_restored(tmp_path: Path, name: str, reaches: Sequence[int]) -> None:
    job = Job(ledger=tmp_path / "ledger")
    run_first(tmp_path / "run", job)
    ended = run_toys(3, [Breakage(1, name, 1, reaches)], job, prepare=into(tmp_path / "run"), attempt=1)
    check_like_no_failure(ended, job, dead=[1])
    assert told(ended, "restored", "to") == {4}


# --- going back in place -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reaches", [(), (0,)], ids=str)
@pytest.mark.parametrize("name", ["gradient.0", "changed"])
def test_checkpoint_restart_goes_back_in_place(tmp_path: Path, name: str, reaches: Sequence[int]) -> None:
    job = Job(ledger=tmp_path / "ledger")
    ended = run_toys(
        3, [Breakage(1, name, 6, reaches)], job, prepare=into(tmp_path / "run", None),
        policy=lambda index: CheckpointRestart(2),
    )  # fmt: skip
    check_like_no_failure(ended, job, dead=[1])
    assert {event.data["decision"] for event in ended.events(0, "decision")} == {"Restart"}
    assert told(ended, "restarted", "to") == {4}


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_second_death_on_the_way_back(tmp_path: Path, name: str) -> None:
    job = Job(ledger=tmp_path / "ledger")
    nth = 2 if name == "checkpoint" else 1
    ended = run_toys(
        4, [Breakage(1, "gradient.0", 6), Breakage(2, name, nth)], job, prepare=into(tmp_path / "run", None),
        policy=lambda index: CheckpointRestart(2),
    )  # fmt: skip
    check_like_no_failure(ended, job, dead=[1, 2])


@pytest.mark.parametrize(("step", "to"), [(5, 4), (4, 3)])
def test_the_newest_copy_counts_in_memory_or_not(tmp_path: Path, step: int, to: int) -> None:
    def prepare(toy: Toy) -> None:
        into(tmp_path, None)(toy)
        toy.keep_copies(3)

    breakage = Breakage(1, "gradient.0", step)
    ended = run_toys(3, [breakage], prepare=prepare, policy=lambda index: CheckpointRestart(2))
    check_like_no_failure(ended, dead=[1])
    assert told(ended, "restarted", "to") == {to}


def test_the_policy_is_told_of_the_checkpoint(tmp_path: Path) -> None:
    asked: list[Failure] = []

    def policy(failure: Failure) -> Restart:
        asked.append(failure)
        return Restart()

    run_toys(3, [Breakage(1, "gradient.0", 6)], prepare=into(tmp_path), policy=lambda index: policy)
    assert (asked[0].step, asked[0].checkpoint_step) == (5, 4)
    assert asked[0].checkpoint_age_s is not None
    assert asked[0].costs.restart_s is not None


def test_a_failure_that_rollback_does_not_answer_goes_back_further(tmp_path: Path) -> None:
    breakages = [Breakage(1, "gradient.0", nth, dies=False) for nth in (6, 7)]
    policy = MiniBatchRollback(1) | CheckpointRestart(2)
    ended = run_toys(2, breakages, prepare=into(tmp_path, None), policy=lambda index: policy)
    check_like_no_failure(ended)
    assert [event.data["decision"] for event in ended.events(0, "decision")] == ["Replay", "Restart"]


def test_a_checkpoint_that_was_passed_over_does_not_stand_for_the_last_one(tmp_path: Path) -> None:
    """That of step 6 is damaged, training goes back to step 3, and comes to step 6 again."""
    spoilt: list[str] = []

    def prepare(toy: Toy) -> None:
        into(tmp_path, None, keep_last=None)(toy)
        first = toy.membership.index == 0

        def before(deal: Deal) -> None:
            if first and toy.steps == 6 and not spoilt:
                spoilt.append(spoil(tmp_path, 0))
            if first and toy.steps == 4 and spoilt:
                toy.membership.preempt()

        toy.before_step = before

    breakage = Breakage(1, "gradient.0", 7, dies=False)
    ended = run_toys(2, [breakage], prepare=prepare, policy=lambda index: CheckpointRestart(3))
    assert ended.toys[0].steps == 6
    assert CheckpointStore(tmp_path).newest_valid(Level.FULL).step == 6


@pytest.mark.parametrize("spoilt", [1, 3])
def test_a_copy_in_memory_does_where_newer_checkpoints_are_damaged(tmp_path: Path, spoilt: int) -> None:
    def prepare(toy: Toy) -> None:
        into(tmp_path, None, keep_last=None)(toy)
        toy.keep_copies(3)

        def damage(deal: Deal) -> None:
            if toy.steps == 4 and toy.membership.index == 0:
                for nth in range(spoilt):
                    spoil(tmp_path, nth)

        toy.before_step = damage

    broken = [Breakage(1, "gradient.0", 5, dies=False)]
    ended = run_toys(2, broken, prepare=prepare, policy=lambda index: CheckpointRestart(2))
    check_like_no_failure(ended)
    assert told(ended, "restarted", "to") == {3}


class LateSaver(InlineSaver):
    """Puts the manifest of step 6 in place when ``late`` says so."""

    def __init__(self, store: CheckpointStore, **more: Any) -> None:
        super().__init__(store, **more)
        self.held: Captured | None = None

    def submit(self, captured: Captured) -> None:
        if captured.step == 6 and captured.rank == 0 and self.held is None:
            self.held = captured
            self._write_part(captured, captured.folder)
        else:
            super().submit(captured)

    def drop(self, timeout_s: float) -> None:
        self.held = None

    def late(self) -> None:
        if self.held is not None:
            self._commit(self.held, self.held.folder)


def test_what_was_not_durable_when_training_went_back_never_will_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next failure would bring back a state that was given up."""
    savers: list[LateSaver] = []

    def made(store: CheckpointStore, **more: Any) -> LateSaver:
        savers.append(LateSaver(store, **more))
        return savers[-1]

    monkeypatch.setattr(saving, "Saver", made)

    def prepare(toy: Toy) -> None:
        into(tmp_path / "run", None, keep_last=None)(toy)
        reached: list[int] = []

        def finish_late(deal: Deal) -> None:
            reached.append(toy.steps)
            if toy.steps == 4 and 6 in reached:
                for saver in savers:
                    saver.late()

        toy.before_step = finish_late

    job = Job(ledger=tmp_path / "ledger")
    broken = [Breakage(1, "gradient.0", nth, dies=False) for nth in (7, 8)]
    ended = run_toys(2, broken, job, prepare=prepare, policy=lambda index: CheckpointRestart(2))
    check_like_no_failure(ended, job)
    assert told(ended, "restarted", "to") == {4}


# --- nobody has a whole state --------------------------------------------------------------------------------------


def last_replica_dies(toy: Toy) -> None:
    """Worker 0 alone lives on, and dies while it sends its state to two newcomers."""
    announced: list[bool] = []

    def announce(deal: Deal) -> None:
        if toy.steps == 4 and toy.membership.index == 0 and not announced:
            announced.append(True)
            toy.membership.announce(2)

    toy.before_step = announce


def test_when_the_last_replica_dies_a_checkpoint_is_left(tmp_path: Path) -> None:
    def prepare(toy: Toy) -> None:
        into(tmp_path, None)(toy)
        last_replica_dies(toy)

    ended = run_toys(1, [Breakage(0, "transfer.0", 1)], prepare=prepare,
                     policy=lambda index: MiniBatchRollback() | CheckpointRestart(4))  # fmt: skip
    assert ended.dead == {0}
    for index in (1, 2):
        np.testing.assert_array_equal(ended.results[index].weights, expected(DEFAULT))


def test_without_a_store_the_job_is_lost() -> None:
    ended = run_toys(1, [Breakage(0, "transfer.0", 1)], prepare=last_replica_dies)
    assert {type(error) for error in ended.errors.values()} == {JobLostError}


# --- the end is near -----------------------------------------------------------------------------------------------


def preempting(folder: Path | None, worker: int, step: int) -> Callable[[Toy], None]:
    def prepare(toy: Toy) -> None:
        if folder is not None:
            into(folder, 100, keep_last=None)(toy)

        def notice(deal: Deal) -> None:
            if toy.membership.index == worker and toy.steps + 1 == step:
                toy.membership.preempt()

        toy.before_step = notice

    return prepare


@pytest.mark.parametrize("worker", [0, 2])
def test_a_job_that_is_about_to_be_ended_saves_and_leaves(tmp_path: Path, worker: int) -> None:
    job = Job(ledger=tmp_path / "ledger")
    ended = run_toys(3, job=job, prepare=preempting(tmp_path / "run", worker, 4))
    assert {index: str(error) for index, error in ended.errors.items()} == dict.fromkeys(range(3), "75")
    assert {type(error) for error in ended.errors.values()} == {SystemExit}
    last = saved(tmp_path / "run")[0]
    assert last == ended.toys[0].steps >= 4
    again = run_toys(2, job=job, prepare=into(tmp_path / "run"), attempt=1)
    check_like_no_failure(again, job)
    assert told(again, "restored", "to") == {last}


def test_without_a_store_it_just_leaves() -> None:
    ended = run_toys(3, prepare=preempting(None, 1, 4))
    assert {type(error) for error in ended.errors.values()} == {SystemExit}


@pytest.mark.parametrize("name", ["ending", "written", "durable"])
def test_a_death_while_the_last_checkpoint_is_saved(tmp_path: Path, name: str) -> None:
    nth = 1
    ended = run_toys(3, [Breakage(1, name, nth)], prepare=preempting(tmp_path, 0, 4))
    assert ended.dead == {1}
    assert {type(error) for error in ended.errors.values()} == {SystemExit}
    assert saved(tmp_path)[0] == ended.toys[0].steps


# --- whatever happens ----------------------------------------------------------------------------------------------

DEATHS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from(["gradient.0", "changed", "standing", "decision of the recovery policy", "checkpoint", "values",
                         "hosts", "dropped", "restored", "transfer.0", "finish", "written", "durable", "newest"]),
        st.integers(1, 8),
        st.booleans(),
    ),
    max_size=3,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(first=st.integers(2, STEPS), size=st.integers(1, 4), deaths=DEATHS, restart=st.booleans())
def test_a_job_ends_as_without_failures_or_is_lost(
    tmp_path_factory: pytest.TempPathFactory, first: int, size: int, deaths: Any, restart: bool
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    job = Job(ledger=folder / "ledger")
    run_first(folder / "run", job, before=first)
    breakages = [Breakage(worker, name, nth, dies=dies) for worker, name, nth, dies in deaths if worker < size]
    policy = CheckpointRestart(2) if restart else MiniBatchRollback() | CheckpointRestart(2)
    ended = run_toys(size, breakages, job, prepare=into(folder / "run", None), policy=lambda index: policy,
                     attempt=1, must_break=False)  # fmt: skip
    for error in ended.errors.values():
        assert isinstance(error, RecoveryError), error
    for index, result in ended.results.items() if not ended.errors else ():
        np.testing.assert_array_equal(result.weights, expected(job), err_msg=f"worker {index}")
    if not ended.errors and ended.results:
        check_ledger(job, job.ledger or folder)


