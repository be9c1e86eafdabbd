"""Nothing but small reductions, one operation each, until worker 1 kills itself at some moment.

``python -m tests.jobs.reductions FOLDER SEED``: each survivor leaves what it got for reductions that "succeeded".
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import torch

import horovod_ft.torch as hvd
from horovod_ft.torch.runtime import current

FOLDER, SEED = Path(sys.argv[1]), int(sys.argv[2])
LENGTHS = (1, 3, 8, 40, 300, 3000)
TENSORS = 12
BOUND_S = 10.0


def main() -> None:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    chosen = random.Random(SEED)
    moment = chosen.uniform(0.2, 0.8)
    lengths = [chosen.choice(LENGTHS) for _ in range(TENSORS)]
    if rank == 1:
        threading.Timer(moment, os.kill, (os.getpid(), signal.SIGKILL)).start()
    right = failed = 0
    wrong: list[str] = []
    deadline = time.monotonic() + BOUND_S
    while not failed and time.monotonic() < deadline:
        values = [float(index + 1 + right % 7) for index in range(TENSORS)]
        handles = [
            hvd.allreduce_async(torch.full((lengths[index],), (rank + 1) * values[index]), name=f"{index}", op=hvd.Sum)
            for index in range(TENSORS)
        ]
        for index, handle in enumerate(handles):
            try:
                got = hvd.synchronize(handle)
            except hvd.HorovodInternalError:
                failed += 1
                current().membership.abort()
                continue
            expected = values[index] * size * (size + 1) / 2
            if (got == expected).all():
                right += 1
            else:
                wrong.append(f"{got.unique().tolist()[:5]} for {expected}")
    (FOLDER / f"reduced-{rank}.json").write_text(json.dumps({"right": right, "failed": failed, "wrong": wrong}))
    os._exit(1)  # the job is over, and nobody forms another group


if __name__ == "__main__":
    main()
