"""Host memory for a full copy of a PyTorch training's parameters and optimizer state: a ``snapshot.Arena``.

One run of bytes, made once and kept. Tensors on the host are copied at once. From a GPU the copy goes into pinned
memory on a stream of its own, and the next update waits for it, on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from horovod_ft.torch.parts import kinds_of
from horovod_ft.torch.replica import TorchReplica

#: Each tensor begins at a multiple of this many bytes.
ALIGNMENT = 64


class TorchArena:
    """Room for one copy of what a TorchReplica holds.

    Attributes:
        nbytes: of host memory.
    """

    def __init__(self, replica: TorchReplica) -> None:
        self.nbytes = 0
        self._replica = replica
        self._kinds: list[Any] = []
        self._views: list[torch.Tensor] = []
        self._structure: Any = None
        self._schema: list[str] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._under_way: list[tuple[torch.device, torch.cuda.Event]] = []

    def fits(self) -> bool:
        return self._replica.schema() == self._schema

    def reserve(self) -> None:
        self._fit(self._replica.replicated_tensors())

    @torch.no_grad()
    def write(self) -> None:
        tensors = self._replica.replicated_tensors()
        self._finish()
        self._fit(tensors)
        self._structure, self._schema = self._replica.structure(), self._replica.schema()
        pairs = list(zip(self._views, tensors, strict=True))
        on_host = [(view, tensor) for view, tensor in pairs if tensor.device.type != "cuda"]
        if on_host:
            torch._foreach_copy_([view for view, _ in on_host], [tensor for _, tensor in on_host])
        for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
            self._begin(device, [(view, tensor) for view, tensor in pairs if tensor.device == device])

    def settle(self) -> None:
        for device, event in self._under_way:
            torch.cuda.current_stream(device).wait_event(event)  # that waits, not this thread

    @torch.no_grad()
    def read(self) -> None:
        self._finish()
        self._replica.prepare(self._structure)
        tensors = self._replica.replicated_tensors()
        if tensors:
            torch._foreach_copy_(tensors, self._views)

    def _fit(self, tensors: list[torch.Tensor]) -> None:
        """Have a view for each tensor. New memory is taken only if the tensors are not those of last time."""
        kinds = kinds_of(tensors)
        if kinds == self._kinds:
            return
        self._kinds = []
        places = list(_places(tensors))
        self.nbytes = places[-1][1] if places else 0
        pinned = any(tensor.device.type == "cuda" for tensor in tensors)
        memory = torch.zeros(self.nbytes, dtype=torch.uint8, pin_memory=pinned)  # zeros: the pages are really there
        self._views = [
            memory[start : start + tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
            for tensor, (start, _) in zip(tensors, places, strict=True)
        ]
        self._kinds = kinds

    def _begin(self, device: torch.device, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))  # the update has to be in the parameters
        with torch.cuda.stream(stream):
            for view, tensor in pairs:
                view.copy_(tensor, non_blocking=True)
        self._under_way.append((device, stream.record_event()))

    def _finish(self) -> None:
        """Wait here until no copy is under way."""
        for _, event in self._under_way:
            event.synchronize()
        self._under_way.clear()


def _places(tensors: list[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Where each tensor begins, and the first aligned place after it, in bytes."""
    start = 0
    for tensor in tensors:
        stop = start + tensor.numel() * tensor.element_size()
        stop += -stop % ALIGNMENT
        yield start, stop
        start = stop
