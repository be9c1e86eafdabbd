"""Horovod's PyTorch binding behind ``membership.base.Binding``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import cloudpickle
import horovod.torch as hvd
import numpy as np
import torch

from horovod_ft.errors import RecoveryTimeoutError
from horovod_ft.membership.base import Bytes
from horovod_ft.membership.counts import fields_of, flags_of
from horovod_ft.membership.threads import ThreadWatch
from horovod_ft.torch.handles import wait

PREFIX = "horovod_ft."


class TorchBinding:
    """Collectives on host tensors through ``horovod.torch``.

    Args:
        timeout_s: bound of each blocking collective.
        arguments: what the user gave to ``hvd.init``, for the first call of ``init``.
    """

    failure_types: tuple[type[BaseException], ...] = (hvd.HorovodInternalError,)

    def __init__(self, timeout_s: float, *arguments: Any, **options: Any) -> None:
        self._timeout_s = timeout_s
        self._arguments = arguments, options
        # Eight bytes, the size of Horovod's own control words: after a failure a worker can receive one for the other,
        # and Gloo ends a process that receives more than it waits for. See ``installation.stops_after_failure``.
        self._flags = torch.zeros(1, dtype=torch.int64)
        self._threads = ThreadWatch()

    def init(self) -> None:
        arguments, options = self._arguments
        self._threads.forming()
        hvd.init(*arguments, **options)
        self._threads.formed()

    def stopped(self) -> bool:
        """Horovod has stopped by itself, because the group broke: what it has not answered it never will."""
        return self._threads.stopped()

    def shutdown(self) -> None:
        hvd.shutdown()

    def rank(self) -> int:
        return int(hvd.rank())

    def size(self) -> int:
        return int(hvd.size())

    def allgather_object(self, value: Any, name: str) -> list[Any]:
        data = np.frombuffer(cloudpickle.dumps(value), dtype=np.uint8).copy()
        lengths = self._allgather(torch.tensor([len(data)], dtype=torch.int64), f"{name}.length", name).tolist()
        gathered = self._allgather(torch.from_numpy(data), f"{name}.data", name).numpy()
        stops = np.cumsum(lengths).tolist()
        return [
            cloudpickle.loads(gathered[stop - length : stop].tobytes())
            for stop, length in zip(stops, lengths, strict=True)
        ]

    def broadcast_object(self, value: Any, root: int, name: str) -> Any:
        data = np.frombuffer(cloudpickle.dumps(value), dtype=np.uint8).copy() if self.rank() == root else None
        length = np.array([0 if data is None else len(data)], dtype=np.int64)
        self.broadcast_bytes(length.view(np.uint8), root, f"{name}.length")
        if data is None:
            data = np.empty(int(length[0]), dtype=np.uint8)
        self.broadcast_bytes(data, root, f"{name}.data")
        return value if self.rank() == root else cloudpickle.loads(data.tobytes())

    def broadcast_bytes(self, buffer: Bytes, root: int, name: str) -> None:
        handle = hvd.broadcast_async_(torch.from_numpy(buffer), root, PREFIX + name)
        self.wait(handle, f"{name} from worker {root}")

    def any_async(self, flags: int) -> TorchPending:
        self._flags.fill_(fields_of(flags))
        handle = hvd.allreduce_async_(self._flags, name=PREFIX + "changed", op=hvd.Sum)
        return TorchPending(handle, self.stopped)

    def wait(self, handle: int, what: str) -> Any:
        """Wait for a handle.

        Raises:
            RecoveryTimeoutError: nothing after ``timeout_s``.
        """
        if not wait(handle, time.monotonic() + self._timeout_s, self.stopped):
            raise RecoveryTimeoutError(
                f"waited {self._timeout_s:.0f} s for {what}: a worker of the group is alive but does not take part. "
                "Does every worker run the same script, with no collective between hvd.init() and the training "
                "function? If one is only slow, raise HOROVOD_FT_TIMEOUT"
            )
        return hvd.synchronize(handle)

    def _allgather(self, tensor: torch.Tensor, name: str, what: str) -> torch.Tensor:
        result: torch.Tensor = self.wait(hvd.allgather_async(tensor, name=PREFIX + name), f"the {what} of all workers")
        return result


class TorchPending:
    """Flags that are being summed over all workers, each in a field of its own."""

    def __init__(self, handle: int, stopped: Callable[[], bool]) -> None:
        self._handle = handle
        self._stopped = stopped

    def result(self) -> int:
        wait(self._handle, stopped=self._stopped)
        return flags_of(int(hvd.synchronize(self._handle).item()))
