"""One worker of ``step_overhead.py``: steps of stock Horovod and of horovod_ft in turns, in the same processes.

``python -m benchmarks.workers.steps FOLDER MODEL SECONDS ours|stock|profile``. Two models of the same shape are
trained side by side, one with Horovod's ``DistributedOptimizer`` and no commit, one with ours inside
``with state.step()``; they share one Horovod and have the same batches. The last argument says what takes the place
of ours: with ``stock`` it is stock Horovod too, and the ratio shows what the measurement itself is worth. ``profile``
times nothing.
"""

from __future__ import annotations

import cProfile
import pstats
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch

import horovod_ft.torch as hvd
from benchmarks.workers.models import SHAPES, Training
from benchmarks.workers.pairs import Work, block, compare

BLOCK_S = 0.2
PROFILED_STEPS = 60


def main(folder: str, model: str, seconds: str, mode: str) -> None:
    hvd.init()
    shape, seed = SHAPES[model], hvd.rank()
    plain = Training(horovod.torch.DistributedOptimizer, shape, "stock", seed)
    control = mode == "stock"
    second = Training((horovod.torch if control else hvd).DistributedOptimizer, shape, "second", seed)
    tracked = {} if control else {"model": second.model, "optimizer": second.optimizer}
    state = hvd.elastic.TorchState(**tracked)

    def transaction() -> None:
        with state.step():
            second.step()

    other = second.step if control else transaction

    @hvd.elastic.run
    def train(_: Any) -> None:
        if mode == "profile":
            profile(Path(folder), {"stock": plain.step, "ours": other})
        else:
            compare(plain.step, other, seconds=float(seconds), block_s=BLOCK_S, least=4).write(Path(folder))

    train(state)
    hvd.shutdown()


def profile(folder: Path, works: dict[str, Work]) -> None:
    """What Python does in a step of each side, on worker 0."""
    for name, work in works.items():
        block(work, 10)
        profiler = cProfile.Profile()
        block(_profiled(work, profiler), PROFILED_STEPS)
        if hvd.rank() == 0:
            with (folder / f"profile-{name}.txt").open("w") as file:
                stats = pstats.Stats(profiler, stream=file)
                stats.sort_stats("tottime").print_stats(12)
                stats.sort_stats("cumtime").print_stats("horovod", 30)


def _profiled(work: Work, profiler: cProfile.Profile) -> Callable[[], None]:
    def profiled() -> None:
        profiler.enable()
        work()
        profiler.disable()

    return profiled


if __name__ == "__main__":
    main(*sys.argv[1:])
