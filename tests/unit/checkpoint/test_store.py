"""Saving, finding and restoring, on a real folder; what is not a checkpoint is named, and the one before it is used."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from horovod_ft.checkpoint.checksum import CHUNK
from horovod_ft.checkpoint.inspection import Level, Status
from horovod_ft.checkpoint.layout import folder_name
from horovod_ft.checkpoint.local import LocalStorage
from horovod_ft.checkpoint.manifest import Manifest
from horovod_ft.checkpoint.partition import parts
from horovod_ft.checkpoint.store import CheckpointStore
from horovod_ft.checkpoint.tensors import Tensor, tensor
from horovod_ft.errors import (
    CheckpointError,
    DamagedCheckpointError,
    MismatchError,
    NoCheckpointError,
    StorageError,
    UnsupportedStateError,
    UsageError,
)
from horovod_ft.version import __version__
from tests.unit.checkpoint.made import VALUES, blank, content, half, local, problems, save, tensors

FIRST = "shard-00001-of-00002.safetensors"
SECOND = "shard-00002-of-00002.safetensors"
OWN = "worker-00002-of-00002.json"


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "run", wall=lambda: 1000.5)


def at(store: CheckpointStore, manifest: Manifest, file: str) -> Path:
    return Path(store.url) / manifest.folder / file


def flip(path: Path, where: int = 50) -> None:
    data = bytearray(path.read_bytes())
    data[where] ^= 4
    path.write_bytes(data)


# --- saving and restoring ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 30])
@pytest.mark.parametrize("readers", [1, 2, 5])
def test_what_any_number_of_workers_saved_any_number_restores(store: CheckpointStore, size: int, readers: int) -> None:
    manifest = save(store, 7, size=size)
    into = blank(tensors())
    read = [index for rank in range(readers) for index in store.plan_read(manifest, rank, readers)]
    for index in read:
        store.read_shard(manifest, index, into)
    assert sorted(read) == list(range(size))
    assert content(into) == content(tensors(7))


def test_one_worker_reads_it_all(store: CheckpointStore) -> None:
    into = blank(tensors())
    store.read(save(store, 7), into)
    assert content(into) == content(tensors(7))
    assert store.read_values(store.newest_valid()) == VALUES


def test_the_manifest_says_what_was_saved_by_whom_and_when(store: CheckpointStore) -> None:
    manifest = save(store, 7, "b2")
    assert manifest == store.newest_valid()
    assert (manifest.step, manifest.attempt, manifest.generation, manifest.size) == (7, "b2", 4, 2)
    assert manifest.created == 1000.5
    assert manifest.versions["horovod_ft"] == __version__
    assert manifest.versions["torch"] == "2.0"
    assert manifest.tensors == tuple(one.spec for one in tensors())


def test_a_shard_on_the_disk_is_a_safetensors_file(store: CheckpointStore) -> None:
    manifest = save(store, 7, size=1)
    found = safetensors.numpy.load_file(at(store, manifest, "shard-00001-of-00001.safetensors"))
    assert found["net.weight"].tobytes() == bytes(tensors(7)[0].data)
    assert found["net.weight"].shape == (5, 3)


def test_read_pieces_are_told_so_that_they_can_be_sent_to_others(store: CheckpointStore) -> None:
    manifest = save(store, 7)
    told = [piece for index in (0, 1) for piece in store.read_shard(manifest, index, blank(tensors()))]
    assert sorted(told, key=str) == sorted((piece for shard in manifest.shards for piece in shard.pieces), key=str)


def test_values_that_need_pickle_are_refused_with_their_path(store: CheckpointStore) -> None:
    with pytest.raises(UnsupportedStateError, match=r"^state\.scheduler\['milestones'\]\[2\]: a set"):
        store.write_values(store.begin(1, "a"), {"scheduler": {"milestones": [1, 2, {3}]}})


def test_pickled_values_need_permission_on_both_sides(tmp_path: Path) -> None:
    free, strict = CheckpointStore(tmp_path, allow_pickle=True), CheckpointStore(tmp_path)
    state = tensors()
    folder = free.begin(1, "a")
    shard = free.write_shard(folder, 0, 1, parts(state, 0, 1))
    worker = free.write_worker(folder, 0, 1, shard, {"own": {4}})
    record = free.write_values(folder, {"odd": {3}})
    manifest = free.commit(folder, [one.spec for one in state], [shard], [worker], record)
    assert strict.newest_valid().pickled == ("state.odd", "state.own")
    with pytest.raises(UnsupportedStateError, match=r"^state\.odd was saved with pickle"):
        strict.read_values(manifest)
    with pytest.raises(UnsupportedStateError, match=r"^state\.own was saved with pickle"):
        strict.read_worker(manifest, 0)
    assert free.read_values(manifest) == {"odd": {3}}
    assert free.read_worker(manifest, 0) == {"own": {4}}


def test_each_worker_has_values_of_its_own_bit_for_bit(store: CheckpointStore) -> None:
    manifest = save(store, 7)
    for rank in (0, 1):
        found = store.read_worker(manifest, rank)
        assert found["draws"] == local(rank)["draws"]
        assert math.isnan(found["running_mean"])


def test_own_values_that_need_pickle_are_refused_with_their_path(store: CheckpointStore) -> None:
    folder = folder_name(1, "a")
    shard = store.write_shard(folder, 0, 1, [])
    with pytest.raises(UnsupportedStateError, match=r"^state\.odd: a set"):
        store.write_worker(folder, 0, 1, shard, {"odd": {3}})
    assert store.unwritten(folder, 1) == [0]


def test_whoever_writes_first_makes_the_folder(store: CheckpointStore) -> None:
    folder = folder_name(1, "a")
    store.write_shard(folder, 1, 2, parts(tensors(), 1, 2))
    assert [one.folder for one in store.candidates()] == [folder]


# --- what workers tell each other through the store ----------------------------------------------------------------


def test_who_has_not_written_yet_is_known(store: CheckpointStore) -> None:
    folder, state = folder_name(7, "a"), tensors()
    assert store.unwritten(folder, 3) == [0, 1, 2]
    shard = store.write_shard(folder, 1, 3, parts(state, 1, 3))
    assert store.unwritten(folder, 3) == [0, 1, 2]
    store.write_worker(folder, 1, 3, shard, None)
    assert store.unwritten(folder, 3) == [0, 2]


def test_what_a_worker_has_written_is_read_by_the_one_that_commits(store: CheckpointStore) -> None:
    folder, state = folder_name(7, "a"), tensors()
    shard = store.write_shard(folder, 0, 1, parts(state, 0, 1))
    worker = store.write_worker(folder, 0, 1, shard, local(0))
    assert store.written(folder, 0, 1) == (shard, worker)


def test_what_is_pickled_is_told_to_the_one_that_commits(tmp_path: Path) -> None:
    free, folder = CheckpointStore(tmp_path, allow_pickle=True), folder_name(7, "a")
    free.write_worker(folder, 0, 1, free.write_shard(folder, 0, 1, []), {"odd": {3}})
    assert CheckpointStore(tmp_path).written(folder, 0, 1)[1].pickled == ("state.odd",)


def test_any_flipped_bit_of_what_a_worker_tells_is_found(store: CheckpointStore) -> None:
    folder = folder_name(7, "a")
    store.write_worker(folder, 0, 1, store.write_shard(folder, 0, 1, []), 5)
    path = Path(store.url) / folder / "worker-00001-of-00001.json"
    good, missed = path.read_bytes(), []
    for place in range(8 * len(good)):
        bad = bytearray(good)
        bad[place // 8] ^= 1 << place % 8
        path.write_bytes(bad)
        try:
            store.written(folder, 0, 1)
            missed.append(place)
        except DamagedCheckpointError:
            pass
    assert not missed


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}"])
def test_a_worker_file_that_cannot_be_read_is_told_with_its_name(store: CheckpointStore, data: bytes) -> None:
    folder = folder_name(7, "a")
    store.storage.write(folder, "worker-00001-of-00001.json", [data])
    with pytest.raises(DamagedCheckpointError, match=rf"{folder}: worker-00001-of-00001\.json cannot be read"):
        store.written(folder, 0, 1)


def test_the_bytes_of_a_shard_are_told_before_each_chunk_and_before_they_are_brought_to_the_disk(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments: list[object] = []
    sync = os.fsync

    def seen(fd: int) -> None:
        moments.append("fsync")
        sync(fd)

    state = [tensor("long", "U8", (CHUNK + 5,), bytearray(CHUNK + 5))]
    folder = store.begin(7, "a")
    monkeypatch.setattr(os, "fsync", seen)
    shard = store.write_shard(folder, 0, 1, parts(state, 0, 1), told=lambda done, total: moments.append((done, total)))
    header, total = shard.nbytes - shard.payload, shard.nbytes
    expected = [(0, total), (header, total), (header + CHUNK, total), (total, total), "fsync"]
    assert moments[: len(expected)] == expected


def test_an_error_of_whoever_is_told_leaves_no_shard(store: CheckpointStore) -> None:
    def told(done: int, total: int) -> None:
        if done == total:
            raise RuntimeError("struck")

    folder = store.begin(7, "a")
    with pytest.raises(RuntimeError, match="struck"):
        store.write_shard(folder, 0, 1, parts(tensors(), 0, 1), told=told)
    assert store.storage.sizes(folder) == {}


def test_two_attempts_at_one_step_do_not_touch_each_other(store: CheckpointStore) -> None:
    half(store, 7, "a")
    manifest = save(store, 7, "b")
    assert store.newest_valid() == manifest


def test_an_attempt_that_is_there_already_is_not_written_into(store: CheckpointStore) -> None:
    save(store, 7, "a")
    with pytest.raises(StorageError, match=r"step-0000000007-a: File exists\. Give each attempt an id of its own"):
        store.begin(7, "a")


def test_names_that_are_none_are_refused(store: CheckpointStore) -> None:
    with pytest.raises(UsageError):
        store.begin(1, "../a")
    with pytest.raises(StorageError, match="could lead out of the folder"):
        store.write_shard("..", 0, 1, [])
    with pytest.raises(CheckpointError, match="use that which layout"):
        store.commit("..", [], [], [], store.write_values(store.begin(1, "a"), 0))


# --- what does not fit ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (tensor("net.weight", "F32", (3, 5), bytearray(60)), r"'net\.weight': shape \(5, 3\) in the .*, \(3, 5\) here"),
        (tensor("net.weight", "I32", (5, 3), bytearray(60)), r"'net\.weight': dtype F32 in the checkpoint, I32 here"),
        (tensor("net.wait", "F32", (5, 3), bytearray(60)), r"'net\.wait' is not in the checkpoint"),
    ],
)  # fmt: skip
def test_another_model_is_refused_with_the_tensor_and_nothing_is_read(
    store: CheckpointStore, wrong: Tensor, told: str
) -> None:
    manifest = save(store, 7)
    into = [wrong, *blank(tensors())[1:]]
    with pytest.raises(MismatchError, match=told):
        store.read(manifest, into)
    assert not any(map(any, content(into)))


def test_a_single_shard_does_not_write_into_memory_of_another_shape(store: CheckpointStore) -> None:
    with pytest.raises(MismatchError, match=r"'net\.weight'"):
        store.read_shard(save(store, 7), 0, [tensor("net.weight", "F32", (2,), bytearray(8))])


# --- half written --------------------------------------------------------------------------------------------------


def test_an_empty_store_says_that_it_holds_none(store: CheckpointStore) -> None:
    with pytest.raises(NoCheckpointError, match=rf"{store.url} holds none$") as error:
        store.newest_valid()
    assert error.value.problems == ()
    assert not Path(store.url).exists()


def test_a_kill_before_the_manifest_leaves_no_checkpoint_and_the_one_before_is_used(store: CheckpointStore) -> None:
    before = save(store, 7)
    folder, _ = half(store, 8)
    assert store.newest_valid() == before
    assert "has no manifest" in problems(store)[folder]


def test_it_becomes_one_with_the_manifest(store: CheckpointStore) -> None:
    save(store, 7)
    _, commit = half(store, 8)
    assert commit() == store.newest_valid()


def test_a_commit_without_a_shard_is_refused(store: CheckpointStore) -> None:
    state = tensors()
    folder = store.begin(1, "a")
    shard = store.write_shard(folder, 0, 2, parts(state, 0, 2))
    with pytest.raises(CheckpointError, match="not the name of shard 1 of 1"):
        store.commit(folder, [one.spec for one in state], [shard], [], store.write_values(folder, 0))
    assert problems(store).keys() == {folder}


def test_a_commit_whose_shard_lies_on_another_host_says_that_the_folder_is_not_shared(
    store: CheckpointStore, tmp_path: Path
) -> None:
    elsewhere, state = CheckpointStore(tmp_path / "other host"), tensors()
    folder = store.begin(1, "a")
    here = store.write_shard(folder, 0, 2, parts(state, 0, 2))
    there = elsewhere.write_shard(folder, 1, 2, parts(state, 1, 2))
    workers = [store.write_worker(folder, rank, 2, shard, None) for rank, shard in enumerate((here, there))]
    with pytest.raises(CheckpointError, match=rf"{SECOND} is missing.* All hosts must see the same folder"):
        store.commit(folder, [one.spec for one in state], [here, there], workers, store.write_values(folder, 0))
    assert problems(store).keys() == {folder}


# --- damage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", [FIRST, SECOND, OWN, "values.json"])
def test_a_missing_file_is_named_and_the_checkpoint_before_is_used(store: CheckpointStore, file: str) -> None:
    before, bad = save(store, 7), save(store, 8)
    at(store, bad, file).unlink()
    assert store.newest_valid() == before
    assert problems(store) == {bad.folder: f"{file} is missing, or is no regular file"}


@pytest.mark.parametrize("file", [FIRST, SECOND, OWN, "values.json"])
def test_a_file_that_is_cut_short_is_named_and_the_checkpoint_before_is_used(store: CheckpointStore, file: str) -> None:
    before, bad = save(store, 7), save(store, 8)
    data = at(store, bad, file).read_bytes()
    at(store, bad, file).write_bytes(data[:-1])
    assert store.newest_valid() == before
    assert problems(store) == {bad.folder: f"{file} has {len(data) - 1} bytes, and its manifest says {len(data)}"}


@pytest.mark.parametrize("file", [FIRST, SECOND, OWN, "values.json"])
def test_a_flipped_bit_is_found_when_every_byte_is_read(store: CheckpointStore, file: str) -> None:
    before, bad = save(store, 7), save(store, 8)
    flip(at(store, bad, file), 5)
    assert store.newest_valid() == bad
    assert store.newest_valid(Level.FULL) == before
    found = store.verify(bad.folder)
    assert (found.status, found.usable) == (Status.DAMAGED, False)
    assert f"{file} has been altered: its checksum is" in found.problem
    assert store.verify(bad.folder, Level.QUICK).usable


def test_a_flipped_bit_is_found_while_restoring_and_the_caller_passes_over_it(store: CheckpointStore) -> None:
    before, bad = save(store, 7), save(store, 8)
    flip(at(store, bad, FIRST), -1)
    with pytest.raises(DamagedCheckpointError, match=rf"{bad.folder}: {FIRST} has been altered") as error:
        store.read(bad, blank(tensors()))
    assert store.newest_valid(damaged={bad.folder: str(error.value)}) == before


def test_values_that_were_altered_are_found_while_restoring(store: CheckpointStore) -> None:
    bad = save(store, 8)
    flip(at(store, bad, "values.json"), 12)
    with pytest.raises(DamagedCheckpointError, match=r"values\.json has been altered"):
        store.read_values(bad)


def test_own_values_that_were_altered_are_found_while_restoring(store: CheckpointStore) -> None:
    bad = save(store, 8)
    flip(at(store, bad, OWN), 12)
    store.read_worker(bad, 0)
    with pytest.raises(DamagedCheckpointError, match=f"{OWN} has been altered"):
        store.read_worker(bad, 1)


def test_a_file_that_vanishes_while_restoring_is_damage_too(store: CheckpointStore) -> None:
    bad = save(store, 8)
    at(store, bad, SECOND).unlink()
    with pytest.raises(DamagedCheckpointError, match=f"{SECOND} is missing"):
        store.read_shard(bad, 1, blank(tensors()))


def test_a_manifest_that_is_cut_short_is_named_and_the_checkpoint_before_is_used(store: CheckpointStore) -> None:
    before, bad = save(store, 7), save(store, 8)
    path = at(store, bad, "manifest.json")
    path.write_bytes(path.read_bytes()[:40])
    assert store.newest_valid() == before
    assert "its manifest cannot be read, or is cut short" in problems(store)[bad.folder]


def test_a_newer_format_is_named_and_the_checkpoint_before_is_used(store: CheckpointStore) -> None:
    before, newer = save(store, 7), save(store, 8)
    path = at(store, newer, "manifest.json")
    path.write_text(path.read_text().replace('"version":1', '"version":2'))
    assert store.newest_valid() == before
    (found,) = (one for one in store.candidates() if one.step == 8)
    assert found.status is Status.NEWER
    assert "has version 2, and this horovod_ft reads versions up to 1" in found.problem


def test_a_foreign_folder_is_named_and_never_used(store: CheckpointStore) -> None:
    good = save(store, 7)
    (Path(store.url) / "tensorboard").mkdir()
    (Path(store.url) / "notes.txt").touch()
    foreign = Path(store.url) / "step-0000000009-x"
    foreign.mkdir()
    (foreign / "manifest.json").write_text(json.dumps({"layers": 3}))
    assert store.newest_valid() == good
    assert [(one.folder, one.status) for one in store.candidates()] == [
        ("step-0000000009-x", Status.FOREIGN), (good.folder, Status.VALID), ("tensorboard", Status.FOREIGN),
    ]  # fmt: skip


def test_if_none_is_valid_the_error_lists_all_with_why(store: CheckpointStore) -> None:
    altered, short, (unfinished, _) = save(store, 6), save(store, 7), half(store, 8)
    at(store, short, FIRST).write_bytes(b"")
    with pytest.raises(NoCheckpointError) as error:
        store.newest_valid(damaged={altered.folder: "found out while reading"})
    lines = str(error.value).splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:]] == [unfinished, short.folder, altered.folder]
    assert lines[1].endswith("it has no manifest: it was never finished")
    assert f"{FIRST} has 0 bytes" in lines[2]
    assert lines[3].endswith("found out while reading")
    assert [folder for folder, _ in error.value.problems] == [unfinished, short.folder, altered.folder]


def test_of_one_step_the_one_saved_last_is_the_newest(tmp_path: Path) -> None:
    clock = iter([300.0, 100.0, 200.0])
    store = CheckpointStore(tmp_path, wall=lambda: next(clock))
    for attempt in "abc":
        save(store, 7, attempt)
    assert [one.folder[-1] for one in store.candidates()] == ["a", "c", "b"]


def test_newest_is_by_step_and_not_by_time(tmp_path: Path) -> None:
    clock = iter([300.0, 100.0])
    store = CheckpointStore(tmp_path, wall=lambda: next(clock))
    save(store, 7)
    assert save(store, 8) == store.newest_valid()


def test_only_as_many_are_looked_at_as_are_needed(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(5):
        save(store, step)
    looked: list[str] = []
    sizes = store.storage.sizes

    def look(folder: str) -> dict[str, int]:
        looked.append(folder)
        return sizes(folder)

    monkeypatch.setattr(store.storage, "sizes", look)
    assert store.newest_valid().step == 4
    assert looked == ["step-0000000004-a"]


# --- links ---------------------------------------------------------------------------------------------------------


def test_a_shard_that_is_a_link_out_of_the_folder_is_not_followed(store: CheckpointStore, tmp_path: Path) -> None:
    before, bad = save(store, 7), save(store, 8)
    outside = tmp_path / "outside"
    at(store, bad, FIRST).rename(outside)
    at(store, bad, FIRST).symlink_to(outside)
    assert store.newest_valid() == before
    assert problems(store) == {bad.folder: f"{FIRST} is missing, or is no regular file"}
    with pytest.raises(StorageError, match=rf"{FIRST}: .*links are not followed"):
        store.read(bad, blank(tensors()))


def test_a_checkpoint_that_is_a_link_is_not_followed_nor_deleted(store: CheckpointStore, tmp_path: Path) -> None:
    good, away = save(store, 7), tmp_path / "away"
    (Path(store.url) / good.folder).rename(away)
    (Path(store.url) / good.folder).symlink_to(away)
    (found,) = store.candidates()
    assert found.status is Status.UNREADABLE
    assert "a link, which is not followed" in found.problem
    with pytest.raises(StorageError):
        store.delete(good.folder)
    assert (away / "manifest.json").exists()


# --- storage that refuses ------------------------------------------------------------------------------------------


class Refusing(LocalStorage):
    """A folder whose disk fails on files that end in some way, after the first bytes of them."""

    ending = ""
    code = errno.ENOSPC

    def write(self, folder: str, file: str, chunks: Iterable[bytes | memoryview]) -> None:
        def failing() -> Iterable[bytes | memoryview]:
            yield from list(chunks)[:1]
            raise OSError(self.code, {errno.ENOSPC: "No space left on device", errno.EROFS: "Read-only"}[self.code])

        super().write(folder, file, failing() if self.ending and file.endswith(self.ending) else chunks)


@pytest.mark.parametrize("ending", ["00002.safetensors", "00002.json", "values.json", "manifest.json"])
def test_a_full_disk_is_told_with_what_and_where_and_what_to_do_and_leaves_no_checkpoint(
    tmp_path: Path, ending: str
) -> None:
    storage = Refusing(tmp_path)
    store = CheckpointStore("unused", storage=storage)
    before = save(store, 7)
    storage.ending = ending
    with pytest.raises(StorageError) as error:
        save(store, 8)
    assert str(error.value).startswith(f"cannot write {tmp_path}/step-0000000008-a/")
    assert "No space left on device. Free space, for example with `horovod-ft checkpoints prune`" in str(error.value)
    assert store.newest_valid() == before
    assert not [path for path in (tmp_path / "step-0000000008-a").iterdir() if path.name.endswith((ending, ".tmp"))]


def test_a_read_only_store_is_told(tmp_path: Path) -> None:
    storage = Refusing(tmp_path)
    storage.ending, storage.code = ".safetensors", errno.EROFS
    with pytest.raises(StorageError, match=r"Read-only\. Mount it writable, or use another folder"):
        save(CheckpointStore("unused", storage=storage), 7)


def test_a_store_below_a_folder_that_is_missing_is_told(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"No such file or directory\. Make the folder above it, or mount"):
        CheckpointStore(tmp_path / "not mounted" / "run").begin(1, "a")
    assert not (tmp_path / "not mounted").exists()


def test_a_store_that_is_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(StorageError, match="a folder is needed there"):
        CheckpointStore(tmp_path / "run").begin(1, "a")
    with pytest.raises(StorageError, match="cannot list checkpoints in"):
        CheckpointStore(tmp_path / "run").newest_valid()


class Unreadable(LocalStorage):
    """One checkpoint of it cannot be read."""

    bad = ""

    def sizes(self, folder: str) -> dict[str, int]:
        if folder == self.bad:
            raise PermissionError(errno.EACCES, "Permission denied")
        return super().sizes(folder)


def test_a_checkpoint_that_cannot_be_read_does_not_hide_the_others(tmp_path: Path) -> None:
    storage = Unreadable(tmp_path)
    store = CheckpointStore("unused", storage=storage)
    good, storage.bad = save(store, 7), save(store, 8).folder
    assert store.newest_valid() == good
    (found,) = (one for one in store.candidates() if one.step == 8)
    assert (found.status, found.manifest) == (Status.UNREADABLE, None)
    assert "Permission denied" in found.problem


# --- deleting ------------------------------------------------------------------------------------------------------


def test_what_is_deleted_is_gone_and_nothing_else(store: CheckpointStore) -> None:
    kept, gone = save(store, 7), save(store, 8)
    store.delete(gone.folder)
    assert [one.folder for one in store.candidates()] == [kept.folder]


def test_only_what_is_named_as_a_checkpoint_is_deleted(store: CheckpointStore) -> None:
    save(store, 7)
    for name in ("..", "tensorboard", "/tmp", ""):
        with pytest.raises(CheckpointError, match="not named as a checkpoint"):
            store.delete(name)


def test_arrays_of_numpy_are_tensors_as_they_are(store: CheckpointStore) -> None:
    state = [tensor("w", "F64", (3,), np.arange(3.0))]
    folder = store.begin(1, "a")
    shard = store.write_shard(folder, 0, 1, parts(state, 0, 1))
    worker = store.write_worker(folder, 0, 1, shard, None)
    manifest = store.commit(folder, [state[0].spec], [shard], [worker], store.write_values(folder, None))
    room = np.zeros(3)
    store.read(manifest, [tensor("w", "F64", (3,), room)])
    assert room.tolist() == [0.0, 1.0, 2.0]
