"""Run the training of ``task.py`` as a real job with faults, and check what must hold after every recovery."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from horovod_ft.events import Event
from horovod_ft.ledger import LedgerReport, verify_ledger
from horovod_ft.testing.local_job import Finished, LocalJob
from tests.jobs.task import NOTHING, Carried, Config, reference
from tests.jobs.zygote import Zygote

HERE = Path(__file__).parent
#: ``horovodrun`` with faults of its own left out; it starts 4 s sooner, too.
LAUNCHER = [sys.executable, "-m", "horovod_ft.agent.launcher", "--"]


class Workers:
    """How workers are started; set by ``conftest.py``."""

    zygote: Zygote | None = None

    @classmethod
    def command(cls, module: str, *arguments: str) -> list[str]:
        """What runs a module as a worker."""
        if cls.zygote is not None:
            return cls.zygote.command(module, *arguments)
        return [sys.executable, "-m", module, *arguments]


Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass
class Result:
    """What one worker left at the end."""

    worker: str
    scalars: dict[str, Any]
    arrays: Arrays


@dataclass
class Outcome:
    """A finished job."""

    config: Config
    finished: Finished
    events: list[Event]
    ledger: LedgerReport
    results: list[Result] = field(default_factory=list)

    def kinds(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]

    def start_ranks(self) -> set[int]:
        """Start ranks of the workers that reached the end."""
        return {int(result.worker.split("-")[-2]) for result in self.results}

    def fired(self) -> list[str]:
        return [event.data["fault"] for event in self.kinds("fault")]


def fault(worker: int, step: int, phase: str, **more: Any) -> str:
    """One entry of a fault plan, as TOML."""
    entry = {"worker": worker, "step": step, "phase": phase, **more}
    return "[[fault]]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in entry.items())


def run_job(
    folder: Path,
    faults: Sequence[str] = (),
    *,
    workers: int = 3,
    min_workers: int = 1,
    during: Callable[[LocalJob], None] | None = None,
    arguments: Sequence[str] = (),
    script: Sequence[str] = (),
    env: dict[str, str] | None = None,
    timeout_s: float = 75.0,
    launcher: Sequence[str] = LAUNCHER,
    **config: Any,
) -> Outcome:
    """Run a job to its end; ``during`` is called while it runs. Further arguments are fields of ``Config``.

    ``script`` is another module for the workers to run, with its arguments.
    """
    folder.mkdir(parents=True, exist_ok=True)
    chosen = Config(folder=str(folder), **config)
    command = Workers.command(*(script or ("tests.jobs.training", chosen.write())))
    environment = {"HOROVOD_FT_FAULTS": "\n".join(faults), "PYTHONPATH": str(HERE.parent.parent), **(env or {})}
    with LocalJob(
        command, workers, folder, min_workers=min_workers, env=environment, arguments=arguments,
        launcher=launcher,
    ) as job:  # fmt: skip
        if during is not None:
            during(job)
        finished = job.wait(timeout_s)
    tracked = any(path.stat().st_size for path in job.ledger_folder.glob("*"))
    ledger = verify_ledger(job.ledger_folder) if tracked else LedgerReport()
    return Outcome(chosen, finished, job.events(), ledger, [_result(path) for path in sorted(folder.glob("result-*"))])


def _result(path: Path) -> Result:
    with np.load(path) as stored:
        arrays = {name: stored[name] for name in stored.files if name != "scalars"}
        return Result(path.stem, json.loads(str(stored["scalars"])), arrays)


#: What each worker has of its own.
LOCAL = ("running_mean", "running_var", "num_batches_tracked")


def check_sound(
    outcome: Outcome, survivors: set[int], *, returncode: int | None = 0, lossy: bool = False
) -> None:
    """After any recovery: who should be there is there, all are equal, no sample was lost or repeated.

    With ``lossy`` samples may have lost weight, and the ledger accounts for them.
    """
    told = outcome.finished.output[-6000:]
    assert outcome.finished.returncode == returncode, told
    assert outcome.start_ranks() == survivors, told
    assert outcome.finished.leftovers == 0
    first = outcome.results[0]
    for other in outcome.results[1:]:
        assert {**other.scalars, "rank": 0} == {**first.scalars, "rank": 0}
        assert_equal_arrays(other.arrays, first.arrays)
    assert outcome.ledger.complete, outcome.ledger.problems
    assert lossy or outcome.ledger.exact
    assert outcome.ledger.epochs == outcome.config.epochs
    assert first.scalars["epochs_seen"] == outcome.config.epochs
    assert first.scalars["scheduler"] == first.scalars["steps"] == outcome.ledger.steps


def assert_equal_arrays(left: Arrays, right: Arrays) -> None:
    """Bitwise, except for what each worker has of its own."""
    assert left.keys() == right.keys()
    for name in left:
        if not name.endswith(LOCAL):
            assert left[name].tobytes() == right[name].tobytes(), f"{name} differs between workers"


def check_like_reference(
    outcome: Outcome, *, tolerance: float = 1e-10, carried: Mapping[int, Carried] = NOTHING
) -> None:
    """The final parameters are those of a run without failures, up to rounding; ``carried`` as in ``reference``."""
    expected = reference(outcome.config, carried)
    for name, value in expected.items():
        trained = outcome.results[0].arrays[f"model.{name}"]
        np.testing.assert_allclose(trained, value, rtol=0, atol=tolerance, err_msg=name)


def check_close(left: Arrays, right: Arrays, tolerance: float = 1e-10) -> None:
    """Equal up to rounding, what each worker has of its own included."""
    assert left.keys() == right.keys()
    for name, value in left.items():
        np.testing.assert_allclose(value, right[name], rtol=0, atol=tolerance, err_msg=name)


def recovered_at(outcome: Outcome) -> list[tuple[int, int]]:
    """For each recovery: the step training went on from, and the size of the group it went on with."""
    seen = {event.generation: (event.step, event.size) for event in outcome.kinds("recovered")}
    return [seen[generation] for generation in sorted(seen)]
