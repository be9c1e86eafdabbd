"""Saves beside the training: several savers on one store, each with its thread. Waits are for events, with a bound."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from horovod_ft.checkpoint import saver as saving
from horovod_ft.checkpoint.inspection import Level
from horovod_ft.checkpoint.local import LocalStorage
from horovod_ft.checkpoint.saver import SaveEnded, Saver
from horovod_ft.checkpoint.store import CheckpointStore
from horovod_ft.errors import CheckpointError, StorageError, UsageError
from tests.unit.checkpoint.made import blank, captured, content, tensors

BOUND_S = 30.0


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "run")


@pytest.fixture
def make(store: CheckpointStore) -> Iterator[Callable[..., Saver]]:
    """Savers on the store; they are closed at the end, and their threads have ended."""
    made: list[Saver] = []
    threads: list[threading.Thread] = []

    def start(run: Callable[[], None]) -> None:
        threads.append(threading.Thread(target=run, daemon=True))
        threads[-1].start()

    def one(on: CheckpointStore = store, **arguments: object) -> Saver:
        made.append(Saver(on, **{"start": start, "wait_s": BOUND_S, **arguments}))  # type: ignore[arg-type]
        return made[-1]

    yield one
    for saver in made:
        saver.close()
        saver.broken()
    for thread in threads:
        thread.join(BOUND_S)
        assert not thread.is_alive()


class Gate:
    """Holds a save up before its memory is ready."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.open.wait(BOUND_S)


def closed(saver: Saver) -> list[SaveEnded]:
    """How its saves have ended, once its thread has."""
    saver.close()
    with saver._changed:
        assert saver._changed.wait_for(lambda: (saver._running, saver._next) == (None, None), BOUND_S)
    return saver.endings()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_savers_of_one_store_make_a_checkpoint(store: CheckpointStore, make: Callable[..., Saver], size: int) -> None:
    savers = [make() for _ in range(size)]
    for rank, saver in enumerate(savers):
        saver.submit(captured(7, rank, size))
    assert all(saver.wait(BOUND_S) for saver in savers)
    room = blank(tensors())
    store.read(store.newest_valid(Level.FULL), room)
    assert content(room) == content(tensors(7))


def test_every_worker_knows_the_newest_that_is_committed(make: Callable[..., Saver]) -> None:
    savers = [make(mono=lambda: 5.0), make(mono=lambda: 5.0)]
    assert savers[1].newest is None
    for rank, saver in enumerate(savers):
        saver.submit(captured(7, rank, 2))
    assert savers[0].wait(BOUND_S)
    (ended,) = closed(savers[1])
    assert ended.committed
    assert [saver.newest for saver in savers] == [(7, 5.0), (7, 5.0)]


@pytest.mark.parametrize("phase", ["save_write", "save_sync", "save_manifest", "save_done"])
def test_one_that_dies_in_any_phase_leaves_none_or_a_whole_one(
    store: CheckpointStore, make: Callable[..., Saver], phase: str
) -> None:
    def at(reached: str, step: int) -> None:
        if reached == phase:
            raise SystemExit("died")

    saver = make(at=at)
    saver.submit(captured(7))
    assert saver.wait(BOUND_S)
    (ended,) = saver.endings()
    assert isinstance(ended.error, SystemExit)
    assert [one.usable for one in store.candidates(Level.FULL)] == ([True] if phase == "save_done" else [])
    assert ended.committed == (phase == "save_done")


def test_it_is_busy_until_the_part_is_written(make: Callable[..., Saver]) -> None:
    saver, gate = make(), Gate()
    saver.submit(captured(7, ready=gate))
    assert gate.reached.wait(BOUND_S)
    assert saver.busy
    assert not saver.wait(0)
    with pytest.raises(UsageError, match="step 8 cannot be saved: step 7 is still being saved"):
        saver.submit(captured(8))
    gate.open.set()
    assert saver.wait(BOUND_S)
    assert not saver.busy
    assert [ended.step for ended in saver.endings()] == [7]


def test_rank_0_is_busy_until_the_others_have_written(make: Callable[..., Saver]) -> None:
    looked = threading.Event()

    def pause(seconds: float) -> None:
        looked.set()

    first, second = make(pause=pause), make()
    first.submit(captured(7, 0, 2))
    assert looked.wait(BOUND_S)
    assert first.busy
    second.submit(captured(7, 1, 2))
    assert first.wait(BOUND_S)
    assert first.newest is not None


def test_another_rank_that_looks_for_a_manifest_takes_a_newer_save(make: Callable[..., Saver]) -> None:
    saver = make()
    saver.submit(captured(7, 1, 2))
    assert saver.wait(BOUND_S)
    saver.submit(captured(8, 1, 2))
    assert saver.wait(BOUND_S)
    ends = [(ended.step, ended.committed, ended.error) for ended in closed(saver)]
    assert ends == [(7, False, None), (8, False, None)]


def test_a_group_that_broke_ends_the_wait_for_others(store: CheckpointStore, make: Callable[..., Saver]) -> None:
    saver = make(grace_s=0.0)
    saver.submit(captured(7, 0, 2))
    saver.broken()
    assert saver.wait(BOUND_S)
    (ended,) = saver.endings()
    assert "after the group broke for what rank 1 should have written" in str(ended.error)
    assert store.storage.folders() == []


