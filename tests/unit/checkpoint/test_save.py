"""One save, step by step, on a real folder and a clock that moves only when somebody waits."""

from __future__ import annotations

import contextlib
import errno
import logging
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_ft.checkpoint.inspection import Level
from horovod_ft.checkpoint.local import LocalStorage
from horovod_ft.checkpoint.partition import parts
from horovod_ft.checkpoint.retention import Retention
from horovod_ft.checkpoint.save import Captured, Links, Means, Save, SaveEnded
from horovod_ft.checkpoint.store import CheckpointStore
from horovod_ft.checkpoint.tensors import tensor
from horovod_ft.errors import CheckpointError, NoCheckpointError, StorageError, UnsupportedStateError
from tests.unit.checkpoint.made import VALUES, blank, captured, content, local, save, tensors

FOLDER = "step-0000000007-a"


class Around:
    """What is around the saves of a test: a store, a clock, and what others do at which moment of it.

    Attributes:
        happens: at a moment that is reached while a save waits.
        told: everything that the saves told, in order.
        strikes: the phase at which ``at`` raises.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self.store = store
        self.now = 0.0
        self.happens: list[tuple[float, Callable[[], object]]] = []
        self.naps: list[float] = []
        self.told: list[object] = []
        self.strikes = ""
        self.broke: float | None = None
        self.leave = False
        self.dropped = False
        self.retention: Retention | None = None

    def pause(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now += seconds
        due = [one for one in self.happens if one[0] <= self.now]
        for one in due:
            self.happens.remove(one)
            one[1]()

    def at(self, phase: str, step: int) -> None:
        self.told.append((phase, step))
        if phase == self.strikes:
            raise RuntimeError("struck")

    def run(self, part: Captured) -> SaveEnded:
        means = Means(self.store, self.retention, self.at, lambda: self.now, lambda: 1e9 + self.now, 60.0, 5.0)
        links = Links(
            self.pause, lambda: self.broke, lambda: self.leave, lambda: self.dropped, contextlib.nullcontext(),
            lambda: self.told.append("free"), lambda: self.told.append("durable"),
        )  # fmt: skip
        return Save(part, 0.0, means, links).run()

    def others(self, step: int = 7, size: int = 2) -> None:
        """All but rank 0 write their parts, and go."""
        before, self.leave = self.leave, True
        for rank in range(1, size):
            self.run(captured(step, rank, size))
        self.leave = before


@pytest.fixture
def around(tmp_path: Path) -> Around:
    return Around(CheckpointStore(tmp_path / "run"))


def found(store: CheckpointStore) -> list[int]:
    return [one.step for one in store.candidates(Level.FULL) if one.usable]


# --- a save that is not wanted any more ----------------------------------------------------------------------------


def test_a_save_that_was_dropped_puts_no_manifest_in_place_and_leaves_nothing(around: Around) -> None:
    around.others()
    around.dropped = True
    ended = around.run(captured(7, 0, 2))
    assert (ended.committed, ended.error) == (False, None)
    assert list(around.store.candidates()) == []


def test_it_waits_for_nobody(around: Around) -> None:
    around.happens = [(1.0, lambda: setattr(around, "dropped", True))]
    ended = around.run(captured(7, 0, 2))
    assert (ended.committed, ended.error) == (False, None)
    assert around.now < 3.0


# --- a save that goes well -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_all_have_written_is_a_checkpoint_once_rank_0_has_seen_it(around: Around, size: int) -> None:
    around.others(size=size)
    assert found(around.store) == []
    ended = around.run(captured(7, 0, size))
    manifest, room = around.store.newest_valid(Level.FULL), blank(tensors())
    around.store.read(manifest, room)
    assert (ended.step, ended.folder, ended.committed, ended.error) == (7, FOLDER, True, None)
    assert content(room) == content(tensors(7))
    assert around.store.read_values(manifest) == VALUES
    assert [around.store.read_worker(manifest, rank)["draws"] for rank in range(size)] == [
        local(rank)["draws"] for rank in range(size)
    ]
    assert (manifest.size, manifest.generation, manifest.versions["torch"]) == (size, 4, "2.0")


def test_a_worker_alone_waits_for_nobody(around: Around) -> None:
    around.run(captured(7))
    assert around.naps == []


def test_the_phases_come_in_this_order(around: Around) -> None:
    around.run(captured(7))
    assert around.told == [
        ("save_write", 7), ("save_sync", 7), ("save_manifest", 7), "durable", "free", ("save_done", 7),
    ]  # fmt: skip


def test_another_rank_is_free_once_its_part_is_written(around: Around) -> None:
    around.leave = True
    around.run(captured(7, 1, 2))
    assert around.told == [("save_write", 7), ("save_sync", 7), "free"]


def test_a_part_of_nothing_has_all_phases_too(around: Around) -> None:
    around.run(captured(7, specs=[], parts=[]))
    assert [one for one in around.told if isinstance(one, tuple)] == [
        ("save_write", 7), ("save_sync", 7), ("save_manifest", 7), ("save_done", 7),
    ]  # fmt: skip


def test_half_of_the_bytes_are_written_when_save_write_comes(around: Around, tmp_path: Path) -> None:
    long = tensor("long", "U8", (8 * 2**20,), bytearray(8 * 2**20))
    written: dict[str, int] = {}

    def at(phase: str, step: int) -> None:
        written[phase] = sum(path.stat().st_size for path in (tmp_path / "run" / FOLDER).glob("shard*"))

    around.at = at  # type: ignore[method-assign]
    around.run(captured(7, specs=[long.spec], parts=parts([long], 0, 1)))
    assert 4 * 2**20 <= written["save_write"] < 5 * 2**20
    assert written["save_sync"] > 8 * 2**20


def test_memory_is_read_only_after_it_is_ready(around: Around) -> None:
    data = bytearray(4)
    late = tensor("late", "U8", (4,), data)

    def ready() -> None:
        data[:] = b"true"

    around.run(captured(7, specs=[late.spec], parts=parts([late], 0, 1), ready=ready))
    room = [tensor("late", "U8", (4,), bytearray(4))]
    around.store.read(around.store.newest_valid(), room)
    assert bytes(room[0].data) == b"true"


def test_the_shared_values_of_others_are_not_looked_at(around: Around) -> None:
    around.leave = True
    assert around.run(captured(7, 1, 2, shared=object())).error is None


def test_an_ending_says_how_long_it_took_and_what_was_written_here(around: Around) -> None:
    around.happens = [(3.0, around.others)]
    ended = around.run(captured(7, 0, 2))
    mine = {name: size for name, size in around.store.storage.sizes(FOLDER).items() if "00002-of" not in name}
    assert 3.0 <= ended.seconds < 5.0
    assert ended.nbytes == sum(mine.values()) - mine["manifest.json"]


def test_rank_0_clears_up_after_the_save(around: Around) -> None:
    save(around.store, 5)
    save(around.store, 6)
    around.retention = Retention(keep_last=2)
    around.run(captured(7))
    assert found(around.store) == [7, 6]


# --- waiting for others --------------------------------------------------------------------------------------------


def test_rank_0_looks_for_the_others_at_once_and_then_more_and_more_seldom(around: Around) -> None:
    around.happens = [(9.0, around.others)]
    around.run(captured(7, 0, 2))
    assert around.naps[:7] == [0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0]
    assert max(around.naps) == 1.0
    assert found(around.store) == [7]


def test_a_wait_that_reaches_its_bound_says_for_whom_and_how_long(around: Around) -> None:
    around.run(captured(7, 2, 4, ready=lambda: setattr(around, "leave", True)))
    ended = around.run(captured(7, 0, 4))
    assert isinstance(ended.error, CheckpointError)
    assert str(ended.error).startswith("waited 60.0 s for what ranks 1, 3 should have written in ")
    assert str(ended.error).endswith(f"{FOLDER}. All hosts have to share the place of checkpoints")
    assert around.now == 60.0
    assert not ended.committed


def test_a_save_that_is_given_up_is_deleted_by_rank_0(around: Around) -> None:
    around.run(captured(7, 0, 2))
    assert around.store.storage.folders() == []


@pytest.mark.parametrize(("broke", "until"), [(0.0, 5.0), (20.0, 25.0), (58.0, 60.0)])
def test_after_the_group_broke_the_others_have_a_grace_only(around: Around, broke: float, until: float) -> None:
    around.happens = [(broke, lambda: setattr(around, "broke", broke))]
    ended = around.run(captured(7, 0, 2))
    assert around.now == pytest.approx(until, abs=1.0)
    assert "after the group broke for what rank 1 should" in str(ended.error)


def test_the_grace_begins_when_the_own_part_is_written(around: Around) -> None:
    around.broke = -100.0
    around.happens = [(4.0, around.others)]
    assert around.run(captured(7, 0, 2)).committed


def test_a_document_that_cannot_be_read_is_an_error_at_once(around: Around) -> None:
    around.store.storage.write(FOLDER, "worker-00002-of-00002.json", [b"{"])
    ended = around.run(captured(7, 0, 2))
    assert "worker-00002-of-00002.json cannot be read, or is cut short" in str(ended.error)
    assert around.naps == []


# --- what the others know ------------------------------------------------------------------------------------------


def commits(around: Around, size: int = 2) -> Callable[[], object]:
    return lambda: Around(around.store).run(captured(7, 0, size))


def test_another_rank_waits_until_it_sees_the_manifest(around: Around) -> None:
    around.happens = [(9.0, commits(around))]
    ended = around.run(captured(7, 1, 2))
    assert (ended.committed, ended.error) == (True, None)
    assert around.told[-2:] == ["free", "durable"]


def test_another_rank_leaves_when_a_newer_save_begins_after_a_last_look(around: Around) -> None:
    around.leave = True
    assert (around.run(captured(7, 1, 2)).committed, around.naps) == (False, [])
    commits(around)()
    assert around.run(captured(7, 1, 2)).committed


def test_another_rank_notices_that_rank_0_has_given_up(around: Around) -> None:
    around.happens = [(1.0, lambda: around.store.delete(FOLDER))]
    ended = around.run(captured(7, 1, 2))
    assert "rank 0 has given it up" in str(ended.error)
    assert around.now < 3


def test_another_rank_does_not_wait_for_ever(around: Around) -> None:
    around.others(size=3)
    ended = around.run(captured(7, 1, 3))
    assert "waited 60.0 s for what rank 0 should have written" in str(ended.error)
    assert not ended.committed


def test_another_rank_says_that_only_the_manifest_is_missing(around: Around) -> None:
    around.others()
    shard = around.store.write_shard(FOLDER, 0, 2, [])
    around.store.write_worker(FOLDER, 0, 2, shard, None)
    assert "for the manifest of rank 0 in" in str(around.run(captured(7, 1, 2)).error)


def test_another_rank_deletes_nothing(around: Around) -> None:
    around.run(captured(7, 1, 2))
    assert around.store.storage.folders() == [FOLDER]


# --- what goes wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["save_write", "save_sync", "save_manifest"])
def test_what_strikes_before_the_manifest_leaves_nothing(around: Around, phase: str) -> None:
    save(around.store, 6)
    around.others()
    around.strikes = phase
    ended = around.run(captured(7, 0, 2))
    assert (ended.committed, str(ended.error)) == (False, "struck")
    assert found(around.store) == [6]
    assert around.store.storage.folders() == ["step-0000000006-a"]
    assert "durable" not in around.told


def test_what_strikes_after_the_manifest_leaves_a_whole_one(around: Around) -> None:
    around.strikes = "save_done"
    ended = around.run(captured(7))
    assert (ended.committed, str(ended.error)) == (True, "struck")
    assert found(around.store) == [7]


@pytest.mark.parametrize("phase", ["save_write", "save_sync"])
def test_what_strikes_another_rank_leaves_no_checkpoint(around: Around, phase: str) -> None:
    around.strikes = phase
    assert str(around.run(captured(7, 1, 2)).error) == "struck"
    around.strikes = ""
    assert "rank 1" in str(around.run(captured(7, 0, 2)).error)
    assert found(around.store) == []


def test_an_error_of_ready_is_one_of_the_save(around: Around) -> None:
    def ready() -> None:
        raise MemoryError("no memory on the device")

    ended = around.run(captured(7, ready=ready))
    assert isinstance(ended.error, MemoryError)


@pytest.mark.parametrize("field", ["local", "shared"])
def test_values_that_cannot_be_saved_are_told_with_their_path(around: Around, field: str) -> None:
    values: dict[str, Any] = {field: {"odd": {3}}}
    ended = around.run(captured(7, **values))
    assert isinstance(ended.error, UnsupportedStateError)
    assert str(ended.error).startswith("state.odd: a set")


class Refusing(LocalStorage):
    """Its disk is full for files that begin in some way."""

    beginning = ""

    def write(self, folder: str, file: str, chunks: Iterable[bytes | memoryview]) -> None:
        if self.beginning and file.startswith(self.beginning):
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(folder, file, chunks)

    def delete(self, folder: str, first: str) -> None:
        if self.beginning == "nothing is deleted":
            raise PermissionError(errno.EACCES, "Permission denied")
        super().delete(folder, first)


@pytest.mark.parametrize("file", ["shard", "worker", "values", "manifest"])
def test_a_full_disk_is_told_and_the_next_save_works(tmp_path: Path, file: str) -> None:
    storage = Refusing(tmp_path)
    around = Around(CheckpointStore("unused", storage=storage))
    storage.beginning = file
    ended = around.run(captured(7))
    assert isinstance(ended.error, StorageError)
    assert "No space left on device. Free space" in str(ended.error)
    storage.beginning = ""
    assert around.run(captured(8)).committed
    assert found(around.store) == [8]


def test_what_cannot_be_cleared_up_is_told_and_the_save_counts(tmp_path: Path) -> None:
    storage = Refusing(tmp_path)
    around = Around(CheckpointStore("unused", storage=storage))
    save(around.store, 6)
    storage.beginning, around.retention = "nothing is deleted", Retention(keep_last=1)
    ended = around.run(captured(7))
    assert ended.committed
    assert "cannot delete" in str(ended.error)


def test_a_failed_save_that_cannot_be_deleted_stays_half_written(tmp_path: Path) -> None:
    storage = Refusing(tmp_path)
    around = Around(CheckpointStore("unused", storage=storage))
    storage.beginning, around.strikes = "nothing is deleted", "save_manifest"
    assert str(around.run(captured(7)).error) == "struck"
    with pytest.raises(NoCheckpointError, match="it was never finished"):
        around.store.newest_valid()


def test_an_error_is_logged_and_one_that_was_not_expected_with_where_it_came_from(
    around: Around, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    around.run(captured(7, shared=object()))
    around.strikes = "save_sync"
    around.run(captured(8))
    expected, unexpected = (one for one in caplog.records if "is not saved" in one.getMessage())
    assert expected.getMessage().startswith("step 7 is not saved: state: an object cannot be saved")
    assert (expected.levelno, expected.exc_info) == (logging.INFO, None)
    assert unexpected.getMessage() == "horovod_ft: step 8 is not saved: struck"
    assert (unexpected.levelno, unexpected.exc_info is not None) == (logging.WARNING, True)


def test_an_error_does_not_hold_on_to_the_memory_of_the_save(around: Around, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("horovod_ft"), "disabled", True)  # pytest keeps what is logged
    data = np.zeros(4, np.uint8)
    gone = weakref.ref(data)
    state = [tensor("w", "U8", (4,), data)]
    around.strikes = "save_sync"
    ended = around.run(captured(7, specs=[state[0].spec], parts=parts(state, 0, 1)))
    del data, state
    assert ended.error is not None
    assert gone() is None
