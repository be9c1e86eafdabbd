"""The runs of ``policy_accuracy.py``: the faults they are given, what each left behind, and what all of them say.

Nothing here starts a process or imports a framework.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import BenchmarkError, spread
from horovod_ft.events import read_events
from horovod_ft.faults.plan import Fault
from horovod_ft.ledger import LedgerReport, verify_ledger
from horovod_ft.timeline import recoveries

GLOBAL_BATCH = 256
#: Of the model in ``workers/accuracy.py``: two convolutions and two linear layers, each with a bias.
GRADIENTS = 8
#: Fewer steps for each kill, and two of them could come so close that the second hits the recovery of the first.
LEAST_STEPS_A_KILL = 10
GOAL_POINTS, GOAL_ACCURACY = 1.0, 97.0


@dataclass(frozen=True)
class Task:
    """What a run is to do.

    Attributes:
        policy: as in HOROVOD_FT_POLICY; empty in a run without failures.
        lossy: the policy may carry a mini-batch forward without the samples of the dead.
        plan: its kills; empty in a run without failures.
        workers: to start with.
    """

    seed: int
    policy: str
    lossy: bool
    plan: tuple[Fault, ...]
    workers: int
    epochs: int
    samples: int

    @property
    def steps(self) -> int:
        return steps_of(self.samples, self.epochs)

    def __str__(self) -> str:
        return f"seed {self.seed}, {self.policy or 'no failures'}"


@dataclass(frozen=True)
class Run:
    """What a run has left.

    Attributes:
        accuracy: on all test images, in percent.
        gaps_s: of each recovery, the longest of all workers'.
        replayed_steps: steps that were begun in one group and computed in another one.
        lossy_steps: steps that were finished without a part of their samples.
        lossy_elements: elements of gradients in which those samples do not count.
        carried_elements: all elements of the gradients of the lossy steps.
        lossy_samples: samples that do not count in some element of their step.
        seconds: for the whole job, with its start.
    """

    seed: int
    policy: str
    accuracy: float
    gaps_s: tuple[float, ...]
    replayed_steps: int
    lossy_steps: int
    lossy_elements: int
    carried_elements: int
    lossy_samples: int
    seconds: float

    @property
    def lost_steps(self) -> int:
        return self.replayed_steps + self.lossy_steps


def steps_of(samples: int, epochs: int) -> int:
    return epochs * -(-samples // GLOBAL_BATCH)


def draw_plan(seed: int, *, workers: int, kills: int, steps: int) -> tuple[Fault, ...]:
    """Kills of different workers in allreduces, one in each of ``kills`` equal stretches of the training.

    Each worker dies when a random number of the step's gradients has been reduced: from none of them to all.
    """
    chance = random.Random(f"policy_accuracy {seed}")
    stretch = steps / kills
    return tuple(
        Fault(
            phase="allreduce",
            worker=worker,
            step=int((index + chance.uniform(0.1, 0.9)) * stretch),  # away from the ends, as the next is elsewhere
            after=chance.randint(0, GRADIENTS),
        )
        for index, worker in enumerate(chance.sample(range(workers), kills))
    )


def as_toml(plan: Sequence[Fault]) -> str:
    """A plan of ``draw_plan`` as HOROVOD_FT_FAULTS takes it; empty for an empty one."""
    return "\n".join(
        f'[[fault]]\nworker = {fault.worker}\nstep = {fault.step}\nphase = "{fault.phase}"\nafter = {fault.after}\n'
        f'kind = "{fault.kind}"'
        for fault in plan
    )


# --- one run ---------------------------------------------------------------------------------------------------------


def measured(task: Task, folder: Path, events: Path, ledger: Path, seconds: float) -> Run:
    """Read what a run has left.

    Args:
        folder: with the survivors' results.
        events, ledger: folders.

    Raises:
        BenchmarkError: it is not the run that was asked for: not all of its faults happened, not all of the others
            came to its end, they differ, or the ledger does not add up.
    """
    happened = read_events(events)
    fired = sorted(event.data["fault"] for event in happened if event.kind == "fault")
    planned = sorted(map(str, task.plan))
    if fired != planned:
        raise BenchmarkError(f"{task}: planned were the faults {planned}, and {fired} happened")
    found = recoveries(happened)
    if task.plan and not found:
        raise BenchmarkError(f"{task}: {len(task.plan)} workers were killed, and the events tell of no recovery")
    result = _result(task, folder)
    report = verify_ledger(ledger)
    check_ledger(task, report)
    return Run(
        seed=task.seed,
        policy=task.policy,
        accuracy=100 * result["correct"] / result["of"],
        gaps_s=tuple(recovery.gap_s for recovery in found),
        replayed_steps=len(replayed(ledger)),
        lossy_steps=len(report.lossy),
        lossy_elements=sum(lossy.elements for lossy in report.lossy.values()),
        carried_elements=sum(lossy.of for lossy in report.lossy.values()),
        lossy_samples=sum(len(lossy.ids) for lossy in report.lossy.values()),
        seconds=seconds,
    )


def _result(task: Task, folder: Path) -> dict[str, Any]:
    """What all survivors say."""
    results = {
        int(path.stem.removeprefix("survivor-")): json.loads(path.read_text())
        for path in sorted(folder.glob("survivor-*.json"))
    }
    expected = set(range(task.workers)) - {fault.worker for fault in task.plan}
    if set(results) != expected:
        raise BenchmarkError(f"{task}: the workers {sorted(results)} came to the end, not {sorted(expected)}")
    first, *others = results.values()
    if any(other != first for other in others):
        raise BenchmarkError(f"{task}: the workers do not have the same model in the end: {results}")
    if first["steps"] != task.steps:
        raise BenchmarkError(f"{task}: {first['steps']} steps were done, not {task.steps}")
    found: dict[str, Any] = first
    return found


def check_ledger(task: Task, report: LedgerReport) -> None:
    """Every sample once an epoch; under a policy that goes forward it may have lost weight.

    Raises:
        BenchmarkError: it is not so.
    """
    if not report.complete:
        raise BenchmarkError(f"{task}: the ledger does not add up: {'; '.join(report.problems) or 'it is empty'}")
    if not task.lossy and not report.exact:
        raise BenchmarkError(f"{task}: samples lost weight in the steps {sorted(report.lossy)}; none should have")
    if (report.epochs, report.steps) != (task.epochs, task.steps):
        raise BenchmarkError(
            f"{task}: the ledger has {report.epochs} whole epochs and {report.steps} steps, not {task.epochs} and "
            f"{task.steps}"
        )


def replayed(ledger: Path) -> set[int]:
    """Steps that a worker began in a group that broke, that it lived on from, and that did not finish them."""
    records = [
        (path.stem, record)
        for path in sorted(ledger.glob("ledger-*.jsonl"))
        for record in map(json.loads, path.read_text().splitlines())
        if record["kind"] in ("dealt", "committed")
    ]
    last: dict[str, int] = defaultdict(int)
    computed: dict[int, int] = defaultdict(int)
    for worker, record in records:
        last[worker] = max(last[worker], record["generation"])
        if record["kind"] == "committed":
            computed[record["step"]] = max(computed[record["step"]], record["generation"])
    return {
        record["step"]
        for worker, record in records
        if record["kind"] == "dealt" and record["generation"] < min(last[worker], computed[record["step"]])
    }


# --- all runs --------------------------------------------------------------------------------------------------------


def summarized(runs: Sequence[Run], policies: Sequence[str], *, whole: bool) -> dict[str, Any]:
    """What all runs say, for the JSON file. Policies without a run that can be compared are left out.

    Args:
        whole: no run is missing; otherwise no goal counts as met.
    """
    reference = {run.seed: run for run in runs if not run.policy}
    by_policy = {policy: [run for run in runs if run.policy == policy and run.seed in reference] for policy in policies}
    compared = {policy: _compared(its, reference) for policy, its in by_policy.items() if its}
    accuracies = [run.accuracy for run in reference.values()]
    close = {policy: abs(values["worst_points"]) <= GOAL_POINTS for policy, values in compared.items()}
    return {
        "failure_free": {
            "seeds": list(reference),
            "accuracies": accuracies,
            "accuracy_spread": spread(accuracies),
            "seconds": [run.seconds for run in reference.values()],
        },
        "policies": compared,
        "goals": {
            **{
                f"{policy}: within {GOAL_POINTS:g} point of the failure-free run in every seed":
                    whole and close.get(policy, False)
                for policy in policies
            },
            f"failure-free accuracy of at least {GOAL_ACCURACY:g} % in every seed":
                whole and min(accuracies) >= GOAL_ACCURACY,
        },
        "runs": [asdict(run) for run in runs],
    }  # fmt: skip


def _compared(runs: Sequence[Run], reference: dict[int, Run]) -> dict[str, Any]:
    """A policy's runs; each list has one entry a seed, in the order of ``seeds``."""
    points = [round(run.accuracy - reference[run.seed].accuracy, 6) for run in runs]
    return {
        "seeds": [run.seed for run in runs],
        "accuracies": [run.accuracy for run in runs],
        "accuracy_spread": spread([run.accuracy for run in runs]),
        "points_from_failure_free": points,
        "worst_points": max(points, key=abs),
        "gaps_s": [list(run.gaps_s) for run in runs],
        "gap_spread_s": spread([gap for run in runs for gap in run.gaps_s]),
        "lost_steps": [run.lost_steps for run in runs],
        "replayed_steps": [run.replayed_steps for run in runs],
        "lossy_steps": [run.lossy_steps for run in runs],
        "lossy_elements": [run.lossy_elements for run in runs],
        "carried_elements": [run.carried_elements for run in runs],
        "lossy_samples": [run.lossy_samples for run in runs],
        "seconds": [run.seconds for run in runs],
    }
