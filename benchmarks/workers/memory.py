"""One worker of ``step_overhead.py``: a few steps of one side alone, to see how much memory they take at most.

``python -m benchmarks.workers.memory stock|ours FOLDER MODEL STEPS`` writes the peak of the resident memory, in bytes.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import Any

from benchmarks.workers.models import SHAPES, Shape, Training


def stock(shape: Shape, count: int) -> None:
    import horovod.torch as hvd  # noqa: PLC0415  each side imports what its users import

    hvd.init()
    training = Training(hvd.DistributedOptimizer, shape, "stock", hvd.rank())
    for _ in range(count):
        training.step()
    hvd.shutdown()


def ours(shape: Shape, count: int) -> None:
    import horovod_ft.torch as hvd  # noqa: PLC0415

    hvd.init()
    training = Training(hvd.DistributedOptimizer, shape, "ours", hvd.rank())
    state = hvd.elastic.TorchState(model=training.model, optimizer=training.optimizer)

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.steps < count:
            with state.step():
                training.step()

    train(state)
    hvd.shutdown()


def main(side: str, folder: str, model: str, steps: str) -> None:
    {"stock": stock, "ours": ours}[side](SHAPES[model], int(steps))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (Path(folder) / f"peak-{os.environ['HOROVOD_RANK']}").write_text(str(peak))


if __name__ == "__main__":
    main(*sys.argv[1:])
