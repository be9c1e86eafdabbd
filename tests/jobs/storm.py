"""Hundreds of operations are handed to Horovod in one go, again and again, until worker 1 kills itself.

``python -m tests.jobs.storm FOLDER``: each survivor leaves how often it handed them over.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import torch

import horovod_ft.torch as hvd
from horovod_ft.torch.handles import wait
from horovod_ft.torch.runtime import current

FOLDER = Path(sys.argv[1])
TENSORS = 500


def main() -> None:
    hvd.init()
    runtime = current()
    if hvd.rank() == 1:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
    rounds = 0
    try:
        while True:
            handles = [hvd.allreduce_async(torch.ones(4), name=f"{index}", op=hvd.Sum) for index in range(TENSORS)]
            for handle in handles:
                wait(handle, stopped=runtime.binding.stopped)
                hvd.synchronize(handle)
            rounds += 1
    except hvd.HorovodInternalError:
        runtime.membership.abort()
    (FOLDER / f"rounds-{hvd.rank()}").write_text(str(rounds))
    os._exit(1)  # the job is over, and nobody forms another group


if __name__ == "__main__":
    main()
