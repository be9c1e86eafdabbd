"""One worker of ``step_overhead.py``: commits of 200 MB of state, stock ``TorchState.commit()`` and ours in turns.

``python -m benchmarks.workers.commits FOLDER SECONDS``. The state is a 25 M parameter model and its momentum, float32.
Our commit is what ``with state.step()`` adds to a step: entering and leaving it with nothing inside, with the small
allreduce in which the workers tell each other about newcomers. In a real step that one is under way while the body
runs; what remains then is measured too. So is a full copy into one of the two arenas of a ``StateCommitter``.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import horovod.torch
import torch

import horovod_ft.torch as hvd
from benchmarks.workers.models import SHAPES, Training
from benchmarks.workers.pairs import Pairs, Work, alternate, barrier, slowest

#: How long the body of a step computes, where what remains beside one is measured.
BODY_S = 0.02


def once(work: Work) -> float:
    """Seconds until the slowest worker is through, if all begin together."""
    barrier()
    began = time.perf_counter()
    work()
    return slowest(time.perf_counter() - began)


def beside_a_body(state: Any) -> float:
    """Seconds that a step takes longer than its body."""
    barrier()
    matrix = torch.ones(64, 64)
    began = time.perf_counter()
    with state.step():
        entered = time.perf_counter()
        while time.perf_counter() < entered + BODY_S:
            torch.mm(matrix, matrix)
        done = time.perf_counter()
    return slowest(entered - began + time.perf_counter() - done)


def trained(distributed: Any, prefix: str) -> Training:
    """Model and momentum, each 100 MB, without gradients."""
    training = Training(distributed, SHAPES["25M"], prefix, hvd.rank())
    training.step()
    training.optimizer.zero_grad()
    return training


def main(folder: str, seconds: str) -> None:
    hvd.init()
    stock, ours = trained(horovod.torch.DistributedOptimizer, "stock"), trained(hvd.DistributedOptimizer, "ours")
    stock_state = horovod.torch.elastic.TorchState(model=stock.model, optimizer=stock.optimizer)
    state = hvd.elastic.TorchState(model=ours.model, optimizer=ours.optimizer)
    committer = hvd.elastic.StateCommitter(state, every=None, keep="copy")

    def commit() -> None:
        with state.step():
            pass

    @hvd.elastic.run
    def train(state: Any) -> None:
        for work in (stock_state.commit, commit, state.save, state.save):
            once(work)
        one = max(once(stock_state.commit) for _ in range(3))
        count = max(10, round(float(seconds) / (one + BODY_S)))
        times = alternate(stock_state.commit, commit, once, count)
        extra = [beside_a_body(state) for _ in range(count)]
        copies = alternate(stock_state.commit, state.save, once, count)
        Pairs(1, *times, extra, *copies, committer.nbytes / 1e6).write(Path(folder))

    train(state)
    hvd.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
