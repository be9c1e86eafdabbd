"""Which of TensorFlow's errors say that the group broke.

Horovod's operations in TensorFlow raise no class of their own: a broken group is an ``UnknownError``, and so is many an
error of the user's. The text decides. What is not Horovod's always goes on to the user as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

#: What an operation of Horovod ends with: an error of its own, or one that cancels what runs beside it.
KINDS = (tf.errors.UnknownError, tf.errors.AbortedError, tf.errors.CancelledError)
#: What Horovod says of a broken group, and the names of its operations, in a graph and outside. Paths of files are in
#: these texts too: a user's own folder may be called after Horovod.
SAID = re.compile(
    r"Horovod has been shut down"
    r"|\{\{(?:function_)?node [^}\s]*Horovod[A-Z]"
    r"|Detected at node \S*Horovod[A-Z]"
    r"|\[Op:Horovod[A-Z]"
)


def is_failure(error: BaseException) -> bool:
    """Whether an error says that the group of workers broke."""
    if isinstance(error, HorovodInternalError):
        return True
    return isinstance(error, KINDS) and SAID.search(str(error)) is not None


@contextmanager
def failures() -> Iterator[None]:
    """Inside, a broken group raises ``HorovodInternalError`` whatever TensorFlow makes of it.

    Any other error goes through unchanged, ``UnknownError`` included.
    """
    try:
        yield
    except KINDS as error:
        if not is_failure(error):
            raise
        raise HorovodInternalError(str(error)) from error
