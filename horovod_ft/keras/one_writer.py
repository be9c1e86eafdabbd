"""Of the workers of a ``fit``, the one of rank 0 writes the files of Keras's ``ModelCheckpoint``.

All workers have that callback, and all would write the same file at once. What it decides, and when, stays its own, and
is alike on all of them: only saving is another thing.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import keras

from horovod_ft.keras.runtime import current

#: Endings by which Keras knows what to write, as one file each. A longer one is before those that it ends with.
SUFFIXES = (".weights.h5", ".keras", ".h5")


class OneWriter:
    """From now until ``end()``, the ``ModelCheckpoint`` callbacks among some write on one worker only.

    Args:
        callbacks: those of a ``fit``, which have their model already.

    Raises:
        OSError: a folder for their files cannot be made.
    """

    def __init__(self, callbacks: Iterable[Any]) -> None:
        writing = [callback for callback in callbacks if isinstance(callback, keras.callbacks.ModelCheckpoint)]
        for callback in writing:
            make_folder(callback.filepath)
        self._models = [(callback, callback._model) for callback in writing]
        for callback, model in self._models:
            callback._model = StandIn(model)

    def end(self) -> None:
        """Give them their models back. The second time it does nothing."""
        for callback, model in self._models:
            if type(callback._model) is StandIn:  # Keras may have given it another model since
                callback._model = model
        self._models = []


class StandIn:
    """A model that is saved by the worker of rank 0 alone. All else is the model's, and so is its class.

    A file gets its name when it is whole: a worker that dies while it writes leaves the last one.
    """

    __slots__ = ("_ft_model",)

    def __init__(self, model: Any) -> None:
        object.__setattr__(self, "_ft_model", model)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._ft_model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ft_model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ft_model, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._ft_model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ft_model(*args, **kwargs)

    def save(self, filepath: Any, *args: Any, **options: Any) -> None:
        """See ``keras.Model.save``. On other workers it does nothing."""
        if is_writer():
            write(self._ft_model.save, filepath, *args, **options)

    def save_weights(self, filepath: Any, *args: Any, **options: Any) -> None:
        """See ``keras.Model.save_weights``. On other workers it does nothing."""
        if is_writer():
            write(self._ft_model.save_weights, filepath, *args, **options)


def is_writer() -> bool:
    """Whether this worker writes what is there once for all of them: it has rank 0 in the present group."""
    return current().group().rank == 0


def write(save: Callable[..., Any], filepath: Any, *args: Any, **options: Any) -> None:
    """Save under a name of its own in the same folder, and give the file its name when it is whole.

    What is remote, or no single file, is saved under its name at once.
    """
    suffix = next((one for one in SUFFIXES if str(filepath).endswith(one)), None)
    if suffix is None or "://" in str(filepath) or args or options.keys() - {"overwrite"}:
        save(filepath, *args, **options)
        return
    path = Path(os.path.realpath(filepath))
    unfinished = path.with_name(f".{path.name.removesuffix(suffix)}.{uuid.uuid4().hex}{suffix}")
    try:
        save(str(unfinished), **options)
        unfinished.replace(path)
    except BaseException:
        with suppress(FileNotFoundError):
            unfinished.unlink()
        raise


def make_folder(filepath: str) -> None:
    """Make the folder of a file, as far as its name is known before training: Keras fails if two workers make it."""
    if "://" not in filepath:
        Path(filepath.partition("{")[0] + "_").parent.mkdir(parents=True, exist_ok=True)
