"""The pieces that ``reducer.py`` works with: one parameter's memory, and parameters that are reduced together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import horovod.torch as hvd
import torch
from torch.utils.hooks import RemovableHandle

from horovod_ft.errors import ConfigurationError
from horovod_ft.torch.handles import done, unknown, wait


class Slot:
    """One parameter on its way through a reduction.

    Attributes:
        result: where the reduced gradient goes; afterwards ``p.grad`` is this tensor and this is the old ``p.grad``.
        wire: what is reduced in place of the gradient, when that has to be something else; None otherwise.
        context: what the compressor that made ``wire`` wants to see again.
        carried: weighted gradients of earlier batches, when the weight changed between accumulated batches.
        left: backward passes still to come before the gradient is reduced.
        sparse: number of sparse dimensions of the last gradient that was seen; 0 for dense ones.
    """

    __slots__ = ("_dense", "_strides", "carried", "context", "left", "name", "parameter", "result", "sparse", "wire")

    def __init__(self, name: str, parameter: torch.nn.Parameter, passes: int) -> None:
        self.name = name
        self.parameter = parameter
        self.left = passes
        self.result: torch.Tensor | None = None
        self.wire: torch.Tensor | None = None
        self.context: Any = None
        self.carried: torch.Tensor | None = None
        self.sparse = 0
        self._strides: tuple[int, ...] | None = None
        self._dense: tuple[int, ...] = ()

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has shape, dtype, device and memory order of the parameter, and no holes."""
        like = self.parameter
        if (
            tensor.layout is not torch.strided
            or tensor.dtype is not like.dtype
            or tensor.shape != like.shape
            or tensor.device != like.device
        ):
            return False
        strides = like.stride()
        if strides != self._strides:  # a model can be moved to another memory format after its optimizer was made
            self._strides, self._dense = strides, torch.empty_like(like, device="meta").stride()
        have = tensor.stride()
        return have == self._dense or all(
            one == other for length, one, other in zip(tensor.shape, have, self._dense, strict=True) if length != 1
        )

    def look(self) -> None:
        """See whether the gradient is sparse. A missing one is what the last one was: the other workers have some."""
        gradient = self.parameter.grad
        if gradient is not None and not gradient.is_sparse:
            self.sparse = 0
            return
        seen = [part for part in (gradient, self.carried) if part is not None]
        if seen:
            self.sparse = seen[0].sparse_dim() if all(part.is_sparse for part in seen) else 0

    def nothing(self) -> torch.Tensor:
        """A sparse gradient without any element."""
        like = self.parameter
        indices = torch.empty((self.sparse, 0), dtype=torch.int64, device=like.device)
        values = torch.empty((0, *like.shape[self.sparse :]), dtype=like.dtype, device=like.device)
        return self.made_of(indices, values)

    def made_of(self, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """A sparse gradient; its invariants are checked, since the parts come from other workers."""
        return torch.sparse_coo_tensor(indices, values, self.parameter.shape, check_invariants=True)

    def room(self) -> torch.Tensor:
        """Memory for the result, with whatever is in it."""
        if self.result is None or not self.fits(self.result):
            self.result = torch.empty_like(self.parameter, requires_grad=False)
        return self.result

    def forget_memory(self) -> None:
        """Horovod may still write into it."""
        self.result = self.wire = None


class Bucket:
    """Parameters that are reduced together, all or nothing: usually one, more with ``groups``.

    Attributes:
        members: those of its slots that take part in this step: all that are not frozen.
        ready: how many of its gradients are complete.
        handles: Horovod's, one a collective; None while nothing has been handed over.
        outputs: what the collectives gave, once all of them have ended well.
        failed: one of them, or handing it over, has failed.
        lossy: they lack the share of a worker that is gone.
        skipped: there are none, and its parameters are left alone in this step.
        sparse: they are the values and the indices of a sparse gradient.
    """

    __slots__ = ("failed", "handles", "lossy", "members", "outputs", "ready", "skipped", "slots", "sparse")

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = list(slots)
        self.rest()

    def rest(self) -> None:
        """Nothing of the next step has happened yet."""
        self.ready = 0
        self.members: list[Slot] = []
        self.handles: list[int] | None = None
        self.outputs: list[Any] | None = None
        self.failed = False
        self.sparse = self.skipped = self.lossy = False

    def collect(self, stopped: Callable[[], bool] = unknown) -> None:
        """Wait for the outputs; they can be waited for again.

        Args:
            stopped: as in ``handles.wait``.

        Raises:
            HorovodInternalError: the group broke.
        """
        assert self.handles is not None
        if self.outputs is not None:
            return
        try:
            outputs = [hvd.synchronize(handle) for handle in self.handles if wait(handle, stopped=stopped)]
            if any(output is None for output in outputs):  # Horovod's answer to a handle that it does not know
                raise hvd.HorovodInternalError("the wait for a gradient was cut short, and its reduction is lost")
            self.outputs = outputs
        except BaseException:
            self.failed = True
            raise

    def poll(self, deadline: float, stopped: Callable[[], bool] = unknown) -> bool:
        """Wait until Horovod is through with all handles, well or not; False if it was not before the deadline."""
        with suppress(hvd.HorovodInternalError):  # it has stopped, and touches nothing any more
            return all(wait(handle, deadline, stopped) for handle in self.handles or ())
        return True

    def end(self, deadline: float, stopped: Callable[[], bool] = unknown) -> None:
        """The group broke: wait as ``poll`` does, and keep the outputs if they are whole."""
        if not self.poll(deadline, stopped):
            self.lose()
        elif self.handles and self.outputs is None and not self.failed:
            with suppress(hvd.HorovodInternalError, ValueError):
                self.collect(stopped)
        elif self.failed:
            self._forget_handles()

    def lose(self) -> None:
        """Count as failed, and forget the outputs."""
        self.outputs = None
        self.failed = True
        for slot in self.slots:
            slot.forget_memory()

    def _forget_handles(self) -> None:
        """Horovod keeps what belongs to a handle until somebody has waited for it."""
        for handle in filter(done, self.handles or ()):
            with suppress(hvd.HorovodInternalError, ValueError):
                hvd.synchronize(handle)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without holes as a contiguous one: its memory as it lies."""
    return tensor if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def kept_or_new(kept: torch.Tensor | None, model: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The kept tensor if it has this shape, dtype and device; a new contiguous one otherwise."""
    if kept is not None and (kept.shape, kept.dtype, kept.device) == (model.shape, dtype, model.device):
        return kept
    return torch.empty(model.shape, dtype=dtype, device=model.device)


def grouped(slots: list[Slot], groups: int | Sequence[Sequence[torch.Tensor]] | None) -> list[list[Slot]]:
    """The slots in buckets, as Horovod's ``groups`` argument says.

    Raises:
        ConfigurationError: it is neither a number nor a list of lists, or names a parameter twice.
    """
    if groups is None or groups == 0:
        return [[slot] for slot in slots]
    if isinstance(groups, int):
        length, longer = divmod(len(slots), groups)
        cuts = [index * length + min(index, longer) for index in range(groups + 1)]
        return [slots[start:stop] for start, stop in pairwise(cuts) if start < stop]
    by_parameter: dict[torch.Tensor, Slot] = {slot.parameter: slot for slot in slots}
    buckets = [[by_parameter[member] for member in group if member in by_parameter] for group in _checked(groups)]
    in_order = [slot for bucket in buckets for slot in bucket]
    taken = set(in_order)
    if len(taken) != len(in_order):
        raise ConfigurationError("groups: a parameter may be in one group only")
    return [bucket for bucket in buckets if bucket] + [[slot] for slot in slots if slot not in taken]


def _checked(groups: Sequence[Sequence[torch.Tensor]]) -> Sequence[Sequence[torch.Tensor]]:
    well_formed = isinstance(groups, list | tuple) and all(
        isinstance(group, list | tuple) and all(isinstance(member, torch.Tensor) for member in group)
        for group in groups
    )
    if not well_formed:
        raise ConfigurationError(f"groups must be a number, or a list of lists of parameters, not {groups!r:.200}")
    return groups


def trainable(parameter: torch.Tensor) -> bool:
    """Whether it has gradients now, or may have some after it was thawed."""
    return parameter.requires_grad or parameter.is_floating_point()


def hooked(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Register the hook, on a frozen parameter too: it may be thawed later, and torch asks for no less."""
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
    parameter.requires_grad_(not frozen)
    return handle


def remove(hooks: Sequence[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
