"""The demo behind scripts/demo: a real job, a real SIGKILL, a newcomer, and a summary of what it cost."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from horovod_ft.events import Event
from horovod_ft.ledger import verify_ledger
from horovod_ft.testing.local_job import Finished, LocalJob
from horovod_ft.timeline import Recovery, recoveries, world_sizes

HERE = Path(__file__).parent
SCRIPTS = {"torch": "train_digits.py", "keras": "train_digits_keras.py"}
#: No word from TensorFlow of itself, and no threads that four workers on a small machine are better without. On a busy
#: one a newcomer may take longer to import it than the 30 s for which Horovod would wait.
TENSORFLOW = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2",
              "HOROVOD_GLOO_TIMEOUT_SECONDS": "120"}  # fmt: skip
#: The job takes 40 s on two idle cores. After this it is ended.
BOUND_S = 240.0
PLAN = """
[[fault]]
worker = 2
step = {step}
phase = "allreduce"
after = 4
kind = "kill"
"""
TELL = {
    "fault": "[red]SIGKILL[/red]: {data[fault]}",
    "failure_detected": "noticed the failure {data[since_last_commit_s]:.3f} s after its last step",
    "reformed": "is rank {rank} of {size} in the new group",
    "joined": "[green]joined[/green] as rank {rank} of {size}, at step {step}",
    "resumed": "[green]goes on[/green]: {data[gap_s]:.3f} s from the last step before to the first one after",
}

console = Console(highlight=False)


@dataclass
class Summary:
    """What ``--json`` writes. ``gap_s`` is the longest of all workers', in seconds.

    ``ledger_exact``: every sample counted in full, exactly once an epoch. ``ledger_complete``: as that, but for
    ``lossy_samples``, which lost weight when their step was carried forward.
    """

    recoveries: list[dict[str, Any]]
    world_sizes: list[int]
    test_accuracy: float
    ledger_exact: bool
    ledger_complete: bool
    lossy_samples: int
    replicas_equal: bool
    steps: int
    seconds: float

    @property
    def good(self) -> bool:
        return bool(self.recoveries) and self.ledger_complete and self.replicas_equal


class Progress:
    """Prints what is new in the workers' output and in their events."""

    def __init__(self) -> None:
        self._printed = 0
        self._told: set[tuple[str, float]] = set()
        self._began = time.time()

    def show(self, job: LocalJob) -> None:
        lines = job.output().splitlines()
        for line in lines[self._printed :]:
            if "<stdout>:" in line:
                console.print("  " + line.split("<stdout>:", 1)[1])
        self._printed = len(lines)
        for event in job.events():
            key = (event.worker, event.mono)
            if event.kind in TELL and key not in self._told:
                self._told.add(key)
                console.print(f"  [bold]{self._what(event)}[/bold]")

    def _what(self, event: Event) -> str:
        start_rank = event.worker.rsplit(":", 2)[1]
        text = TELL[event.kind].format(**asdict(event))
        return f"[{event.wall - self._began:5.1f} s] worker {start_rank} {text}"


def run(arguments: argparse.Namespace, folder: Path) -> tuple[Finished, LocalJob]:
    command = [sys.executable, str(HERE / SCRIPTS[arguments.framework]), "--result", str(folder / "result"),
               "--epochs", str(arguments.epochs), "--seed", str(arguments.seed)]  # fmt: skip
    env = {"HOROVOD_FT_FAULTS": PLAN.format(step=arguments.kill_at), "HOROVOD_FT_POLICY": arguments.policy}
    if arguments.framework == "keras":
        env |= TENSORFLOW
    progress = Progress()
    newcomer = False
    with LocalJob(command, 4, folder, env=env) as job:
        deadline = time.monotonic() + BOUND_S
        while job.running() and time.monotonic() < deadline:
            progress.show(job)
            if not newcomer and any(event.kind == "resumed" for event in job.events()):
                newcomer = True
                console.print(f"  [bold]the discovery script now lists a new host: {job.add_host()}[/bold]")
            time.sleep(0.1)
        finished = job.wait(5)
        progress.show(job)
    return finished, job


def summarize(finished: Finished, job: LocalJob) -> Summary:
    events = job.events()
    results = [json.loads(path.read_text()) for path in (job.folder / "result").glob("worker-*.json")]
    ledger = verify_ledger(job.ledger_folder)
    for problem in ledger.problems:
        console.print(f"[red]ledger: {problem}[/red]")
    return Summary(
        recoveries=[_recovery(recovery) for recovery in recoveries(events)],
        world_sizes=world_sizes(events),
        test_accuracy=max((result["test_accuracy"] for result in results), default=0.0),
        ledger_exact=ledger.exact,
        ledger_complete=ledger.complete,
        lossy_samples=sum(len(lossy.ids) for lossy in ledger.lossy.values()),
        replicas_equal=len(results) > 1 and len({(r["weights"], r["steps"]) for r in results}) == 1,
        steps=max((result["steps"] for result in results), default=0),
        seconds=finished.seconds,
    )


def _recovery(recovery: Recovery) -> dict[str, Any]:
    return {"step": recovery.step, "lost": list(recovery.lost), "gap_s": recovery.gap_s, "stages": recovery.stages}


def show(summary: Summary) -> None:
    table = Table(title="Summary", show_header=False)
    for recovery in summary.recoveries:
        table.add_row(f"recovery at step {recovery['step']}",
                      f"lost worker {recovery['lost']}, gap {recovery['gap_s']:.3f} s")  # fmt: skip
    table.add_row("workers over time", " -> ".join(map(str, summary.world_sizes)))
    table.add_row("test accuracy", f"{summary.test_accuracy:.1%}")
    table.add_row("every sample exactly once an epoch", samples(summary))
    table.add_row("replicas equal, bit by bit", "yes" if summary.replicas_equal else "[red]NO[/red]")
    table.add_row("steps", str(summary.steps))
    table.add_row("seconds, all processes started and ended", f"{summary.seconds:.1f}")
    console.print(table)


def samples(summary: Summary) -> str:
    if summary.ledger_exact:
        return "yes"
    if not summary.ledger_complete:
        return "[red]NO[/red]"
    return f"yes, but {summary.lossy_samples} samples lost weight"


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the summary as one JSON object")
    parser.add_argument("--folder", type=Path, help="keep events, ledger and log here (default: a temporary folder)")
    parser.add_argument("--framework", choices=SCRIPTS, default="torch", help="what trains (default: torch)")
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--kill-at", type=int, default=60, metavar="STEP", help="when worker 2 is killed")
    parser.add_argument("--policy", default="rollback", help="recovery policy, as in HOROVOD_FT_POLICY")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="horovod_ft-demo-") as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        if folder.exists() and any(folder.iterdir()):
            parser.error(f"{folder} is not empty: --folder needs a new or an empty one")
        console.print("Four workers under horovodrun. Worker 2 will be killed in the middle of an allreduce.")
        finished, job = run(arguments, folder)
        if finished.returncode != 0:
            sys.stderr.write(finished.output[-6000:])
            how = f"ended with status {finished.returncode}" if finished.returncode is not None else "was still running"
            print(f"scripts/demo: the job {how} after {finished.seconds:.0f} s", file=sys.stderr)
            return 1
        summary = summarize(finished, job)
    show(summary)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(asdict(summary), indent=2) + "\n")
    if arguments.folder is not None:
        console.print(f"The timeline of it: horovod-ft report {folder}")
    return 0 if summary.good else 1


if __name__ == "__main__":
    raise SystemExit(main())
