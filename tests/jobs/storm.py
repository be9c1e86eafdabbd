"""One operation after the other is handed to Horovod, hundreds of them in flight, until worker 1 kills itself.

``python -m tests.jobs.storm FOLDER``: each survivor leaves how many came back.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import deque
from pathlib import Path

import torch

import horovod_ft.torch as hvd
from horovod_ft.torch.handles import done, wait
from horovod_ft.torch.runtime import current

FOLDER = Path(sys.argv[1])
NAMES, IN_FLIGHT, AT_ONCE = 1000, 800, 100


def main() -> None:
    hvd.init()
    runtime = current()
    if hvd.rank() == 1:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
    flying: deque[int] = deque()
    handed_over = back = 0
    try:
        while True:
            for _ in range(AT_ONCE):
                flying.append(hvd.allreduce_async(torch.ones(4), name=f"{handed_over % NAMES}", op=hvd.Sum))
                handed_over += 1
            while flying and (len(flying) > IN_FLIGHT or done(flying[0])):
                wait(flying[0], stopped=runtime.binding.stopped)
                hvd.synchronize(flying.popleft())
                back += 1
    except hvd.HorovodInternalError:
        runtime.membership.abort()
    (FOLDER / f"back-{hvd.rank()}").write_text(str(back))
    os._exit(1)  # the job is over, and nobody forms another group


if __name__ == "__main__":
    main()
