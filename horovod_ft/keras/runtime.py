"""``hvd.init()`` and ``hvd.shutdown()`` of ``horovod_ft.keras``: the process-wide runtime on Horovod's TensorFlow."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd

from horovod_ft import runtime
from horovod_ft.keras.binding import TensorFlowBinding
from horovod_ft.runtime import Runtime

ADAPTER = "horovod_ft.keras"


def init(*args: Any, **kwargs: Any) -> None:
    """See ``horovod_ft.runtime.init``."""
    runtime.init(ADAPTER, TensorFlowBinding, args, kwargs)


def shutdown() -> None:
    """See ``horovod_ft.runtime.shutdown``."""
    runtime.shutdown(ADAPTER, hvd.shutdown)


def current() -> Runtime[TensorFlowBinding]:
    """See ``horovod_ft.runtime.current``."""
    return runtime.current(ADAPTER)
