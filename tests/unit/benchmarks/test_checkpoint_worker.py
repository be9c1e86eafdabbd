"""The worker of ``checkpoint.py``: what it does in turn, and what it puts on record. One process, no job."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.workers import checkpoint_sides
from benchmarks.workers.checkpoint import PLAIN_STEPS, Turns
from benchmarks.workers.checkpoint_sides import (
    Ballast,
    Lines,
    OneFile,
    OnRequest,
    Ours,
    Request,
    Trained,
    cut,
    written,
)
from horovod_ft.events import EventBus
from horovod_ft.policies.checkpoint_restart import checkpoint_restart_in
from horovod_ft.policies.rollback import MiniBatchRollback


def read(folder: Path, what: str, rank: int = 0) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / f"lines-{rank}.jsonl").read_text().splitlines()]
    return [line for line in lines if line["what"] == what]


# --- the state -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nbytes", "sizes"), [(0, []), (8, [8]), (20, [20]), (48, [20, 20, 8])])
def test_pieces_are_all_bytes_together(nbytes: int, sizes: list[int]) -> None:
    assert list(cut(nbytes, 20)) == sizes


def test_the_ballast_has_its_size_and_needs_no_gradients() -> None:
    ballast = Ballast(24_000_000)
    assert [piece.numel() * 4 for piece in ballast.parameters()] == [20_000_000, 4_000_000]
    assert not any(piece.requires_grad for piece in ballast.parameters())


def test_ballast_that_was_not_restored_is_noticed() -> None:
    ballast = Ballast(400)
    saved = {name: piece.clone() for name, piece in ballast.state_dict().items()}
    ballast.spoil()
    with pytest.raises(ValueError, match="piece 1 was not restored"):
        ballast.check()
    ballast.load_state_dict(saved)
    ballast.check()


# --- turns ---------------------------------------------------------------------------------------------------------


class FakeSide:
    """Tells what is asked of it; its saves last three steps."""

    def __init__(self, name: str, did: list[str], ballast: Ballast) -> None:
        self._name = name
        self._did = did
        self._ballast = ballast
        self._left = 0

    def save(self) -> None:
        self._did.append(f"save {self._name}")
        self._left = 3

    def saved(self) -> bool:
        self._left -= 1
        return self._left == 0

    def restore(self) -> None:
        self._did.append(f"restore {self._name}")
        self._ballast.pieces[0].fill_(1.0)

    def clear(self) -> None:
        self._did.append(f"clear {self._name}")


class World:
    """A worker whose steps take a second."""

    def __init__(self, folder: Path, rank: int = 0, over: Callable[[bool], bool] = bool) -> None:
        self.did: list[str] = []
        ballast = Ballast(8)
        self.sides = {name: FakeSide(name, self.did, ballast) for name in ("a", "b", "c")}
        moments = itertools.count()
        self.turns = Turns(
            self.sides, ballast, lambda: self.did.append("step"), Lines(folder, rank), rank, over, lambda: 0.25,
            lambda: float(next(moments)),
        )  # fmt: skip

    def run(self, rounds: int) -> list[str]:
        """What was done, without steps."""
        self.turns.plan(rounds)
        self.turns.go_on()
        return [what for what in self.did if what != "step"]


def test_all_save_then_all_restore_then_files_go(tmp_path: Path) -> None:
    assert World(tmp_path).run(0) == [
        "save a", "save b", "save c", "restore a", "restore b", "restore c", "clear a", "clear b", "clear c",
    ]  # fmt: skip


def test_another_side_is_first_in_each_round(tmp_path: Path) -> None:
    did = World(tmp_path).run(3)
    assert did[::9] == ["save a", "save b", "save c", "save a"]
    assert did[3::9] == ["restore a", "restore b", "restore c", "restore a"]


def test_a_save_ends_before_the_next_begins(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.run(0)
    assert world.did[:8] == ["save a", *["step"] * 3, "save b", *["step"] * 3]


def test_training_goes_on_until_the_save_has_ended_for_all_workers(tmp_path: Path) -> None:
    answers = iter([False] * 5 + [True] * 3)
    world = World(tmp_path, over=lambda _: next(answers))
    world.run(0)
    assert world.did.count("step") == 8


def test_plain_steps_go_before_each_save_that_counts(tmp_path: Path) -> None:
    World(tmp_path).run(1)
    steps = read(tmp_path, "step")
    warming, counting = ([step["side"] for step in steps if step["round"] == number] for number in range(2))
    assert warming == ["a"] * 3 + ["b"] * 3 + ["c"] * 3
    assert counting[: PLAIN_STEPS + 3] == ["plain"] * PLAIN_STEPS + ["b"] * 3
    assert {step["ended"] - step["began"] for step in steps} == {1.0}


def test_worker_0_puts_steps_on_record(tmp_path: Path) -> None:
    World(tmp_path, rank=1).run(0)
    assert read(tmp_path, "step", rank=1) == []


def test_each_worker_copies_once_in_a_round(tmp_path: Path) -> None:
    World(tmp_path, rank=1).run(1)
    assert [line["seconds"] for line in read(tmp_path, "copy", rank=1)] == [0.25, 0.25]


def test_what_leaves_the_training_function_is_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Left(Exception):  # noqa: N818
        pass

    world = World(tmp_path)
    restore = world.sides["a"].restore

    def restore_and_leave() -> None:
        restore()
        raise Left

    monkeypatch.setattr(world.sides["a"], "restore", restore_and_leave)
    with pytest.raises(Left):
        world.run(0)
    world.turns.go_on()
    assert world.did[-6:] == ["restore a", "restore b", "restore c", "clear a", "clear b", "clear c"]


def test_what_a_side_did_not_restore_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path)
    monkeypatch.setattr(world.sides["b"], "restore", lambda: None)
    with pytest.raises(ValueError, match="was not restored"):
        world.run(0)


# --- ours ----------------------------------------------------------------------------------------------------------


class Engine:
    """An event bus, and our side behind it."""

    def __init__(self, folder: Path) -> None:
        self.now = 50.0
        self.request = Request()
        self.ours = Ours(None, self.request, Lines(folder, 0))
        self._bus = EventBus("host:0:1", wall=lambda: 0.0, mono=lambda: self.now)
        self._bus.subscribe(self.ours)

    def save(self, error: str | None = None) -> None:
        """It takes half a second of the training, and two more beside it."""
        self._bus.emit("saving", held_up_s=0.5)
        self.now += 10
        self._bus.emit("saved", committed=error is None, duration_s=2.0, nbytes=7, error=error)

    def restore(self) -> None:
        self._bus.emit("restored", duration_s=3.0)


def test_a_save_of_ours_is_put_on_record_when_the_engine_tells_of_its_end(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.ours.save()
    assert engine.request.wanted
    assert not engine.ours.saved()
    engine.save()
    assert engine.ours.saved()
    told = {"began": 49.5, "ended": 52.0, "blocked_s": 0.5, "nbytes": 7}
    assert read(tmp_path, "save") == [{"what": "save", "round": 0, "side": "ours", "rank": 0, **told}]


def test_the_save_at_the_end_of_a_job_is_not_one_that_was_asked_for(tmp_path: Path) -> None:
    Engine(tmp_path).save()
    assert read(tmp_path, "save") == []


def test_a_save_that_failed_ends_the_benchmark(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.ours.save()
    engine.save(error="the disk is full")
    with pytest.raises(RuntimeError, match="the disk is full"):
        engine.ours.saved()


def test_a_restore_takes_as_long_as_the_engine_says(tmp_path: Path) -> None:
    Engine(tmp_path).restore()
    assert [line["seconds"] for line in read(tmp_path, "restore")] == [3.0]


def test_a_checkpoint_is_due_when_it_is_asked_for_and_until_it_is_saved() -> None:
    request = Request()
    policy = checkpoint_restart_in(MiniBatchRollback() | OnRequest(request=request))
    assert policy is not None
    schedule = policy.schedule(0, 0.0)
    assert not schedule.due(10**6, 1e9)
    request.wanted = True
    assert schedule.due(1, 0.0)
    schedule.saved(1, 0.0, 0.1)
    assert not schedule.due(2, 1.0)


# --- the others ----------------------------------------------------------------------------------------------------


def test_one_file_is_written_by_worker_0_and_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_sides, "barrier", lambda: None)
    model, ballast = nn.Linear(2, 2), Ballast(8)
    trained = Trained(model, ballast, torch.optim.SGD(model.parameters(), lr=0.1))
    side = OneFile(trained, tmp_path / "torch.pt", 0, Lines(tmp_path, 0))
    side.save()
    assert side.saved()
    ballast.spoil()
    side.restore()
    ballast.check()
    (save,) = read(tmp_path, "save")
    assert save["nbytes"] == (tmp_path / "torch.pt").stat().st_size
    assert save["blocked_s"] == save["ended"] - save["began"]
    assert len(read(tmp_path, "restore")) == 1
    side.clear()
    assert not (tmp_path / "torch.pt").exists()


def test_other_workers_write_no_file(tmp_path: Path) -> None:
    OneFile(None, tmp_path / "torch.pt", 1, Lines(tmp_path, 1)).save()  # type: ignore[arg-type]
    assert read(tmp_path, "save", rank=1) == []
    assert not (tmp_path / "torch.pt").exists()


def test_what_a_worker_wrote_of_a_checkpoint_of_torch(tmp_path: Path) -> None:
    for name, size in (("__0_0.distcp", 5), ("__0_1.distcp", 6), ("__1_0.distcp", 7), (".metadata", 2)):
        (tmp_path / name).write_bytes(bytes(size))
    assert [written(tmp_path, rank) for rank in range(2)] == [13, 7]
