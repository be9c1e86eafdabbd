"""What does fault tolerance cost while nothing fails: time of a step, memory, and one commit?

1. Step time: ``with state.step()`` around a step with our ``DistributedOptimizer``, against a step with stock Horovod's
   and no commit at all. 2 and 4 workers x models of 1.3 M and 25 M parameters. Both sides live in the same processes
   and take turns in blocks of about a second (A B, B A); the figure is the median over the pairs of a pair's ratio.
2. Peak memory: jobs of one side alone, 25 M parameters, 2 workers; the largest resident memory of a worker.
3. Commit: ``state.step()`` with an empty body against stock ``TorchState.commit()``, 200 MB of state, 2 workers, in
   turns; and against the same, what ``StateCommitter(keep="copy")`` adds to a step in which it takes a copy.

    python benchmarks/step_overhead.py [--json FILE] [--quick]
    python benchmarks/step_overhead.py --policy lossy_forward
    python benchmarks/step_overhead.py --control        stock against stock: what the measurement itself is worth
    python benchmarks/step_overhead.py --profile        what Python does in a step, by cProfile
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import circumstances, console, guarded, run_workers, spread, told, write_json

SIZES, MODELS = (2, 4), ("1.3M", "25M")
MEMORY_STEPS, MEMORY_WORKERS, COMMIT_WORKERS = 8, 2, 2
#: For starting and ending a job, on top of the time for which it measures.
MARGIN_S = 120.0
#: Defaults, as a user has them: no events, no ledger.
ENV = {"HOROVOD_FT_EVENTS": "", "HOROVOD_FT_LEDGER": ""}
GOAL_STEP, GOAL_COMMIT = 1.03, 50.0


@dataclass(frozen=True)
class Times:
    """What a job of ``workers.pairs`` left: seconds for each block of ``repeats``, slowest worker."""

    repeats: int
    stock: list[float]
    ours: list[float]
    extra: list[float]
    stock_again: list[float]
    copies: list[float]
    copies_mb: float

    @classmethod
    def read(cls, folder: Path) -> Times:
        return cls(**json.loads((folder / "pairs.json").read_text()))

    def ratios(self) -> list[float]:
        """Ours / stock, pair by pair."""
        return [ours / stock for stock, ours in zip(self.stock, self.ours, strict=True)]

    def ms(self, blocks: Sequence[float]) -> float:
        """Median milliseconds for one repeat."""
        return statistics.median(blocks) / self.repeats * 1000


def measure_steps(model: str, workers: int, seconds: float, mode: str, folder: Path) -> Times:
    arguments = [str(folder), model, str(seconds), mode]
    run_workers("steps", arguments, workers, folder, env=ENV, timeout_s=3 * seconds + MARGIN_S)
    return Times.read(folder)


def step_cases(seconds: float, mode: str, folder: Path) -> list[dict[str, Any]]:
    cases = []
    for workers in SIZES:
        for model in MODELS:
            times = measure_steps(model, workers, seconds, mode, folder / f"steps-{workers}-{model}")
            ratios = spread(times.ratios())
            cases.append({
                "case": f"{model} parameters, {workers} workers", "ratio": ratios["median"], "spread": ratios,
                "stock_ms": times.ms(times.stock), "ours_ms": times.ms(times.ours), "steps_a_block": times.repeats,
            })  # fmt: skip
            console.print(f"step time, {cases[-1]['case']}: ratio {cases[-1]['ratio']:.3f}")
    return cases


def peak_memory(side: str, folder: Path) -> float:
    """Largest resident memory of a worker of a job of one side, in MB."""
    arguments = [side, str(folder), "25M", str(MEMORY_STEPS)]
    run_workers("memory", arguments, MEMORY_WORKERS, folder, env=ENV, timeout_s=MARGIN_S)
    return max(int(path.read_text()) for path in folder.glob("peak-*")) / 1e6


def memory(folder: Path) -> dict[str, float]:
    stock, ours = (peak_memory(side, folder / f"memory-{side}") for side in ("stock", "ours"))
    return {"stock_peak_mb": stock, "ours_peak_mb": ours, "memory_ratio": ours / stock}


def commits(seconds: float, folder: Path) -> dict[str, Any]:
    arguments = [str(folder), str(seconds)]
    run_workers("commits", arguments, COMMIT_WORKERS, folder, env=ENV, timeout_s=3 * seconds + MARGIN_S)
    times = Times.read(folder)
    ratios = spread([1 / ratio for ratio in times.ratios()])
    copying = spread([copy / stock for stock, copy in zip(times.stock_again, times.copies, strict=True)])
    return {
        "commit_ratio": ratios["median"],
        "commit_spread": ratios,
        "commit_stock_ms": times.ms(times.stock),
        "commit_ours_ms": times.ms(times.ours),
        "commit_beside_a_body_ms": times.ms(times.extra),
        "copy_ms": times.ms(times.copies),
        "copy_ratio": copying["median"],
        "copy_spread": copying,
        "copies_mb": times.copies_mb,
    }


def summarized(cases: list[dict[str, Any]], more: dict[str, Any]) -> dict[str, Any]:
    worst = max(case["ratio"] for case in cases)
    goals = {
        f"step_ratio_max <= {GOAL_STEP}": worst <= GOAL_STEP,
        f"commit_ratio >= {GOAL_COMMIT:.0f}": more["commit_ratio"] >= GOAL_COMMIT,
    }
    step_ratio = {case["case"]: case["ratio"] for case in cases}
    return {
        "benchmark": "step_overhead", "step_ratio": step_ratio, "step_ratio_max": worst, "step_cases": cases, **more,
        "goals": goals, **circumstances(),
    }  # fmt: skip


def steps_table(cases: Sequence[dict[str, Any]], other: str) -> Table:
    table = Table(title=f"One step without failures: {other} / stock Horovod without commits")
    for column in ("", "stock ms", f"{other} ms", "ratio", "quartiles", "pairs"):
        table.add_column(column, justify="right" if column else "left")
    for case in cases:
        its = case["spread"]
        table.add_row(case["case"], f"{case['stock_ms']:.1f}", f"{case['ours_ms']:.1f}", f"{case['ratio']:.3f}",
                      f"{its['q1']:.3f} .. {its['q3']:.3f}", str(its["count"]))  # fmt: skip
    return table


def show(result: dict[str, Any]) -> None:
    console.print(steps_table(result["step_cases"], "ours"))
    table = Table(title="Commit of 200 MB of state, 2 workers; peak memory of a worker, 25M parameters")
    for column in ("", "stock", "ours", "ratio"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("commit of light state, ms", f"{result['commit_stock_ms']:.1f}", f"{result['commit_ours_ms']:.2f}",
                  f"1 / {result['commit_ratio']:.0f}")  # fmt: skip
    table.add_row("  while a body of 20 ms runs", "", f"{result['commit_beside_a_body_ms']:.2f}", "")
    table.add_row("  and a full copy", f"{result['commit_stock_ms']:.1f}", f"{result['copy_ms']:.1f}",
                  f"{result['copy_ratio']:.2f}")  # fmt: skip
    table.add_row("memory of two copies, MB", "", f"{result['copies_mb']:.0f}", "")
    table.add_row("memory, MB", f"{result['stock_peak_mb']:.0f}", f"{result['ours_peak_mb']:.0f}",
                  f"{result['memory_ratio']:.2f}")  # fmt: skip
    console.print(table)
    for goal, met in result["goals"].items():
        console.print(told(goal, met))


def profile(folder: Path) -> None:
    """Print what Python does in a step of each side, 1.3 M parameters, 2 workers."""
    run_workers("steps", [str(folder), "1.3M", "0", "profile"], 2, folder, env=ENV, timeout_s=2 * MARGIN_S)
    for side in ("stock", "ours"):
        text = (folder / f"profile-{side}.txt").read_text()
        print(f"--- {side} ---", "\n".join(line for line in text.splitlines() if line.strip()), sep="\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results as one JSON object")
    parser.add_argument("--seconds", type=float, default=60.0, help="to measure each case for (default: 60)")
    parser.add_argument("--quick", action="store_true", help="a few seconds a case: to see that all works")
    parser.add_argument("--policy", default="rollback", help="of our side, as in HOROVOD_FT_POLICY (default: rollback)")
    parser.add_argument("--control", action="store_true", help="stock against stock, steps only")
    parser.add_argument("--profile", action="store_true", help="what Python does in a step, nothing else")
    arguments = parser.parse_args()
    seconds = 4.0 if arguments.quick else arguments.seconds
    os.environ["HOROVOD_FT_POLICY"] = arguments.policy  # the workers inherit it
    with tempfile.TemporaryDirectory(prefix="horovod_ft-bench-") as temporary:
        folder = Path(temporary)
        if arguments.profile:
            profile(folder)
            return 0
        cases = step_cases(seconds, "stock" if arguments.control else "ours", folder)
        if arguments.control:
            console.print(steps_table(cases, "stock again"))
            write_json(arguments.json, {"benchmark": "step_overhead control", "step_cases": cases, **circumstances()})
            return 0
        more = {**memory(folder), **commits(seconds / 3, folder / "commits")}
    result = {**summarized(cases, more), "policy": arguments.policy}
    show(result)
    write_json(arguments.json, result)
    return 0


if __name__ == "__main__":
    guarded(main)
