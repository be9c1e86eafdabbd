"""``import horovod_ft.torch as hvd`` instead of ``import horovod.torch as hvd``.

Every public name of ``horovod.torch`` is here; those that fault tolerance changes are ours.
"""

from __future__ import annotations

from typing import Any

from horovod_ft.installation import require_horovod

require_horovod("torch", "mpi_lib_v2")

import horovod.torch as _horovod  # noqa: E402
from horovod.torch import (  # noqa: E402
    Adasum,
    Average,
    Compression,
    HorovodInternalError,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allgather_object,
    allreduce,
    barrier,
    broadcast,
    broadcast_object,
    broadcast_parameters,
    local_rank,
    local_size,
    rank,
    size,
)

from horovod_ft.torch import elastic  # noqa: E402
from horovod_ft.torch.optimizer import DistributedOptimizer  # noqa: E402
from horovod_ft.torch.runtime import init, shutdown  # noqa: E402


def __getattr__(name: str) -> Any:
    """Whatever else ``horovod.torch`` offers."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(_horovod, name)
    except AttributeError:
        raise AttributeError(f"neither horovod_ft.torch nor horovod.torch has an attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted(set(globals()) | {name for name in dir(_horovod) if not name.startswith("_")})


__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_parameters",
    "elastic",
    "init",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]
