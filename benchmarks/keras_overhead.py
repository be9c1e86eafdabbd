"""What does fault tolerance cost a Keras training while nothing fails: time of a step in ``model.fit``?

Three kinds of ``fit`` of the same model in the same processes take turns (A B C, C B A): a ``train_step`` of one's own
that calls ``horovod.tensorflow.allreduce``, our ``DistributedOptimizer``, and that with ``FaultToleranceCallback`` on
an ``ElasticDataset``. 2 workers x models of 1.3 M and 25 M parameters. The figure is the median over the rounds of the
ratio to the first kind in that round. The time in which a ``fit`` begins is not counted: there ours brings the group
to one state, and TensorFlow makes its graph.

    python benchmarks/keras_overhead.py [--json FILE] [--quick]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import circumstances, console, guarded, run_workers, spread, told, write_json

MODELS, KINDS = ("1.3M", "25M"), ("wrapper", "callback")
#: Defaults, as a user has them: no events, no ledger. One thread for a worker: there are more workers than cores.
ENV = {"HOROVOD_FT_EVENTS": "", "HOROVOD_FT_LEDGER": "", "TF_CPP_MIN_LOG_LEVEL": "3", "TF_NUM_INTRAOP_THREADS": "1"}
GOAL = 1.03
#: Of what else is measured.
NAMES = ("tensorflow", "tensorflow-cpu", "keras")
#: For starting and ending a job, and for making the graphs of the first turns.
MARGIN_S = 240.0

Times = dict[str, list[float]]


def measure(model: str, arguments: argparse.Namespace, folder: Path) -> Times:
    """Seconds of a step in each round, by kind of ``fit``."""
    given = [str(folder), model, str(arguments.seconds), str(arguments.steps)]
    run_workers("keras_steps", given, arguments.workers, folder, env=ENV, timeout_s=3 * arguments.seconds + MARGIN_S)
    times: Times = json.loads((folder / "times.json").read_text())
    return times


def ratios(times: Times, kind: str) -> list[float]:
    """To the plain one, round by round."""
    return [ours / plain for plain, ours in zip(times["plain"], times[kind], strict=True)]


def case_of(model: str, workers: int, times: Times) -> dict[str, Any]:
    return {
        "case": f"{model} parameters, {workers} workers",
        "plain_ms": statistics.median(times["plain"]) * 1000,
        **{f"{kind}_ms": statistics.median(times[kind]) * 1000 for kind in KINDS},
        **{f"{kind}_ratio": spread(ratios(times, kind)) for kind in KINDS},
    }


def summarized(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    worst = {kind: max(case[f"{kind}_ratio"]["median"] for case in cases) for kind in KINDS}
    facts = circumstances()
    installed = {found.metadata["Name"].lower(): found.version for found in metadata.distributions()}
    facts["versions"] |= {name: installed[name] for name in NAMES if name in installed}
    return {
        "benchmark": "keras_overhead",
        "cases": list(cases),
        **{f"{kind}_ratio_max": ratio for kind, ratio in worst.items()},
        "goals": {f"{kind}_ratio_max <= {GOAL}": ratio <= GOAL for kind, ratio in worst.items()},
        **facts,
    }


def show(result: dict[str, Any]) -> None:
    table = Table(title="One step of model.fit without failures / one with a train_step that calls hvd.allreduce")
    for column in ("", "plain ms", "ours ms", "ratio", "quartiles", "rounds"):
        table.add_column(column, justify="right" if column else "left")
    for case in result["cases"]:
        for kind in KINDS:
            its = case[f"{kind}_ratio"]
            table.add_row(f"{case['case']}, {kind}", f"{case['plain_ms']:.1f}", f"{case[f'{kind}_ms']:.1f}",
                          f"{its['median']:.3f}", f"{its['q1']:.3f} .. {its['q3']:.3f}", str(its["count"]))  # fmt: skip
    console.print(table)
    for goal, met in result["goals"].items():
        console.print(told(goal, met))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results as one JSON object")
    parser.add_argument("--seconds", type=float, default=180.0, help="to measure each model for (default: 180)")
    parser.add_argument("--steps", type=int, default=30, help="of a turn that are timed (default: 30)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, metavar="MODEL")
    parser.add_argument("--quick", action="store_true", help="two short rounds: to see that all works")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seconds, arguments.steps = 1.0, 8
    cases = []
    with tempfile.TemporaryDirectory(prefix="horovod_ft-bench-") as temporary:
        for model in arguments.models:
            cases.append(case_of(model, arguments.workers, measure(model, arguments, Path(temporary) / model)))
            console.print(f"step time, {cases[-1]['case']}: ratio {cases[-1]['callback_ratio']['median']:.3f}")
    result = summarized(cases)
    show(result)
    write_json(arguments.json, result)
    return 0


if __name__ == "__main__":
    guarded(main)
