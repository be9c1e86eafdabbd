"""One worker of ``checkpoint.py``: a training whose state is saved and restored in three ways, in turns.

``python -m benchmarks.workers.checkpoint FOLDER FILES NBYTES ROUNDS``. The checkpoints are put below FILES. What was
measured goes into FOLDER, a file of JSON lines a worker:

- ``step``: ``began`` and ``ended`` of a training step by the monotonic clock, and the side whose save is under way, or
  ``plain``. Worker 0 writes them; the others take their steps with it.
- ``save``: ``began``, ``ended``, ``blocked_s`` (how long the call holds up this worker's training) and ``nbytes``
  (written by this worker) of a side's save.
- ``restore``: ``seconds`` that a side takes to restore.
- ``copy``: ``seconds`` of a plain copy, on all workers at once, of as many bytes as each writes of ours.

All have the ``round`` (0 to warm up) and the ``rank``. The script says what is compared, and how.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import horovod_ft.torch as hvd
from benchmarks.workers.checkpoint_sides import (
    Ballast,
    Distributed,
    Lines,
    OneFile,
    OnRequest,
    Ours,
    Request,
    Side,
    Trained,
)
from benchmarks.workers.models import SHAPES, Training
from benchmarks.workers.pairs import Work, barrier, slowest
from horovod_ft.torch.runtime import current

#: A forward and backward pass of some tens of milliseconds.
SHAPE = SHAPES["1.3M"]
#: Steps before each save in which nothing else is done.
PLAIN_STEPS = 12
#: More than the processor's caches hold.
COPIED = 50_000_000


class Turns:
    """What is done one after the other. Restoring our checkpoint leaves the training function, which begins anew.

    Args:
        sides: by name; the first begins in round 0. Ours has to be: a job saves after its first step in any case.
        step: one training step.
        over: whether all workers say so.
        copy: copies as many bytes as this worker writes of ours; gives the seconds.
    """

    def __init__(
        self,
        sides: Mapping[str, Side],
        ballast: Ballast,
        step: Work,
        lines: Lines,
        rank: int,
        over: Callable[[bool], bool],
        copy: Callable[[], float],
        mono: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sides = sides
        self._ballast = ballast
        self._step = step
        self._lines = lines
        self._rank = rank
        self._over = over
        self._copy = copy
        self._mono = mono
        self._ahead: deque[Work] = deque()

    def plan(self, rounds: int) -> None:
        """Round 0, and so many more. Another side is first each time."""
        for number in range(rounds + 1):
            first = number % len(self._sides)
            names = [*self._sides][first:] + [*self._sides][:first]
            self._ahead += [partial(setattr, self._lines, "round", number), self._copied]
            for name in names:
                if number > 0:
                    self._ahead.append(self._plain)
                self._ahead.append(partial(self._save, name))
            for name in names:
                self._ahead += [self._ballast.spoil, self._sides[name].restore, self._ballast.check]
            self._ahead += [self._sides[name].clear for name in names]

    def go_on(self) -> None:
        """Do what is left. What is left by an exception is not done again."""
        while self._ahead:
            self._ahead.popleft()()

    def _copied(self) -> None:
        self._lines.write("copy", "plain", seconds=self._copy())

    def _plain(self) -> None:
        for _ in range(PLAIN_STEPS):
            self._train("plain", lambda: True)

    def _save(self, name: str) -> None:
        self._sides[name].save()
        self._train(name, self._sides[name].saved)

    def _train(self, doing: str, enough: Callable[[], bool]) -> None:
        """A step, and more of them until it is enough for all workers."""
        over = False
        while not over:
            began = self._mono()
            self._step()
            over = self._over(enough())
            if self._rank == 0:
                self._lines.write("step", doing, began=began, ended=self._mono())


def all_say(yes: bool) -> bool:
    return slowest(float(not yes)) == 0.0


def plain_copy(nbytes: int) -> Callable[[], float]:
    """Copies so many bytes, a piece after the other, on all workers at once, and gives the seconds that took."""
    source, target = (torch.ones(COPIED, dtype=torch.uint8) for _ in range(2))

    def copy() -> float:
        barrier()
        began = time.monotonic()
        for start in range(0, nbytes, COPIED):
            piece = slice(0, min(COPIED, nbytes - start))
            target[piece].copy_(source[piece])
        return time.monotonic() - began

    return copy


def main(folder: str, files: str, nbytes: str, rounds: str) -> None:
    hvd.init()
    rank = hvd.rank()
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=hvd.size())
    training = Training(hvd.DistributedOptimizer, SHAPE, "checkpoint", rank)
    mine = sum(parameter.numel() * 4 for parameter in training.model.parameters())
    trained = Trained(training.model, Ballast(max(0, int(nbytes) - 2 * mine)), training.optimizer)  # 2: momentum
    state = hvd.elastic.TorchState(**vars(trained))
    request, lines = Request(), Lines(Path(folder), rank)
    ours = Ours(state, request, lines)
    current().bus.subscribe(ours)
    sides: dict[str, Side] = {
        "ours": ours,
        "torch": OneFile(trained, Path(files) / "torch.pt", rank, lines),
        "dcp": Distributed(trained, Path(files) / "dcp", rank, lines),
    }

    def step() -> None:
        with state.step():
            training.step()

    copy = plain_copy(int(nbytes) // hvd.size())
    turns = Turns(sides, trained.ballast, step, lines, rank, all_say, copy)
    turns.plan(int(rounds))
    place = hvd.elastic.Checkpoints(Path(files) / "ours", keep_last=1)

    @hvd.elastic.run(policy=OnRequest(request=request), checkpoint=place)
    def train(_: Any) -> None:
        turns.go_on()

    train(state)
    dist.destroy_process_group()
    hvd.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
