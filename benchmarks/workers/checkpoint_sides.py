"""The sides of ``checkpoint.py``: three ways to save and restore the state of a training. Trains nothing.

Each puts on record what the worker's docstring says, as JSON lines.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

import horovod_ft.torch as hvd
from benchmarks.workers.pairs import barrier
from horovod_ft.checkpoint.schedule import Schedule
from horovod_ft.events import Event, JsonLines

#: Bytes of each parameter that is not trained.
PIECE = 20_000_000


class Lines:
    """What this worker puts on record.

    Attributes:
        round: that all further lines belong to.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.round = 0
        self._rank = rank
        self._lines = JsonLines(folder / f"lines-{rank}.jsonl")

    def write(self, what: str, side: str, **values: float) -> None:
        told = {"what": what, "round": self.round, "side": side, "rank": self._rank, **values}
        self._lines.write(json.dumps(told))


@dataclass
class Request:
    """Whether a checkpoint is wanted now."""

    wanted: bool = False


class RequestedSchedule(Schedule):
    """Saves when it is asked to, and never by itself."""

    def __init__(self, request: Request, step: int, now: float) -> None:
        super().__init__(step=step, now=now)
        self._request = request

    def due(self, step: int, now: float) -> bool:
        return self._request.wanted

    def saved(self, step: int, now: float, cost_s: float) -> None:
        super().saved(step, now, cost_s)
        self._request.wanted = False


@dataclass(frozen=True)
class OnRequest(hvd.elastic.CheckpointRestart):
    """With a number of steps, a save of ours could become due while another side's is under way, which takes as many
    steps as the disk likes.
    """

    request: Request = field(default_factory=Request)

    def schedule(self, step: int, now: float) -> Schedule:
        return RequestedSchedule(self.request, step, now)


