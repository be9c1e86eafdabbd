"""``hvd.init()`` and ``hvd.shutdown()`` of ``horovod_ft.torch``: the process-wide runtime on Horovod's PyTorch."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd

from horovod_ft import runtime
from horovod_ft.runtime import Runtime
from horovod_ft.torch.binding import TorchBinding

ADAPTER = "horovod_ft.torch"


def init(*args: Any, **kwargs: Any) -> None:
    """See ``horovod_ft.runtime.init``."""
    runtime.init(ADAPTER, TorchBinding, args, kwargs)


def shutdown() -> None:
    """See ``horovod_ft.runtime.shutdown``."""
    runtime.shutdown(ADAPTER, hvd.shutdown)


def current() -> Runtime[TorchBinding]:
    """See ``horovod_ft.runtime.current``."""
    return runtime.current(ADAPTER)
