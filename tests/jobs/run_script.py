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


if __name__ == "__main__":
    main(*sys.argv[1:3])
