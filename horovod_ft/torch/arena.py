"""Host memory for copies of a PyTorch training's tensors: ``HostMemory``, and ``TorchArena``, a ``snapshot.Arena``.

One run of bytes, made once and kept. Tensors on the host are copied at once. From a GPU the copy goes into pinned
memory on a stream of its own, and the next update waits for it, on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from horovod_ft.torch.parts import kinds_of
from horovod_ft.torch.replica import TorchReplica

#: Each tensor begins at a multiple of this many bytes.
ALIGNMENT = 64


class HostMemory:
    """A run of bytes that is kept from copy to copy, and the copies into it that are under way.

    Attributes:
        nbytes: its size.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pinned = False
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._under_way: list[tuple[torch.cuda.Event, list[torch.Tensor]]] = []

    def room(self, sizes: Sequence[int], *, pinned: bool) -> list[torch.Tensor]:
        """Views of these many bytes each, as uint8. What they hold is undefined; earlier views are void.

        New memory is taken only if there is too little of it, or if it must be ``pinned`` and is not.
        """
        places = list(_places(sizes))
        needed = places[-1][1] if places else 0
        if needed > self.nbytes or (pinned and not self._pinned):
            self.nbytes, self._memory = 0, torch.empty(0, dtype=torch.uint8)  # never both, the old and the new
            self._memory = torch.zeros(needed, dtype=torch.uint8, pin_memory=pinned)  # zeros: the pages are there
            self.nbytes, self._pinned = needed, pinned
        return [self._memory[start : start + size] for size, (start, _) in zip(sizes, places, strict=True)]

    @torch.no_grad()
    def copy(self, views: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Copy each source into its view, which is of its shape and dtype.

        Returns:
            a function that blocks until all are copied; any thread may call it.
        """
        pairs = list(zip(views, sources, strict=True))
        on_host = [(view, source) for view, source in pairs if source.device.type != "cuda"]
        if on_host:
            torch._foreach_copy_([view for view, _ in on_host], [source for _, source in on_host])
        devices = {source.device for source in sources if source.device.type == "cuda"}
        events = [
            self._begin(device, [(view, source) for view, source in pairs if source.device == device])
            for device in devices
        ]

        def wait() -> None:
            for event in events:
                event.synchronize()

        return wait

    def settle(self) -> None:
        """What was copied from may change from here on, by work that comes after this on the present streams."""
        for event, sources in self._under_way:
            torch.cuda.current_stream(sources[0].device).wait_event(event)  # that waits, not this thread
        self._under_way.clear()

    def _begin(self, device: torch.device, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.cuda.Event:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))  # the update has to be in the parameters
        with torch.cuda.stream(stream):
            for view, source in pairs:
                view.copy_(source, non_blocking=True)
        event: torch.cuda.Event = stream.record_event()
        self._under_way.append((event, [source for _, source in pairs]))  # whose memory is not free before that
        return event


class TorchArena:
    """Room for one copy of what a TorchReplica holds.

    Attributes:
        nbytes: of host memory.
    """

    def __init__(self, replica: TorchReplica) -> None:
        self.nbytes = 0
        self._replica = replica
        self._memory = HostMemory()
        self._kinds: list[Any] = []
        self._views: list[torch.Tensor] = []
        self._structure: Any = None
        self._schema: list[str] = []
        self._wait: Callable[[], None] = _nothing

    def fits(self) -> bool:
        return self._replica.schema() == self._schema

    def reserve(self) -> None:
        self._fit(self._replica.replicated_tensors())

    def write(self) -> None:
        tensors = self._replica.replicated_tensors()
        self._wait()
        self._fit(tensors)
        self._structure, self._schema = self._replica.structure(), self._replica.schema()
        self._wait = self._memory.copy(self._views, tensors)

    def settle(self) -> None:
        self._memory.settle()

    @torch.no_grad()
    def read(self) -> None:
        self._wait()
        self._replica.prepare(self._structure)
        tensors = self._replica.replicated_tensors()
        if tensors:
            torch._foreach_copy_(tensors, self._views)

    def _fit(self, tensors: list[torch.Tensor]) -> None:
        """Have a view for each tensor; those of last time if they are for such tensors."""
        kinds = kinds_of(tensors)
        if kinds == self._kinds:
            return
        self._kinds, self._views = [], []
        pinned = any(tensor.device.type == "cuda" for tensor in tensors)
        room = self._memory.room([tensor.numel() * tensor.element_size() for tensor in tensors], pinned=pinned)
        self.nbytes = self._memory.nbytes
        self._views = [view.view(tensor.dtype).view(tensor.shape) for view, tensor in zip(room, tensors, strict=True)]
        self._kinds = kinds


def _nothing() -> None:
    """Nothing to wait for."""


def _places(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where each run of bytes begins, and the first aligned place after it."""
    start = 0
    for size in sizes:
        stop = start + size
        stop += -stop % ALIGNMENT
        yield start, stop
        start = stop
