"""What the workers of ``recovery_gap.py`` have in common: the record of their steps, and their end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from horovod_ft.events import JsonLines

#: Says whether this worker dies now: of the steps that are done, and the size of the group.
Dies = Callable[[int, int], bool]


class Steps:
    """The record of completed steps: a line (CLOCK_MONOTONIC, step, size) for each, one write a line, no buffer."""

    def __init__(self, folder: Path) -> None:
        self._lines = JsonLines(folder / f"steps-{os.environ['HOROVOD_RANK']}.jsonl")

    def completed(self, step: int, size: int) -> None:
        self._lines.write(f"[{time.monotonic()!r}, {step}, {size}]")


def take_part(
    sides: Mapping[str, Callable[[Steps, Dies], None]], workers: int, side: str, folder: str, kill_rank: str,
    kill_step: str,
) -> None:  # fmt: skip
    """Train on one side.

    Args:
        sides: by name.
        workers: of the group in which one dies.
        side, folder, kill_rank, kill_step: arguments of the command line.
    """
    mortal, last = os.environ["HOROVOD_RANK"] == kill_rank, int(kill_step)
    sides[side](Steps(Path(folder)), lambda done, size: mortal and done == last and size == workers)
