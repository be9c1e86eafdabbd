"""Jobs of a module whose workers go through several Keras trainings, and leave what each of them ended with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from horovod_ft.testing.local_job import LocalJob
from tests.jobs.harness import HERE, LAUNCHER

#: A newcomer imports TensorFlow while the others wait for it in Gloo.
ENV = {"PYTHONPATH": str(HERE.parent.parent), "TF_CPP_MIN_LOG_LEVEL": "3", "TF_NUM_INTRAOP_THREADS": "1",
       "HOROVOD_GLOO_TIMEOUT_SECONDS": "120"}  # fmt: skip


class KerasJobs:
    """
    Args:
        module: run by each worker with a folder and the name of a job.
        timeout_s: bound of each job.
    """

    def __init__(self, module: str, timeout_s: float) -> None:
        self._module = module
        self._timeout_s = timeout_s
        self._ran: dict[str, Path] = {}

    def once(self, job: str, workers: int, folders: pytest.TempPathFactory) -> Path:
        """The folder in which the workers of a job have left something. The job runs when it is asked for first."""
        if job not in self._ran:
            self._ran[job] = folders.mktemp(job)
            self.run(self._ran[job], job, workers)
        return self._ran[job]

    def run(
        self,
        folder: Path,
        job: str,
        workers: int,
        during: Callable[[LocalJob], None] = lambda job: None,
        *,
        ends_well: bool = True,
    ) -> Path:
        """Run a job to its end, and see that no process is left. Returns the folder."""
        command = [sys.executable, "-m", self._module, str(folder), job]
        with LocalJob(command, workers, folder, env=ENV, launcher=LAUNCHER) as running:
            during(running)
            finished = running.wait(self._timeout_s)
        assert (finished.returncode == 0) == ends_well, finished.output[-6000:]
        assert finished.leftovers == 0
        return folder


def add_a_worker(job: LocalJob) -> None:
    """Let a third one join while two hold; see ``keras_fit.hold``."""
    job.wait_for("the workers to hold", lambda job: len(list(job.folder.glob("holding-*"))) == 2)
    job.add_host()
    job.wait_for("the driver's announcement", lambda job: (job.folder / "heard").exists())
    (job.folder / "release").touch()
