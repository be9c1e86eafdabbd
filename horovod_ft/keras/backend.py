"""Which backend Keras runs on, found out before anything heavy is imported: another one may not even be installed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from horovod_ft.errors import ConfigurationError

#: What Keras takes if nobody says anything.
TENSORFLOW = "tensorflow"


def require_tensorflow() -> None:
    """
    Raises:
        ConfigurationError: Keras does not run on TensorFlow, or will not once it is imported.
    """
    backend = backend_of_keras()
    if backend != TENSORFLOW:
        raise ConfigurationError(
            f"Keras runs on {backend}; horovod_ft.keras needs TensorFlow: set KERAS_BACKEND=tensorflow before keras is "
            "imported"
        )


def backend_of_keras() -> str:
    """The backend that Keras has, if it is imported or was tried to be; else the one that it will have."""
    # Keras's own module cannot be asked before Keras is imported: that imports the backend as well.
    config = sys.modules.get("keras.src.backend.config")
    if config is not None:
        return str(config.backend())
    return os.environ.get("KERAS_BACKEND") or _configured() or TENSORFLOW


def _configured() -> str | None:
    """What the user's ``keras.json`` says, in the folder where Keras looks for it."""
    home = Path.home() if os.access(Path.home(), os.W_OK) else Path("/tmp")
    file = Path(os.environ.get("KERAS_HOME") or home / ".keras").expanduser() / "keras.json"
    try:
        said = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return said.get("backend") if isinstance(said, dict) else None
