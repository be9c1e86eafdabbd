"""``import horovod_ft.keras as hvd`` instead of ``import horovod.tensorflow.keras as hvd``. Keras 3 on TensorFlow.

Every public name of ``horovod.tensorflow.keras`` and of ``horovod.tensorflow`` is here; those that fault tolerance or
Keras 3 changes are ours.
"""

from __future__ import annotations

from horovod_ft.installation import require_horovod

require_horovod("tensorflow", "mpi_ops")

from horovod_ft.keras.runtime import init, shutdown  # noqa: E402

__all__ = ["init", "shutdown"]