def test_a_group_that_broke_before_does_not_matter_to_the_next_save(make: Callable[..., Saver]) -> None:
    savers, gate = [make(grace_s=0.0), make()], Gate()
    savers[0].broken()
    savers[0].submit(captured(7, 0, 2))
    savers[1].submit(captured(7, 1, 2, ready=gate))
    assert gate.reached.wait(BOUND_S)
    gate.open.set()
    assert savers[0].wait(BOUND_S)
    assert savers[0].endings()[0].committed


class Full(LocalStorage):
    full = True

    def write(self, folder: str, file: str, chunks: Iterable[bytes | memoryview]) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(folder, file, chunks)


def test_a_full_disk_is_an_ending_and_the_next_save_works(tmp_path: Path, make: Callable[..., Saver]) -> None:
    storage = Full(tmp_path)
    saver = make(CheckpointStore("unused", storage=storage))
    saver.submit(captured(7))
    assert saver.wait(BOUND_S)
    (ended,) = saver.endings()
    assert isinstance(ended.error, StorageError)
    assert "No space left on device. Free space" in str(ended.error)
    storage.full = False
    saver.submit(captured(8))
    assert saver.wait(BOUND_S)
    assert [one.committed for one in saver.endings()] == [True]


def test_endings_that_nobody_asks_for_do_not_pile_up(tmp_path: Path, make: Callable[..., Saver]) -> None:
    saver = make(CheckpointStore("unused", storage=Full(tmp_path)))
    for step in range(saving.REMEMBERED + 3):
        saver.submit(captured(step))
        assert saver.wait(BOUND_S)
    assert [ended.step for ended in saver.endings()] == list(range(3, saving.REMEMBERED + 3))
    assert saver.endings() == []


def test_what_is_dropped_before_its_manifest_never_becomes_durable(
    store: CheckpointStore, make: Callable[..., Saver]
) -> None:
    gate, saver = Gate(), make()
    saver.submit(captured(7, ready=gate))
    assert gate.reached.wait(BOUND_S)
    saver.drop(BOUND_S)
    gate.open.set()
    assert [(one.committed, one.error) for one in closed(saver)] == [(False, None)]
    assert list(store.candidates()) == []


def test_a_save_after_that_is_another_one(make: Callable[..., Saver]) -> None:
    gate, saver = Gate(), make()
    saver.submit(captured(7, ready=gate))
    assert gate.reached.wait(BOUND_S)
    saver.drop(BOUND_S)
    gate.open.set()
    assert saver.wait(BOUND_S)
    saver.submit(captured(8))
    assert [one.committed for one in closed(saver)] == [False, True]


def test_dropping_waits_for_a_manifest_that_is_being_put_in_place(
    store: CheckpointStore, make: Callable[..., Saver]
) -> None:
    """It has a bound. The save is durable then."""
    gate, commit = Gate(), CheckpointStore.commit

    class Slow(CheckpointStore):
        def commit(self, *given: object, **more: object) -> object:  # type: ignore[override]
            gate()
            return commit(self, *given, **more)  # type: ignore[arg-type]

    saver = make(Slow(store.url))
    saver.submit(captured(7))
    assert gate.reached.wait(BOUND_S)
    with pytest.raises(CheckpointError, match="manifest"):
        saver.drop(0.0)
    gate.open.set()
    saver.drop(BOUND_S)
    assert saver.newest is not None


def test_a_closed_saver_ends_what_it_has_and_takes_no_more(make: Callable[..., Saver]) -> None:
    saver, gate = make(), Gate()
    saver.submit(captured(7, ready=gate))
    saver.close()
    with pytest.raises(UsageError, match="the saver is closed"):
        saver.submit(captured(8))
    gate.open.set()
    assert saver.wait(BOUND_S)
    assert [ended.committed for ended in saver.endings()] == [True]


def test_a_name_that_is_none_is_told_at_once(make: Callable[..., Saver]) -> None:
    saver = make()
    with pytest.raises(UsageError, match="name no checkpoint"):
        saver.submit(captured(7, attempt="../a"))
    assert not saver.busy


def test_no_thread_is_started_before_the_first_save_and_one_for_all(make: Callable[..., Saver]) -> None:
    started: list[Callable[[], None]] = []
    saver = make(start=started.append)
    assert started == []
    saver.submit(captured(7))
    assert len(started) == 1
    saver.close()
    started[0]()
    assert [ended.committed for ended in saver.endings()] == [True]


def test_a_thread_that_cannot_be_had_is_an_ending(make: Callable[..., Saver]) -> None:
    def start(run: Callable[[], None]) -> None:
        raise RuntimeError("can't start new thread")

    saver = make(start=start)
    saver.submit(captured(7))
    assert not saver.busy
    (ended,) = saver.endings()
    assert str(ended.error) == "can't start new thread"
    assert not ended.written  # so that nobody waits for it


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities of their own")
def test_the_saving_thread_is_nice_and_no_other(make: Callable[..., Saver]) -> None:
    found: list[int] = []
    before = os.getpriority(os.PRIO_PROCESS, 0)
    saver = make()
    saver.submit(captured(7, ready=lambda: found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))))
    assert saver.wait(BOUND_S)
    assert found == [max(saving.NICENESS, before)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_where_priorities_cannot_be_set_it_saves_all_the_same(
    make: Callable[..., Saver], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", refused)
    saver = make()
    saver.submit(captured(7))
    assert saver.wait(BOUND_S)
    assert [ended.committed for ended in saver.endings()] == [True]
