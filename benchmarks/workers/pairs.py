"""Time two ways of doing the same thing against each other, in turns, in the workers of one job.

On a machine with fewer cores than workers, and with others at work, single times are noise. Two blocks one after the
other see nearly the same machine, so their ratio is steady; the order changes from pair to pair (A B, B A), so a drift
cancels out. All workers call everything here together.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import horovod.torch as hvd
import torch

Work = Callable[[], None]


@dataclass
class Pairs:
    """Seconds that a block took, on the slowest worker; entry i of both lists belongs to pair i.

    Attributes:
        repeats: how often the work was done in a block.
        extra: further times of ours, one by one.
        stock_again, copies: pairs of a stock commit and a full copy of ours.
        copies_mb: memory that is set aside for such copies.
    """

    repeats: int
    stock: list[float]
    ours: list[float]
    extra: list[float] = field(default_factory=list)
    stock_again: list[float] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)
    copies_mb: float = 0.0

    def write(self, folder: Path) -> None:
        """Leave the result for ``step_overhead.py``; worker 0 does."""
        if hvd.rank() == 0:
            (folder / "pairs.json").write_text(json.dumps(asdict(self)))


def barrier() -> None:
    hvd.allreduce(torch.zeros(1), name="benchmark.barrier")


def slowest(seconds: float) -> float:
    """The largest of all workers' values."""
    return float(hvd.allreduce(torch.tensor([seconds], dtype=torch.float64), name="benchmark.slowest", op=hvd.Max))


def block(work: Work, repeats: int) -> float:
    """Seconds for a block, from the moment when all workers are there to the moment when all are through."""
    barrier()
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    barrier()
    return slowest(time.perf_counter() - began)


def alternate(stock: Work, ours: Work, timed: Callable[[Work], float], count: int) -> tuple[list[float], list[float]]:
    """Time both ``count`` times, in turns and in changing order."""
    times: tuple[list[float], list[float]] = [], []
    for number in range(count):
        turns = list(zip((stock, ours), times, strict=True))
        for work, its in turns if number % 2 == 0 else reversed(turns):
            its.append(timed(work))
    return times


def compare(stock: Work, ours: Work, *, seconds: float, block_s: float, least: int) -> Pairs:
    """Warm both up, then time blocks of them in turns.

    Args:
        seconds: how long to go on.
        block_s: how long a block is to take.
        least: pairs to time at least.
    """
    for work in (stock, ours):
        block(work, 3)
    once = max(block(work, 3) / 3 for work in (stock, ours))
    repeats = max(1, round(block_s / once))
    count = max(least, round(seconds / (2 * repeats * once)))
    return Pairs(repeats, *alternate(stock, ours, lambda work: block(work, repeats), count))
