"""How long does it take to form a group of many workers, under ``horovodrun`` and under ``horovod-ft run``?

All workers call ``hvd.init()`` at the same moment, some times in a row as after failures, and the slowest counts each
time. The workers are the same on both sides, with stock Horovod and nothing of ours in them; only the launcher differs.
``horovodrun`` lets 5 connections wait, and each worker opens one for each of its questions: what the kernel drops is
sent again after a second or more. The launchers take turns, one job a size, each worker on a pretended host of its own.

    python benchmarks/init_scale.py [--sizes 4 8 16] [--times 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import circumstances, console, guarded, run_workers, spread, told, write_json

SIZES = (4, 8, 16)
#: Name in the JSON file -> the launcher; None for ``horovodrun``.
LAUNCHERS: dict[str, list[str] | None] = {
    "horovodrun": None,
    "horovod-ft run": [sys.executable, "-m", "horovod_ft.cli.main", "run"],
}
STOCK, OURS = LAUNCHERS
#: Importing torch takes a worker seconds of computing, and a group of 16 under horovodrun half a minute.
START_S, WORKER_S, INIT_S = 60.0, 15.0, 60.0
GOAL_SIZE, GOAL_RATIO = 8, 5.0

#: Launcher -> size -> seconds for each time.
Seconds = Mapping[str, Mapping[int, Sequence[float]]]


def measure(launcher: str, workers: int, times: int, folder: Path) -> list[float]:
    """Form a group some times in one job. Returns the seconds of the slowest worker each time.

    Raises:
        BenchmarkError: the job failed.
    """
    run_workers(
        "init", [str(folder), str(workers), str(times)], workers, folder,
        env={"HOROVOD_FT_EVENTS": "", "HOROVOD_FT_LEDGER": ""}, launcher=LAUNCHERS[launcher],
        timeout_s=START_S + workers * WORKER_S + times * INIT_S,
    )  # fmt: skip
    each = [json.loads((folder / f"init-{rank}.json").read_text()) for rank in range(workers)]
    return [max(seconds) for seconds in zip(*each, strict=True)]


def summarized(init_s: Seconds) -> dict[str, Any]:
    """What goes into the JSON file."""
    median = {name: {size: statistics.median(each) for size, each in sizes.items()} for name, sizes in init_s.items()}
    ratios = {size: median[STOCK][size] / median[OURS][size] for size in median[STOCK]}
    goal = f"ratio at {GOAL_SIZE} workers >= {GOAL_RATIO:.0f}"
    return {
        "benchmark": "init_scale",
        "init_s": median,
        "init_each_s": init_s,
        "init_spread_s": {name: {size: spread(each) for size, each in sizes.items()} for name, sizes in init_s.items()},
        "ratio_median": ratios,
        "goals": {goal: ratios[GOAL_SIZE] >= GOAL_RATIO} if GOAL_SIZE in ratios else {},
        **circumstances(),
    }


def show(result: dict[str, Any], times: int) -> None:
    table = Table(title=f"hvd.init(), seconds of the slowest worker, {times} times")
    for column in ("workers", *LAUNCHERS, "ratio"):
        table.add_column(column, justify="right")
    for size, ratio in result["ratio_median"].items():
        cells = [result["init_spread_s"][name][size] for name in LAUNCHERS]
        values = [f"{cell['median']:.2f} ({cell['min']:.2f} to {cell['max']:.2f})" for cell in cells]
        table.add_row(str(size), *values, f"{ratio:.1f}")
    console.print(table)
    for goal, met in result["goals"].items():
        console.print(told(goal, met))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results as one JSON object")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), metavar="N",
                        help="numbers of workers, from 2 to 16 (default: 4 8 16)")  # fmt: skip
    parser.add_argument("--times", type=int, default=5, help="that a job forms its group (default: 5)")
    arguments = parser.parse_args()
    if arguments.times < 1 or not all(2 <= size <= 16 for size in arguments.sizes):
        parser.error("--times must be at least 1 and --sizes between 2 and 16")
    init_s: dict[str, dict[int, list[float]]] = {name: {} for name in LAUNCHERS}
    with tempfile.TemporaryDirectory(prefix="horovod_ft-bench-") as folder:
        for size in arguments.sizes:
            for name, seconds in init_s.items():
                job = Path(folder) / f"{name.replace(' ', '-')}-{size}"
                seconds[size] = measure(name, size, arguments.times, job)
                console.print(f"{size:2} workers, {name:14}: {'  '.join(f'{each:.2f}' for each in seconds[size])} s")
    result = summarized(init_s)
    show(result, arguments.times)
    write_json(arguments.json, result)
    return 0


if __name__ == "__main__":
    guarded(main)
