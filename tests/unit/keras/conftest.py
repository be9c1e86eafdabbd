"""Horovod's TensorFlow with one worker, in this process, for the whole folder.

By Horovod's own ``init``: a process has one runtime of ours, and PyTorch's tests have it.
"""

from __future__ import annotations

from collections.abc import Iterator

import horovod.tensorflow
import pytest


@pytest.fixture(scope="session", autouse=True)
def _horovod() -> Iterator[None]:
    horovod.tensorflow.init()
    yield
    horovod.tensorflow.shutdown()
