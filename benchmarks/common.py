"""What the benchmark scripts share: running a job of workers, statistics, facts about this machine, the JSON file.

Nothing here measures anything, and nothing here imports a framework.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import psutil
from rich.console import Console

from horovod_ft.testing.local_job import LocalJob

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("horovod_ft", "horovod", "torch", "numpy")

console = Console(highlight=False)


class BenchmarkError(Exception):
    """A job failed, or did not leave what was to be measured; the message is for the reader of the terminal."""


def run_workers(
    module: str,
    arguments: Sequence[str],
    workers: int,
    folder: Path,
    *,
    env: Mapping[str, str] | None = None,
    timeout_s: float,
    fixed_hosts: bool = True,
    launcher: Sequence[str] | None = None,
) -> LocalJob:
    """Run ``python -m benchmarks.workers.MODULE ARGUMENTS`` as an elastic job to its end; no process outlives it.

    Args:
        env: added to the environment of the workers; empty values remove a name.
        timeout_s: bound of the whole job.
        fixed_hosts, launcher: as in ``LocalJob``.

    Raises:
        BenchmarkError: it failed or did not end in time; shows the end of its log.
    """
    command = [sys.executable, "-m", f"benchmarks.workers.{module}", *arguments]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with LocalJob(
        command, workers, folder, env={"PYTHONPATH": path, **(env or {})}, fixed_hosts=fixed_hosts, launcher=launcher
    ) as job:
        finished = job.wait(timeout_s)
    if finished.returncode != 0:
        ended = f"ended with status {finished.returncode}" if finished.returncode is not None else "had to be killed"
        raise BenchmarkError(
            f"a job ({module} {' '.join(arguments)}) {ended} after {finished.seconds:.0f} s; its log ends with:\n"
            f"{finished.output[-6000:]}"
        )
    return job


def guarded(main: Callable[[], int]) -> NoReturn:
    """Run a script's ``main`` and exit with its status; a SIGTERM ends the running job too."""
    signal.signal(signal.SIGTERM, _leave)
    try:
        sys.exit(main())
    except BenchmarkError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(1)


def _leave(*_: object) -> None:
    """Exit through all ``with`` blocks, undisturbed by further signals: ``timeout`` and shells send two."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + signal.SIGTERM)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles, extremes and number of values."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": middle, "q1": low, "q3": high, "min": min(values), "max": max(values), "count": len(values)}


def circumstances() -> dict[str, Any]:
    """Versions and machine facts that go into every JSON file."""
    return {
        "versions": {"python": platform.python_version()} | {name: metadata.version(name) for name in PACKAGES},
        "machine": {
            "cores": len(os.sched_getaffinity(0)),
            "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
            "architecture": platform.machine(),
            "system": f"{platform.system()} {platform.release()}",
        },
    }


def write_json(path: Path | None, result: Mapping[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n")


def told(goal: str, met: bool) -> str:
    """A line that says whether a goal is met."""
    return f"  goal: {goal}: " + ("[green]met[/green]" if met else "[red]NOT met[/red]")
