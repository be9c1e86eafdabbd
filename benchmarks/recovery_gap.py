"""How long does training stand still when a worker is killed, with stock Horovod and with horovod_ft?

Four workers train the same model on the same data under ``horovodrun``, each on a pretended host of its own. One of
them kills itself (SIGKILL) in a backward pass, while gradients are being reduced; the same one at the same step on both
sides. Stock Horovod runs the loop that its documentation shows and commits in every step; ours runs
``with state.step()``.

The gap is the time from the last step that a surviving worker completed before the kill to the first one that it
completed after it; of the survivors' gaps the longest counts. Every worker writes down each completed step by the
monotonic clock, in the same way on both sides. One kill a job; stock and ours take turns, so that both see the same
machine. The stages of our recoveries come from the events of horovod_ft.

With ``--framework keras`` ours is a ``model.fit``. Stock Horovod runs the loop that its documentation shows for
TensorFlow, because its own ``fit`` averages nothing on Keras 3.

The hosts are given with ``-H``. With ``--discovery`` horovodrun asks a discovery script for them every second, on both
sides: while the script runs, the launcher answers nobody, and a failure that falls into that time waits for it.

    python benchmarks/recovery_gap.py [--framework torch|keras] [--kills 5] [--discovery] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import (
    BenchmarkError,
    circumstances,
    console,
    guarded,
    run_workers,
    spread,
    told,
    write_json,
)
from horovod_ft.events import STAGES, Event, read_events
from horovod_ft.timeline import recoveries

WORKERS = 4
#: Stock Horovod can stall for half a minute, and horovodrun takes its time to start.
JOB_TIMEOUT_S = 150.0
#: What the workers of a framework run.
MODULES = {"torch": "recovery", "keras": "keras_recovery"}
GOAL_RATIO, GOAL_GAP_S = 50.0, 0.5


@dataclass(frozen=True)
class Kill:
    """One job with one kill.

    Attributes:
        rank: of the worker that was killed, before the kill.
        gap_s: the longest of the survivors' gaps.
        gaps_s: gap of each survivor, by its start rank.
        stages_s: stage of the recovery -> seconds, median over the survivors; only with horovod_ft.
    """

    rank: int
    gap_s: float
    gaps_s: dict[int, float]
    stages_s: dict[str, float]


def measure(side: str, rank: int, folder: Path, arguments: argparse.Namespace) -> Kill:
    """Run a job in which a worker is killed.

    Raises:
        BenchmarkError: the job failed, or a survivor has no gap.
    """
    given = [side, str(folder), str(rank), str(arguments.kill_at)]
    module, fixed = MODULES[arguments.framework], not arguments.discovery
    env = {"HOROVOD_FT_LEDGER": "", **({} if side == "ours" else {"HOROVOD_FT_EVENTS": ""})}
    job = run_workers(module, given, WORKERS, folder, env=env, timeout_s=JOB_TIMEOUT_S, fixed_hosts=fixed)
    gaps = {survivor: gap(folder / f"steps-{survivor}.jsonl") for survivor in range(WORKERS) if survivor != rank}
    missing = [survivor for survivor, seconds in gaps.items() if seconds is None]
    if missing:
        raise BenchmarkError(f"{side}, worker {rank} killed: no gap of the workers {missing}\n{job.output()[-6000:]}")
    whole = {survivor: seconds for survivor, seconds in gaps.items() if seconds is not None}
    return Kill(rank, max(whole.values()), whole, stages(read_events(job.events_folder)) if side == "ours" else {})


def gap(path: Path) -> float | None:
    """Seconds from a worker's last step in the whole group to its first one in the smaller group; None without both."""
    steps = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    before = [moment for moment, _, size in steps if size == WORKERS]
    after = [moment for moment, _, size in steps if size < WORKERS]
    return min(after) - max(before) if before and after else None


def stages(events: Sequence[Event]) -> dict[str, float]:
    found = recoveries(events)
    if len(found) != 1:
        raise BenchmarkError(f"one worker was killed, but the events tell of {len(found)} recoveries")
    return found[0].stages


def medians(kills: Sequence[Kill]) -> dict[str, float]:
    """Stage -> milliseconds, median over all kills."""
    taken: dict[str, list[float]] = defaultdict(list)
    for kill in kills:
        for stage, seconds in kill.stages_s.items():
            taken[stage].append(seconds * 1000)
    return {stage: statistics.median(taken[stage]) for stage in STAGES if stage in taken}


