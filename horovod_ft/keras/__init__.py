"""``import horovod_ft.keras as hvd`` instead of ``import horovod.tensorflow.keras as hvd``. Keras 3 on TensorFlow.

Every public name of ``horovod.tensorflow.keras`` and of ``horovod.tensorflow`` is here; those that fault tolerance or
Keras 3 changes are ours.
"""

from __future__ import annotations

from typing import Any

from horovod_ft.installation import require_horovod
from horovod_ft.keras.backend import require_tensorflow

require_tensorflow()  # first: Horovod's module for TensorFlow imports Keras, which fails of another backend
require_horovod("tensorflow", "mpi_ops")

import horovod.tensorflow as _horovod  # noqa: E402
from horovod.common.exceptions import HorovodInternalError  # noqa: E402
from horovod.tensorflow import (  # noqa: E402
    Adasum,
    Average,
    Compression,
    Max,
    Min,
    Product,
    Sum,
    allgather_object,
    broadcast_object,
    local_rank,
    local_size,
    rank,
    size,
)

from horovod_ft.keras import callbacks, elastic  # noqa: E402
from horovod_ft.keras.collectives import allgather, allreduce, broadcast, reducescatter  # noqa: E402
from horovod_ft.keras.models import load_model  # noqa: E402
from horovod_ft.keras.optimizer import DistributedOptimizer  # noqa: E402
from horovod_ft.keras.runtime import init, shutdown  # noqa: E402
from horovod_ft.keras.tape import DistributedGradientTape  # noqa: E402
from horovod_ft.keras.variables import broadcast_variables  # noqa: E402


def __getattr__(name: str) -> Any:
    """Whatever else ``horovod.tensorflow`` offers."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(_horovod, name)
    except AttributeError:
        raise AttributeError(f"neither horovod_ft.keras nor horovod.tensorflow has an attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted(set(globals()) | {name for name in dir(_horovod) if not name.startswith("_")})


__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "elastic",
    "init",
    "load_model",
    "local_rank",
    "local_size",
    "rank",
    "reducescatter",
    "shutdown",
    "size",
]