class Ballast(nn.Module):
    """Parameters that are a part of the state, and that no optimizer touches.

    Args:
        nbytes: of all of them.
    """

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.pieces = nn.ParameterList(
            nn.Parameter(torch.full((size // 4,), float(number)), requires_grad=False)
            for number, size in enumerate(cut(nbytes, PIECE), start=1)
        )

    def spoil(self) -> None:
        for piece in self.pieces:
            piece[0] = piece[-1] = -1.0

    def check(self) -> None:
        """
        Raises:
            ValueError: it is not what it was in the beginning.
        """
        for number, piece in enumerate(self.pieces, start=1):
            if (piece[0], piece[-1]) != (number, number):
                raise ValueError(f"piece {number} was not restored: it has {piece[0]} and {piece[-1]}")


def cut(nbytes: int, piece: int) -> Iterator[int]:
    """Sizes of pieces that are ``nbytes`` together; the last one may be smaller."""
    for start in range(0, nbytes, piece):
        yield min(piece, nbytes - start)


@dataclass(frozen=True)
class Trained:
    """What is saved and restored."""

    model: nn.Module
    ballast: Ballast
    optimizer: torch.optim.Optimizer

    def tree(self) -> dict[str, Any]:
        """Its tensors themselves, with names."""
        return {name: part.state_dict() for name, part in vars(self).items()}


@contextmanager
def restoring(lines: Lines, side: str) -> Iterator[None]:
    """Put on record how long what is inside takes, from the moment when all workers are there."""
    barrier()
    began = time.monotonic()
    yield
    lines.write("restore", side, seconds=time.monotonic() - began)


class Side(Protocol):
    """One way to save and restore. All workers call everything together, between two steps."""

    def save(self) -> None:
        """Begin a save. Blocks as long as it holds up training."""

    def saved(self) -> bool:
        """Whether it has ended, as far as this worker knows; puts it on record then, once."""

    def restore(self) -> None:
        """Restore what was saved, and put on record how long that took."""

    def clear(self) -> None:
        """Delete the files."""


class Ours:
    """The engine saves at the end of the step after the request, and says in events what became of it."""

    def __init__(self, state: Any, request: Request, lines: Lines) -> None:
        self._state = state
        self._request = request
        self._lines = lines
        self._began, self._blocked_s = 0.0, 0.0
        self._waiting = False
        self._error: str | None = None

    def __call__(self, event: Event) -> None:
        told = event.data
        if event.kind == "saving":
            self._blocked_s = told["held_up_s"]
            self._began = event.mono - self._blocked_s
        elif event.kind == "saved" and self._waiting:  # a job that ends saves once more
            self._waiting = False
            self._error = told["error"]
            ended = self._began + self._blocked_s + told["duration_s"]
            self._lines.write("save", "ours", began=self._began, ended=ended, blocked_s=self._blocked_s,
                              nbytes=told["nbytes"])  # fmt: skip
        elif event.kind == "restored":
            self._lines.write("restore", "ours", seconds=told["duration_s"])

    def save(self) -> None:
        self._waiting = self._request.wanted = True

    def saved(self) -> bool:
        if self._error is not None:
            raise RuntimeError(self._error)
        return not self._waiting

    def restore(self) -> None:
        self._state.restore()

    def clear(self) -> None:
        """The checkpoint before goes when the next one is there."""


class OneFile:
    """``torch.save`` by worker 0, which is what most scripts do; the others wait in the next step's allreduce."""

    def __init__(self, trained: Trained, path: Path, rank: int, lines: Lines) -> None:
        self._trained = trained
        self._path = path
        self._rank = rank
        self._lines = lines

    def save(self) -> None:
        if self._rank != 0:
            return
        began = time.monotonic()
        with self._path.open("wb") as file:
            torch.save(self._trained.tree(), file)
            file.flush()
            os.fsync(file.fileno())
        ended = time.monotonic()
        self._lines.write("save", "torch", began=began, ended=ended, blocked_s=ended - began,
                          nbytes=self._path.stat().st_size)  # fmt: skip

    def saved(self) -> bool:
        return True

    def restore(self) -> None:
        with restoring(self._lines, "torch"):
            tree = torch.load(self._path)
            for name, part in vars(self._trained).items():
                part.load_state_dict(tree[name])

    def clear(self) -> None:
        if self._rank == 0:
            self._path.unlink()


class Distributed:
    """``torch.distributed.checkpoint``: each worker copies all of the state, and writes its share of it in a thread."""

    def __init__(self, trained: Trained, folder: Path, rank: int, lines: Lines) -> None:
        self._trained = trained
        self._folder = folder
        self._rank = rank
        self._lines = lines
        self._future: Any = None
        self._began, self._blocked_s, self._ended = 0.0, 0.0, 0.0

    def save(self) -> None:
        self._began = time.monotonic()
        self._future = async_save(self._trained.tree(), checkpoint_id=self._folder)
        self._blocked_s = time.monotonic() - self._began
        self._future.add_done_callback(self._over)

    def _over(self, _: object) -> None:
        self._ended = time.monotonic()

    def saved(self) -> bool:
        if self._future is None:
            return True
        if not self._future.done():
            return False
        self._future.result()
        self._future = None
        self._lines.write("save", "dcp", began=self._began, ended=self._ended, blocked_s=self._blocked_s,
                          nbytes=written(self._folder, self._rank))  # fmt: skip
        return True

    def restore(self) -> None:
        with restoring(self._lines, "dcp"):
            tree = self._trained.tree()
            load(tree, checkpoint_id=self._folder)  # into the tensors themselves
            self._trained.optimizer.load_state_dict(tree["optimizer"])

    def clear(self) -> None:
        if self._rank == 0:
            shutil.rmtree(self._folder)


def written(folder: Path, rank: int) -> int:
    """Bytes that a worker wrote into a checkpoint of torch."""
    files = [*folder.glob(f"__{rank}_*"), *(folder.glob(".metadata") if rank == 0 else ())]
    return sum(file.stat().st_size for file in files)
