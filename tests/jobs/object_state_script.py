"""A training with a state of another class than ours: Horovod's own ObjectState, and a plain loop of allreduces."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import horovod_ft.torch as hvd

START_RANK = int(os.environ["HOROVOD_RANK"])
hvd.init()


@hvd.elastic.run
def train(state: Any) -> None:
    while state.total < 30:
        if START_RANK == 1 and state.total == 14 and hvd.size() == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        state.total += int(hvd.allreduce(torch.ones(1), name="one").item())
        if state.total % 5 == 0:
            state.commit()


state = hvd.elastic.ObjectState(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, total=0)
train(state)
Path(sys.argv[1], f"total-{START_RANK}").write_text(str(state.total))
