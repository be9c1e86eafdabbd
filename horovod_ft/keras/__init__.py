"""``import horovod_ft.keras as hvd`` instead of ``import horovod.tensorflow.keras as hvd``. Keras 3 on TensorFlow.

Every public name of ``horovod.tensorflow.keras`` and of ``horovod.tensorflow`` is here; those that fault tolerance or
Keras 3 changes are ours.
"""

from __future__ import annotations

from typing import Any

from horovod_ft.installation import require_horovod

require_horovod("tensorflow", "mpi_ops")

import horovod.tensorflow as _horovod  # noqa: E402
from horovod.tensorflow import (  # noqa: E402
    Average,
    Compression,
    Sum,
    allgather,
    allreduce,
    broadcast,
    local_rank,
    rank,
    size,
)

from horovod_ft.keras.optimizer import DistributedOptimizer  # noqa: E402
from horovod_ft.keras.runtime import init, shutdown  # noqa: E402


def __getattr__(name: str) -> Any:
    """Whatever else ``horovod.tensorflow`` offers."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(_horovod, name)
    except AttributeError:
        raise AttributeError(f"neither horovod_ft.keras nor horovod.tensorflow has an attribute {name!r}") from None


__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Sum",
    "allgather",
    "allreduce",
    "broadcast",
    "init",
    "local_rank",
    "rank",
    "shutdown",
    "size",
]
