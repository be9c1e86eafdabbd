"""``load_model``: a saved model, with its optimizer distributed again."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import keras

from horovod_ft.errors import ConfigurationError
from horovod_ft.keras.optimizer import DistributedOptimizer


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = hvd.Compression.none,
    legacy_opts: bool = False,
    **options: Any,
) -> Any:
    """Load a model as ``keras.models.load_model`` does, and make its optimizer distributed. Its state is kept.

    ``keras.models.load_model`` alone gives the model with the plain optimizer: what is saved knows nothing of Horovod.

    Args:
        filepath: of the saved model.
        custom_optimizers: optimizer classes of the user's that are in it.
        custom_objects: other classes and functions of the user's, by name.
        compression, options: for ``DistributedOptimizer``.
        legacy_opts: Keras 3 has no legacy optimizers.

    Raises:
        ConfigurationError: ``legacy_opts``; see ``DistributedOptimizer`` too.
    """
    if legacy_opts:
        raise ConfigurationError("legacy_opts: Keras 3 has no legacy optimizers")
    known = {optimizer.__name__: optimizer for optimizer in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**known, **(custom_objects or {})})
    if model.optimizer is not None:
        DistributedOptimizer(model.optimizer, compression=compression, **options)
        model.jit_compile = False  # it was compiled with the plain one
    return model
