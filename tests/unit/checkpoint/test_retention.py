"""What stays and what goes: never the last one that can be restored, never what is not known for sure."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_ft.checkpoint.inspection import Candidate, Level, Status
from horovod_ft.checkpoint.manifest import Manifest
from horovod_ft.checkpoint.retention import Pruned, Retention, prune
from horovod_ft.checkpoint.store import CheckpointStore
from horovod_ft.errors import ConfigurationError
from tests.unit.checkpoint.made import half, save

LATER = 1e12  # long after any file was written
SHARD = "shard-00001-of-00002.safetensors"


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "run")


def name(step: int) -> str:
    return f"step-{step:010d}-a"


def steps(store: CheckpointStore) -> list[int]:
    return [one.step for one in store.candidates()]


def flip(store: CheckpointStore, manifest: Manifest) -> None:
    path = Path(store.url) / manifest.folder / SHARD
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def kept(retention: Retention, given: list[int]) -> list[int]:
    valid = [Candidate(name(step), Status.VALID) for step in sorted(given, reverse=True)]
    return [one.step for one in retention.kept(valid)]


# --- the rule ------------------------------------------------------------------------------------------------------


def test_the_newest_stay() -> None:
    assert kept(Retention(2), [10, 20, 30]) == [30, 20]


def test_fewer_than_that_all_stay() -> None:
    assert kept(Retention(5), [10, 20]) == [20, 10]


def test_besides_one_for_each_multiple_stays() -> None:
    assert kept(Retention(1, keep_every=100), list(range(50, 450, 50))) == [400, 300, 200, 100]


def test_for_a_multiple_without_a_checkpoint_the_next_one_stays() -> None:
    assert kept(Retention(1, keep_every=100), [95, 110, 190, 305, 306, 390]) == [390, 305, 110]


@given(st.sets(st.integers(0, 60), min_size=1), st.integers(1, 5), st.none() | st.integers(1, 20))
def test_what_stays_stays_when_it_is_asked_again_with_newer_ones(given: set[int], last: int, every: int | None) -> None:
    """So that pruning after every save keeps what one pruning at the end would keep."""
    at_the_end = kept(Retention(last, every), sorted(given))
    stepwise: list[int] = []
    for step in sorted(given):
        stepwise = kept(Retention(last, every), [*stepwise, step])
    assert stepwise == at_the_end
    assert stepwise[0] == max(given)


@pytest.mark.parametrize("wrong", [{"keep_last": 0}, {"keep_last": True}, {"keep_last": 1, "keep_every": 0}])
def test_a_rule_that_keeps_nothing_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="must be a whole number, at least 1"):
        Retention(**wrong)


# --- pruning -------------------------------------------------------------------------------------------------------


def test_what_does_not_stay_is_deleted(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        save(store, step)
    assert prune(store, Retention(2), now=LATER) == Pruned((name(3), name(2)), (name(1),), (), ())
    assert steps(store) == [3, 2]


def test_a_dry_run_says_the_same_and_changes_nothing(store: CheckpointStore) -> None:
    for step in (1, 2):
        save(store, step)
    half(store, 3)
    would = prune(store, Retention(1), now=LATER, dry_run=True)
    assert steps(store) == [3, 2, 1]
    assert prune(store, Retention(1), now=LATER) == would
    assert steps(store) == [2]


def test_damaged_ones_neither_count_nor_are_touched(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        save(store, step)
    (Path(store.url) / name(3) / SHARD).unlink()
    done = prune(store, Retention(1), now=LATER)
    assert (done.kept, done.deleted) == ((name(2),), (name(1),))
    assert done.left == ((name(3), f"damaged: {SHARD} is missing, or is no regular file"),)
    assert steps(store) == [3, 2]


def test_the_last_that_can_be_restored_stays_although_newer_ones_look_well(store: CheckpointStore) -> None:
    first, second, third = save(store, 1), save(store, 2), save(store, 3)
    flip(store, second)
    flip(store, third)
    done = prune(store, Retention(1), now=LATER)
    assert (done.kept, done.deleted) == ((first.folder,), ())
    assert [folder for folder, _ in done.left] == [third.folder, second.folder]
    assert store.newest_valid(Level.FULL) == first


def test_if_none_can_be_restored_none_is_deleted(store: CheckpointStore) -> None:
    for step in (1, 2):
        flip(store, save(store, step))
    done = prune(store, Retention(1), now=LATER)
    assert (done.kept, done.deleted) == ((name(1),), ())
    assert steps(store) == [2, 1]


def test_a_quick_look_trusts_the_sizes(store: CheckpointStore) -> None:
    save(store, 1)
    flip(store, save(store, 2))
    assert prune(store, Retention(1), now=LATER, level=Level.QUICK).kept == (name(2),)


def test_nothing_is_read_when_nothing_has_to_go(store: CheckpointStore) -> None:
    flip(store, save(store, 1))
    assert prune(store, Retention(1), now=LATER).kept == (name(1),)


def test_what_was_just_saved_stays_although_newer_ones_look_well(store: CheckpointStore) -> None:
    """Training has passed over the third, whose bytes were altered, and gone on from the first."""
    first, second, third = save(store, 1), save(store, 2), save(store, 3)
    flip(store, third)
    done = prune(store, Retention(1), now=LATER, running=[second.folder], level=Level.QUICK)
    assert (done.kept, done.deleted) == ((third.folder, second.folder), (first.folder,))
    assert store.newest_valid(damaged={third.folder: "altered"}) == second


def test_foreign_and_newer_ones_are_not_touched(store: CheckpointStore) -> None:
    save(store, 1)
    newer = save(store, 2)
    path = Path(store.url) / newer.folder / "manifest.json"
    path.write_text(path.read_text().replace('"version":1', '"version":9'))
    (Path(store.url) / "tensorboard").mkdir()
    done = prune(store, Retention(1), now=LATER)
    left = [(folder, why.split(":")[0]) for folder, why in done.left]
    assert left == [(newer.folder, "newer"), ("tensorboard", "foreign")]
    assert len(steps(store)) == 3


# --- attempts without a manifest -----------------------------------------------------------------------------------


def test_an_abandoned_attempt_is_deleted_with_its_temporary_files(store: CheckpointStore) -> None:
    save(store, 1)
    folder, _ = half(store, 2)
    (Path(store.url) / folder / "shard-00002-of-00002.safetensors.tmp").touch()
    assert prune(store, Retention(1), now=LATER).abandoned == (folder,)
    assert steps(store) == [1]


def test_one_that_was_written_lately_may_still_be_running(store: CheckpointStore) -> None:
    folder, _ = half(store, 2)
    for path in (Path(store.url) / folder, *(Path(store.url) / folder).iterdir()):
        os.utime(path, (1000.0, 1000.0))
    early = prune(store, Retention(1), now=1099.0, grace_s=100.0)
    assert (early.abandoned, early.left) == ((), ((folder, "half written: it was last written 99 s ago"),))
    assert prune(store, Retention(1), now=1100.0, grace_s=100.0).abandoned == (folder,)


def test_the_newest_file_in_it_counts(store: CheckpointStore) -> None:
    folder, _ = half(store, 2)
    for path in (Path(store.url) / folder).iterdir():
        os.utime(path, (1000.0, 1000.0))
    os.utime(Path(store.url) / folder / SHARD, (1090.0, 1090.0))
    os.utime(Path(store.url) / folder, (1000.0, 1000.0))
    assert prune(store, Retention(1), now=1150.0, grace_s=100.0).abandoned == ()


def test_one_that_is_named_as_running_stays_whatever_its_age(store: CheckpointStore) -> None:
    folder, commit = half(store, 2)
    done = prune(store, Retention(1), now=LATER, running=[folder])
    assert (done.abandoned, done.left) == ((), ((folder, "half written: it is being written"),))
    assert commit().step == 2


def test_one_whose_age_is_unknown_stays(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = half(store, 2)
    monkeypatch.setattr(store.storage, "modified", lambda folder: None)
    assert prune(store, Retention(1), now=LATER).left == (
        (folder, "half written: the storage does not say when it was last written"),
    )