def summarized(stock: Sequence[Kill], ours: Sequence[Kill], arguments: argparse.Namespace) -> dict[str, Any]:
    """What goes into the JSON file."""
    stock_gaps, gaps = [kill.gap_s for kill in stock], [kill.gap_s for kill in ours]
    ratio = statistics.median(stock_gaps) / statistics.median(gaps)
    return {
        "benchmark": "recovery_gap",
        "framework": arguments.framework,
        "workers": WORKERS,
        "hosts": "discovery script" if arguments.discovery else "fixed",
        "stock_commits_every_steps": 1,
        "stock_gap_s": stock_gaps,
        "gap_s": gaps,
        "ratio_median": ratio,
        "stock_gap_spread_s": spread(stock_gaps),
        "gap_spread_s": spread(gaps),
        "stages_ms": medians(ours),
        "goals": {
            f"ratio_median >= {GOAL_RATIO:.0f}": ratio >= GOAL_RATIO,
            f"median gap_s <= {GOAL_GAP_S}": statistics.median(gaps) <= GOAL_GAP_S,
            f"longest gap_s <= {GOAL_GAP_S}": max(gaps) <= GOAL_GAP_S,
        },
        "kills": {"stock": [asdict(kill) for kill in stock], "ours": [asdict(kill) for kill in ours]},
        **circumstances(),
    }


def show(result: dict[str, Any]) -> None:
    hosts, framework = result["hosts"], result["framework"]
    table = Table(title=f"{framework}, {WORKERS} workers, one killed, hosts: {hosts}; seconds without a completed step")
    for column in ("", "median", "min", "max", "kills"):
        table.add_column(column, justify="right" if column else "left")
    for name, key in (("stock Horovod, commit in every step", "stock_gap_spread_s"), ("horovod_ft", "gap_spread_s")):
        values = result[key]
        table.add_row(name, *(f"{values[of]:.3f}" for of in ("median", "min", "max")), str(values["count"]))
    console.print(table)
    each = "  ".join(f"{stage} {value:.1f}" for stage, value in result["stages_ms"].items())
    console.print(f"stages of our recovery, median ms: {each}")
    console.print(f"ratio of the medians: [bold]{result['ratio_median']:.0f}[/bold]")
    for goal, met in result["goals"].items():
        console.print(told(goal, met))


def take_turns(arguments: argparse.Namespace, folder: Path) -> tuple[dict[str, list[Kill]], list[str]]:
    """All kills of both sides, and what went wrong; one job that fails does not stop the others."""
    kills: dict[str, list[Kill]] = {"stock": [], "ours": []}
    failures = []
    for number in range(arguments.kills):
        rank = arguments.ranks[number % len(arguments.ranks)]
        for side, done in kills.items():
            what = f"kill {number + 1} of {arguments.kills}, worker {rank}, {side:5}"
            try:
                job = folder / f"{side}-{number}"
                done.append(measure(side, rank, job, arguments))
                console.print(f"{what}: {done[-1].gap_s:7.3f} s")
            except BenchmarkError as error:
                failures.append(f"{what}: {error}")
                console.print(f"{what}: [red]failed[/red]")
    return kills, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results as one JSON object")
    parser.add_argument("--framework", choices=MODULES, default="torch", help="default: torch")
    parser.add_argument("--kills", type=int, default=5, help="on each side (default: 5)")
    parser.add_argument("--kill-at", type=int, default=30, metavar="STEP", help="steps before the kill, up to 40")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 0], choices=range(WORKERS), metavar="RANK",
                        help="workers to kill, in turn (default: 1 2 3 0)")  # fmt: skip
    parser.add_argument("--discovery", action="store_true", help="hosts from a discovery script")
    parser.add_argument("--folder", type=Path, help="keep logs, steps and events here (default: a temporary folder)")
    arguments = parser.parse_args()
    if arguments.kills < 1 or not 1 <= arguments.kill_at <= 40:
        parser.error("--kills must be at least 1 and --kill-at between 1 and 40")
    with tempfile.TemporaryDirectory(prefix="horovod_ft-bench-") as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        if folder.exists() and any(folder.iterdir()):
            parser.error(f"{folder} is not empty: --folder needs a new or an empty one")
        kills, failures = take_turns(arguments, folder)
    if all(kills.values()):
        result = {**summarized(kills["stock"], kills["ours"], arguments), "failures": failures}
        show(result)
        write_json(arguments.json, result)
    for failure in failures:
        print(f"recovery_gap.py: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    guarded(main)
