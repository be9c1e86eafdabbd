"""One worker of ``init_scale.py``: how long does ``hvd.init()`` take, if all workers call it at the same time?

``python -m benchmarks.workers.init FOLDER WORKERS TIMES`` forms the group ``TIMES`` times and writes the seconds of
each to ``init-RANK.json``. Before each time all workers wait for each other with files, so that neither their imports
nor anything else before it counts. It is stock ``horovod.torch``, whatever launched it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import horovod.torch as hvd


def together(folder: Path, number: int, workers: int) -> None:
    """Wait until so many workers are here. The job has a bound, and ends this one at it."""
    (folder / f"here-{number}-{os.environ['HOROVOD_RANK']}").touch()
    while len(list(folder.glob(f"here-{number}-*"))) < workers:
        time.sleep(0.005)


def main(folder: str, workers: str, times: str) -> None:
    seconds = []
    name = f"init-{os.environ['HOROVOD_RANK']}.json"  # its rank at the start: each init gives another one
    for number in range(int(times)):
        together(Path(folder), number, int(workers))
        began = time.perf_counter()
        hvd.init()
        seconds.append(time.perf_counter() - began)
        if hvd.size() != int(workers):
            sys.exit(f"a group of {hvd.size()} formed, not of {workers}")
        hvd.shutdown()
    Path(folder, name).write_text(json.dumps(seconds))
    together(Path(folder), int(times), int(workers))  # the launcher would end those that are not done yet


if __name__ == "__main__":
    main(*sys.argv[1:])
