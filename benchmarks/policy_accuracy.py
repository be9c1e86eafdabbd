"""What does each recovery policy cost in accuracy, when workers are killed in the middle of a training?

Four workers train a small convolutional net on MNIST under ``horovodrun``, each on a pretended host of its own, and
three of them kill themselves (SIGKILL) in an allreduce, with a part of the step's gradients reduced: the question of
*Towards Low-Overhead Resilience for Data Parallel Deep Learning* (Nicolae, Hobson, Yildiz, Peterka, Morozov; CCGrid
2022). For each seed there is one run without failures, and one for each policy with the same initial weights, the same
order of the samples and the same kills: which worker, at which step, after how many gradients. All are drawn from the
seed. The accuracy is that of the last survivors on all 10,000 test images.

``rollback`` loses nothing, so its distance from the failure-free run is what rounding does in another order of sums,
which training amplifies: less than that is no difference between policies.

Lost steps are those that had to be computed again and those that were finished without a part of their samples; lossy
elements are those of gradients in which such samples do not count. A run in which not every kill happened, survivors
differ, or the ledger does not add up is an error and no data point.

    python benchmarks/policy_accuracy.py --data FOLDER [--quick] [--seeds 5] [--policy NAME]... [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.accuracy_chart import REFERENCE, draw, wrapped
from benchmarks.accuracy_runs import (
    GLOBAL_BATCH,
    GOAL_POINTS,
    LEAST_STEPS_A_KILL,
    Run,
    Task,
    as_toml,
    draw_plan,
    measured,
    steps_of,
    summarized,
)
from benchmarks.common import (
    BenchmarkError,
    circumstances,
    console,
    guarded,
    run_workers,
    told,
    write_json,
)
from benchmarks.mnist import TEST, TRAIN, load
from horovod_ft.errors import PolicyError
from horovod_ft.policy import Forward, decisions_of
from horovod_ft.policy_names import parse_policy

POLICIES = ("rollback", "lossy_forward", 'lossy_forward(missing="local")', 'lossy_forward(missing="skip")')
QUICK_SAMPLES = 40 * GLOBAL_BATCH


def tasks(arguments: argparse.Namespace) -> list[Task]:
    """All runs in their order: seed after seed, so that all policies see the same machine, and each in turn first."""
    made = []
    for seed in range(1, arguments.seeds + 1):
        steps = steps_of(arguments.samples, arguments.epochs)
        plan = draw_plan(seed, workers=arguments.workers, kills=arguments.kills, steps=steps)
        first = (seed - 1) % len(arguments.policy)
        for policy in ("", *arguments.policy[first:], *arguments.policy[:first]):
            made.append(
                Task(
                    seed=seed,
                    policy=policy,
                    lossy=bool(policy) and Forward in decisions_of(parse_policy(policy)),
                    plan=plan if policy else (),
                    workers=arguments.workers,
                    epochs=arguments.epochs,
                    samples=arguments.samples,
                )
            )
    return made


def run(task: Task, data: Path, folder: Path) -> Run:
    """Train once.

    Raises:
        BenchmarkError: the job failed, or is not the one that was asked for.
    """
    given = [str(data), str(folder), str(task.seed), str(task.epochs), str(task.samples)]
    env = {"HOROVOD_FT_POLICY": task.policy, "HOROVOD_FT_FAULTS": as_toml(task.plan)}
    began = time.monotonic()
    job = run_workers("accuracy", given, task.workers, folder, env=env, timeout_s=120 + task.steps)
    return measured(task, folder, job.events_folder, job.ledger_folder, time.monotonic() - began)


def run_all(todo: Sequence[Task], data: Path, folder: Path) -> tuple[list[Run], list[str]]:
    """All runs, and what went wrong; one that fails does not stop the others."""
    runs: list[Run] = []
    failures = []
    seed = 0
    for number, task in enumerate(todo):
        if task.plan and task.seed != seed:
            seed = task.seed
            console.print(f"seed {seed}: " + "; ".join(map(str, task.plan)), soft_wrap=True)
        what = f"run {number + 1} of {len(todo)}, {task}"
        try:
            done = run(task, data, folder / f"seed-{task.seed}-run-{number + 1}")
            runs.append(done)
            gaps = "".join(f" {gap:.2f}" for gap in done.gaps_s)
            console.print(
                f"{escape(what)}: {done.accuracy:.2f} %, {done.seconds:.0f} s{gaps and f', gaps{gaps} s'}",
                soft_wrap=True,
            )
        except BenchmarkError as error:
            failures.append(f"{what}: {error}")
            console.print(f"{escape(what)}: [red]failed[/red]")
    return runs, failures


def report(runs: Sequence[Run], failures: Sequence[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """What goes into the JSON file."""
    result = summarized(runs, arguments.policy, whole=not failures)
    if arguments.quick:
        result["goals"] = {}  # a model that has hardly learned says nothing
    return {
        "benchmark": "policy_accuracy",
        "quick": arguments.quick,
        "workers": arguments.workers,
        "kills": arguments.kills,
        "seeds": arguments.seeds,
        "epochs": arguments.epochs,
        "samples": arguments.samples,
        "global_batch": GLOBAL_BATCH,
        "steps": steps_of(arguments.samples, arguments.epochs),
        "plans": {task.seed: [str(fault) for fault in task.plan] for task in tasks(arguments) if task.plan},
        **result,
        **circumstances(),
        "failures": list(failures),
    }


def show(result: dict[str, Any]) -> None:
    """The table, and whether the goals are met."""
    console.print(
        f"Test accuracy after {result['steps']} steps; {result['kills']} of {result['workers']} workers killed in each "
        "run with a policy.\nMedian and range, worst difference to the failure-free run of the seed; counts over all "
        f"seeds ({result['seeds']})."
    )
    table = Table(box=box.SIMPLE, show_edge=False, padding=0, leading=1)
    for column in ("", "accuracy\n%", "worst\npoints", "gap\ns", "lost\nsteps", "lossy\nelements", "lossy\nsamples"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row(REFERENCE, ranged(result["failure_free"]["accuracy_spread"]))
    for policy, its in result["policies"].items():
        worst = its["worst_points"]
        table.add_row(
            escape(wrapped(policy)),
            ranged(its["accuracy_spread"]),
            f"{worst:+.2f}" if abs(worst) <= GOAL_POINTS else f"[red]{worst:+.2f}[/red]",
            ranged(its["gap_spread_s"]),
            f"{sum(its['replayed_steps'])} again\n{sum(its['lossy_steps'])} lossy",
            share(sum(its["lossy_elements"]), sum(its["carried_elements"])),
            f"{sum(its['lossy_samples']):,}",
        )
    console.print(table)
    if result["quick"]:
        console.print("--quick only shows that everything works: these accuracies mean nothing")
    for goal, met in result["goals"].items():
        console.print(told(goal, met))


def ranged(values: dict[str, float]) -> str:
    return f"{values['median']:.2f}\n{values['min']:.2f}..{values['max']:.2f}"


def share(part: int, whole: int) -> str:
    """How many of the elements of the updates that were carried forward."""
    return f"{part:,}\nof {whole:,}" if whole else "none"


def parsed(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. Whatever is wrong with it is said before any job starts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER",
                        help="MNIST's four files as they are distributed, packed or not")  # fmt: skip
    parser.add_argument("--policy", action="append", metavar="NAME",
                        help=f"as in HOROVOD_FT_POLICY; give it once for each (default: {', '.join(POLICIES)})"
                        .replace("%", "%%"))  # fmt: skip
    parser.add_argument("--seeds", type=int, default=5, help="1 to this one (default: 5)")
    parser.add_argument("--kills", type=int, default=3, help="in each run with a policy (default: 3)")
    parser.add_argument("--workers", type=int, default=4, help="to start with (default: 4)")
    parser.add_argument("--epochs", type=int, default=1, help="passes over the training images (default: 1)")
    parser.add_argument("--samples", type=int, default=TRAIN.size, help="train on the first so many (default: all)")
    parser.add_argument("--quick", action="store_true", help=f"one seed, {QUICK_SAMPLES} samples: does it work at all?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results as one JSON object")
    parser.add_argument("--png", type=Path, metavar="FILE", default=Path("policy_accuracy.png"),
                        help="write the chart here (default: policy_accuracy.png)")  # fmt: skip
    parser.add_argument("--folder", type=Path, help="keep logs, events and ledgers here (default: a temporary folder)")
    arguments = parser.parse_args(given)
    arguments.policy = list(dict.fromkeys(arguments.policy or POLICIES))
    if arguments.quick:
        arguments.seeds, arguments.samples = 1, min(arguments.samples, QUICK_SAMPLES)
    problem = wrong(arguments)
    if problem:
        parser.error(problem)
    return arguments


def wrong(arguments: argparse.Namespace) -> str | None:
    """What makes the command line impossible, if anything."""
    for name in ("seeds", "kills", "epochs"):
        if getattr(arguments, name) < 1:
            return f"--{name} is {getattr(arguments, name)}; it must be at least 1"
    if not 1 <= arguments.samples <= TRAIN.size:
        return f"--samples is {arguments.samples}; MNIST has 1 to {TRAIN.size}"
    if arguments.kills >= arguments.workers:
        return f"--kills {arguments.kills} leaves nobody of --workers {arguments.workers}: at least one has to survive"
    steps = steps_of(arguments.samples, arguments.epochs)
    if steps < LEAST_STEPS_A_KILL * arguments.kills:
        return f"{steps} steps are too few for {arguments.kills} kills: give more --samples or --epochs"
    for policy in arguments.policy:
        try:
            parse_policy(policy)
        except PolicyError as error:
            return f"--policy: {error}"
    for option, path in (("--json", arguments.json), ("--png", arguments.png)):
        if path is not None and (path.is_dir() or not os.access(path.resolve().parent, os.W_OK)):
            return f"{option} {path} cannot be written: give a file in a folder that exists"
    return None


def main() -> int:
    arguments = parsed()
    for part in (TRAIN, TEST):
        load(arguments.data, part)  # before any job starts: the workers' complaints would be many
    with tempfile.TemporaryDirectory(prefix="horovod_ft-bench-") as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        if folder.exists() and any(folder.iterdir()):
            raise BenchmarkError(f"{folder} is not empty: --folder needs a new or an empty one")
        runs, failures = run_all(tasks(arguments), arguments.data.resolve(), folder)
    if any(not done.policy for done in runs):
        result = report(runs, failures, arguments)
        show(result)
        write_json(arguments.json, result)
        draw(result, arguments.png)
        console.print(f"chart: {arguments.png}")
    for failure in failures:
        print(f"policy_accuracy.py: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    guarded(main)
