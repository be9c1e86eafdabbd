"""The places in Keras's ``fit`` that have to know of fault tolerance. For every other ``fit`` Keras does what it did.

- Which epoch iterator a ``fit`` goes by is known to ``fit`` alone: it is remembered when it is made.
- A callback has to act before training begins for all others, and after that; at the end of an epoch, and of training,
  before all others; and when training is over for all of them: a list of callbacks calls it there.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

from keras.src.backend.tensorflow.trainer import TFEpochIterator
from keras.src.callbacks.callback_list import CallbackList

from horovod_ft.keras.hooks import MARK
from horovod_ft.keras.plain_fit import follow


class _Newest:
    """The epoch iterator that was made last, as long as there is one."""

    iterator: weakref.ref[Any] | None = None


def newest_iterator() -> Any:
    """The epoch iterator that was made last: when training begins, that of ``fit``. None if it is gone."""
    return None if _Newest.iterator is None else _Newest.iterator()


def is_running(iterator: Any) -> bool:
    """Whether the ``fit`` that goes by an epoch iterator is further up in the calls of this thread."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_locals.get("epoch_iterator") is iterator:
            return True
        frame = frame.f_back
    return False


def install() -> None:
    """Put the hooks into Keras. The second time it does nothing."""
    if hasattr(TFEpochIterator.__init__, MARK):
        return
    TFEpochIterator.__init__ = _remembering(TFEpochIterator.__init__)
    CallbackList.on_train_begin = _beginning(CallbackList.on_train_begin)
    CallbackList.on_epoch_end = _ending_epoch(CallbackList.on_epoch_end)
    CallbackList.on_train_end = _ending(CallbackList.on_train_end)


def _remembering(plain: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  in place of Keras's own
        plain(self, *args, **kwargs)
        _Newest.iterator = weakref.ref(self)

    setattr(__init__, MARK, True)
    return __init__


def _guard_of(callbacks: Any) -> Any:
    """The callback in a list that makes training fault tolerant; None without one."""
    return next((one for one in callbacks.callbacks if hasattr(one, "ft_begin")), None)


def _beginning(plain: Callable[..., None]) -> Callable[..., None]:
    def on_train_begin(self: Any, logs: Any = None) -> None:
        guard = _guard_of(self)
        if guard is None:
            follow(newest_iterator(), self)
            plain(self, logs)
            return
        guard.ft_check(self.callbacks)
        try:
            plain(self, logs)
            guard.ft_begin(self.callbacks)
        except BaseException:
            guard.ft_over()
            raise

    return on_train_begin


def _ending_epoch(plain: Callable[..., None]) -> Callable[..., None]:
    def on_epoch_end(self: Any, epoch: int, logs: Any = None) -> None:
        guard = _guard_of(self)
        if guard is not None:
            guard.ft_epoch_end(epoch, logs)
        plain(self, epoch, logs)

    return on_epoch_end


def _ending(plain: Callable[..., None]) -> Callable[..., None]:
    def on_train_end(self: Any, logs: Any = None) -> None:
        guard = _guard_of(self)
        if guard is None:
            plain(self, logs)
            return
        guard.ft_end()
        try:
            plain(self, logs)
        finally:
            guard.ft_over()

    return on_train_end
