"""A worker of ``test_run.py``: it does no training, and ends as it is told.

``python -m tests.jobs.run_script FOLDER HOW``: each worker leaves an empty file named after its attempt and its rank.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from horovod_ft.settings import Settings


def main(folder: str, how: str) -> None:
    settings = Settings.from_environment()
    if how == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (Path(folder) / f"ran-{settings.attempt}-{settings.start_rank}").touch()
    print(f"attempt {settings.attempt}, argument {sys.argv[3:]}", flush=True)
    if how == "always killed" or (how == "killed once" and settings.attempt == 0):
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raises":
        raise ValueError("an error of the script")
    if how in ("waits", "stubborn"):
        time.sleep(100)
    if how.startswith("listens"):
        sys.exit(listen(Path(folder), settings.start_rank, int(how.split()[1])))


def listen(folder: Path, rank: int, status: int) -> int:
    """Join the group, and wait to be told that the job will be ended. Returns the status."""
    import horovod_ft.torch as hvd  # noqa: PLC0415  seconds, which the others do not need
    from horovod_ft.torch.runtime import current  # noqa: PLC0415

    hvd.init()
    membership = current().membership
    membership.watch()
    (folder / f"listens-{rank}").touch()
    while not membership.preempted():
        time.sleep(0.01)
    (folder / f"heard-{rank}").touch()
    return status


if __name__ == "__main__":
    main(*sys.argv[1:3])
