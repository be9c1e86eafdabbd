"""Checkpoints made by hand, for tests of what is done with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from horovod_ft.checkpoint.manifest import Manifest
from horovod_ft.checkpoint.partition import parts
from horovod_ft.checkpoint.save import Captured
from horovod_ft.checkpoint.store import CheckpointStore
from horovod_ft.checkpoint.tensors import Tensor, tensor

VALUES = {"epoch": 3, "place": (1, 2)}


def tensors(seed: int = 0) -> list[Tensor]:
    """A small state, with other bytes for each seed."""
    random = np.random.default_rng(seed)
    return [
        tensor("net.weight", "F32", (5, 3), random.random((5, 3), np.float32)),
        tensor("net.mask", "BOOL", (3,), np.array([True, False, True])),
        tensor("net.steps", "I64", (), np.array(seed)),
        tensor("net.empty", "F16", (0, 2), np.empty((0, 2), np.float16)),
    ]


def local(rank: int) -> dict[str, Any]:
    """The values of one worker alone."""
    return {"draws": (rank, 2**70), "running_mean": float("nan")}


def blank(like: list[Tensor]) -> list[Tensor]:
    """Room for these tensors."""
    return [tensor(one.spec.name, one.spec.dtype, one.spec.shape, bytearray(one.spec.nbytes)) for one in like]


def content(of: list[Tensor]) -> list[bytes]:
    return [bytes(one.data) for one in of]


def half(store: CheckpointStore, step: int, attempt: str = "a", size: int = 2) -> tuple[str, Callable[[], Manifest]]:
    """Everything but the manifest; the second value writes that."""
    state = tensors(step)
    folder = store.begin(step, attempt)
    shards = [store.write_shard(folder, rank, size, parts(state, rank, size)) for rank in range(size)]
    workers = [store.write_worker(folder, rank, size, shard, local(rank)) for rank, shard in enumerate(shards)]
    values = store.write_values(folder, VALUES)
    specs = [one.spec for one in state]
    return folder, lambda: store.commit(folder, specs, shards, workers, values, generation=4, versions={"torch": "2.0"})


def save(store: CheckpointStore, step: int, attempt: str = "a", size: int = 2) -> Manifest:
    """A whole checkpoint of ``tensors(step)``."""
    return half(store, step, attempt, size)[1]()


def captured(step: int, rank: int = 0, size: int = 1, **fields: Any) -> Captured:
    """One worker's part of a save of ``tensors(step)``."""
    state = tensors(step)
    mine = Captured(
        step, "a", 4, rank, size, [one.spec for one in state], parts(state, rank, size), lambda: None, local(rank),
        VALUES, {"torch": "2.0"},
    )  # fmt: skip
    return replace(mine, **fields)


def problems(store: CheckpointStore) -> dict[str, Any]:
    """What is wrong with each that cannot be used, at a quick look."""
    return {one.folder: one.problem for one in store.candidates() if not one.usable}
