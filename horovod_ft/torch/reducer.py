"""Asynchronous, out-of-place reduction of gradients from backward hooks.

Horovod's own optimizer reduces ``p.grad`` in place. When a reduction fails half way, ``p.grad`` then holds a mix of
local values, partial sums and sums that were never divided. Here the result goes into a second tensor, and ``p.grad``
is exchanged for it only when *every* gradient of the step has arrived. Until then the local gradients are intact.

The two tensors change places each step, so that no memory is taken or given back in the steady state.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops

from horovod_ft.errors import ConfigurationError

#: Bound of the wait for outstanding handles of a broken group; they end as soon as Horovod's thread has noticed.
DRAIN_S = 10.0


class Slot:
    """One parameter on its way through a reduction.

    Attributes:
        result: where the reduced gradient goes; afterwards ``p.grad`` is this tensor and this is the old ``p.grad``.
        carried: weighted gradients of earlier batches, when the weight changed between accumulated batches.
        left: backward passes still to come before the gradient is reduced.
    """

    __slots__ = ("carried", "context", "left", "name", "parameter", "result", "wire")

    def __init__(self, name: str, parameter: torch.nn.Parameter, passes: int) -> None:
        self.name = name
        self.parameter = parameter
        self.left = passes
        self.result: torch.Tensor | None = None
        self.wire: torch.Tensor | None = None
        self.carried: torch.Tensor | None = None
        self.context: Any = None


class Bucket:
    """Parameters that are reduced together, all or nothing: usually one, more with ``groups``."""

    __slots__ = ("finish", "handles", "ready", "slots")

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = list(slots)
        self.ready = 0
        self.handles: tuple[int, ...] = ()
        self.finish: Callable[[Sequence[Any]], None] | None = None


class GradientReducer:
    """Reduces the gradients of named parameters over all workers.

    Args:
        named: names and parameters; names are equal on all workers and unique.
        compression: a class with Horovod's ``compress`` and ``decompress``.
        passes: backward passes that are summed up locally before a gradient is reduced.
        op: ``hvd.Average`` or ``hvd.Sum``.
        predivide: Horovod's ``gradient_predivide_factor``.
        groups: parameters that are reduced together, those left out on their own; or how many groups to make.
        sparse_as_dense: reduce sparse gradients as dense ones.

    Attributes:
        weight: factor for this worker's gradients (``Deal.weight``); 1.0 without a tracked loader.
        probe: called with the number of gradients handed over so far, before the next; None outside of fault plans.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, torch.nn.Parameter]],
        compression: Any,
        passes: int,
        op: Any,
        predivide: float,
        groups: int | Sequence[Sequence[torch.Tensor]] | None,
        sparse_as_dense: bool,
    ) -> None:
        self.weight = 1.0
        self.probe: Callable[[int], None] | None = None
        self.passes = passes
        self.synchronized = False
        self._compression = compression
        self._op = op
        average = op == hvd.Average
        self._scales = {
            "prescale_factor": 1.0 / predivide if average else 1.0,
            "postscale_factor": predivide if average else 1.0,
        }
        self._sparse_as_dense = sparse_as_dense
        self._slots: list[Slot] = []
        self._bucket_of: dict[Slot, Bucket] = {}
        self._submitted: list[Bucket] = []
        self._add([Slot(name, parameter, passes) for name, parameter in named if parameter.requires_grad], groups)

    def add(self, named: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """Reduce these parameters too, each on its own."""
        self._add([Slot(name, parameter, self.passes) for name, parameter in named if parameter.requires_grad], None)

    def _add(self, slots: list[Slot], groups: int | Sequence[Sequence[torch.Tensor]] | None) -> None:
        self._slots += slots
        for members in _grouped(slots, groups):
            bucket = Bucket(members)
            self._bucket_of.update((slot, bucket) for slot in members)
        for slot in slots:
            slot.parameter.register_post_accumulate_grad_hook(self._hook_of(slot))

    # --- the backward pass -----------------------------------------------------------------------------------------

    def _hook_of(self, slot: Slot) -> Callable[[torch.Tensor], None]:
        alive = weakref.ref(self)  # a parameter outlives an optimizer that was thrown away

        def hook(parameter: torch.Tensor) -> None:
            reducer = alive()
            if reducer is not None:
                reducer._gradient_ready(slot)

        return hook

    def _gradient_ready(self, slot: Slot) -> None:
        if slot.left <= 0:
            raise AssertionError(
                f"the gradient of {slot.name} was computed more than backward_passes_per_step={self.passes} times "
                "before optimizer.step(). Raise backward_passes_per_step to accumulate gradients over several passes"
            )
        self.synchronized = False
        slot.left -= 1
        if slot.left == 0:
            bucket = self._bucket_of[slot]
            bucket.ready += 1
            if bucket.ready == len(bucket.slots):
                self._submit(bucket)

    def set_weight(self, weight: float) -> None:
        """Weight of the gradients to come. Those that were accumulated before keep theirs."""
        if weight != self.weight and self.accumulating():
            for slot in self._slots:
                gradient = slot.parameter.grad
                if gradient is not None:
                    weighted = gradient.mul_(self.weight)
                    slot.carried = weighted if slot.carried is None else slot.carried.add_(weighted)
                    slot.parameter.grad = None
        self.weight = weight

    def set_passes(self, passes: int) -> None:
        """Change how many backward passes are summed up, from the next step on."""
        self.passes = passes
        for slot in self._slots:
            slot.left = passes

    def accumulating(self) -> bool:
        """Some backward passes are done, and none of their gradients has been handed over yet."""
        return not self._submitted and any(0 < slot.left < self.passes for slot in self._slots)

    @torch.no_grad()
    def _submit(self, bucket: Bucket) -> None:
        if self.probe is not None:
            self.probe(sum(len(other.slots) for other in self._submitted))
        gradient = bucket.slots[0].parameter.grad
        if len(bucket.slots) == 1 and gradient is not None and gradient.is_sparse and not self._sparse_as_dense:
            self._submit_sparse(bucket, gradient)
        else:
            self._submit_dense(bucket)
        self._submitted.append(bucket)

    def _submit_dense(self, bucket: Bucket) -> None:
        inputs, outputs = zip(*(self._wires(slot) for slot in bucket.slots), strict=True)
        name = bucket.slots[0].name
        # Horovod's public functions either reduce in place or allocate an output in every call. Their common core takes
        # an output; Horovod's last release is from 2023, so its private names do not move any more.
        if len(bucket.slots) == 1:
            handle = mpi_ops._allreduce_async(
                inputs[0], outputs[0], name, self._op, process_set=hvd.global_process_set, **self._scales
            )
        else:
            handle = mpi_ops._grouped_allreduce_async(
                list(inputs), list(outputs), name, self._op, process_set=hvd.global_process_set, **self._scales
            )
        bucket.handles = (handle,)
        bucket.finish = lambda _: [self._take(slot) for slot in bucket.slots] and None

    def _wires(self, slot: Slot) -> tuple[torch.Tensor, torch.Tensor]:
        """What goes into the reduction and where its result goes: both contiguous, on the parameter's device."""
        gradient = slot.parameter.grad
        if gradient is not None and gradient.is_sparse:
            gradient = gradient.to_dense()
        if gradient is None:  # other workers may have used the parameter in this step
            local = self._result_of(slot).zero_()
        elif self.weight == 1.0 and slot.carried is None and gradient.is_contiguous():
            local = gradient
        else:
            local = self._result_of(slot)
            local.zero_() if self.weight == 0.0 else torch.mul(gradient, self.weight, out=local)
        if slot.carried is not None:
            local.add_(slot.carried)
        if self._compression is hvd.Compression.none:
            return local, self._result_of(slot)
        if self._compression is hvd.Compression.fp16:
            slot.context = local.dtype
            slot.wire = _like(slot.wire, local, torch.float16 if local.is_floating_point() else local.dtype)
            slot.wire.copy_(local)
        else:
            slot.wire, slot.context = self._compression.compress(local)
            if slot.wire is local:
                slot.wire = local.clone()
        return slot.wire, slot.wire

    def _result_of(self, slot: Slot) -> torch.Tensor:
        slot.result = _like(slot.result, slot.parameter, slot.parameter.dtype)
        return slot.result

    def _take(self, slot: Slot) -> None:
        """Every gradient of the step has arrived: let ``p.grad`` be the reduced one."""
        result = self._result_of(slot)
        if slot.wire is not None:
            result.copy_(self._compression.decompress(slot.wire, slot.context))
        local = slot.parameter.grad
        reduced = result.to_sparse() if local is not None and local.is_sparse else result
        slot.parameter.grad = reduced
        slot.result = local if reduced is result else result
        slot.carried = None

    def _submit_sparse(self, bucket: Bucket, gradient: torch.Tensor) -> None:
        slot = bucket.slots[0]
        gradient = gradient.coalesce()
        values = gradient.values() * (self.weight / (hvd.size() if self._op == hvd.Average else 1))
        indices = gradient.indices().t().contiguous()
        bucket.handles = (
            hvd.allgather_async(values, name=f"{slot.name}.values"),
            hvd.allgather_async(indices, name=f"{slot.name}.indices"),
        )

        def finish(outputs: Sequence[Any]) -> None:
            all_values, all_indices = outputs
            slot.parameter.grad = torch.sparse_coo_tensor(all_indices.t(), all_values, gradient.shape).coalesce()

        bucket.finish = finish

    # --- the update ------------------------------------------------------------------------------------------------

    def in_flight(self) -> bool:
        return bool(self._submitted)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Hand over what is missing, wait for all gradients, and put the reduced ones into ``p.grad``. Blocks.

        Raises:
            HorovodInternalError: the group broke. All ``p.grad`` are the local ones.
        """
        for bucket in dict.fromkeys(self._bucket_of[slot] for slot in self._slots):
            if not bucket.handles:
                self._submit(bucket)
        outputs = [[hvd.synchronize(handle) for handle in bucket.handles] for bucket in self._submitted]
        if self.probe is not None:
            self.probe(sum(len(bucket.slots) for bucket in self._submitted))
        for bucket, output in zip(self._submitted, outputs, strict=True):
            assert bucket.finish is not None
            bucket.finish(output)
        self._rest()
        self.synchronized = True

    def wait_for(self, count: int) -> None:
        """Wait until the first ``count`` gradients that were handed over are reduced. For fault plans."""
        seen = 0
        for bucket in self._submitted:
            if seen >= count:
                return
            seen += len(bucket.slots)
            while not all(handle not in mpi_ops._handle_map or hvd.poll(handle) for handle in bucket.handles):
                time.sleep(0.0005)

    def drain(self) -> tuple[int, int]:
        """The group broke: wait until Horovod holds no tensor any more. Returns gradients reduced, and handed over."""
        deadline = time.monotonic() + DRAIN_S
        done = [self._ended_well(bucket, deadline) for bucket in self._submitted]
        asked = [len(bucket.slots) for bucket in self._submitted]
        return sum(count for count, well in zip(asked, done, strict=True) if well), sum(asked)

    @staticmethod
    def _ended_well(bucket: Bucket, deadline: float) -> bool:
        for handle in bucket.handles:
            while handle in mpi_ops._handle_map and not hvd.poll(handle):
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.0005)
            try:
                hvd.synchronize(handle)
            except (hvd.HorovodInternalError, ValueError):
                return False
        return True

    def discard(self) -> None:
        """Forget the gradients of a failed step."""
        self._rest()
        for slot in self._slots:
            slot.carried = None
            slot.parameter.grad = None
        self.synchronized = False

    def _rest(self) -> None:
        self._submitted = []
        for slot, bucket in self._bucket_of.items():
            slot.left = self.passes
            bucket.ready = 0
            bucket.handles = ()
            bucket.finish = None


def _like(kept: torch.Tensor | None, model: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The kept tensor if it is a contiguous dense one of this shape, dtype and device; a new one otherwise."""
    if (
        kept is not None
        and kept.layout == torch.strided
        and (kept.shape, kept.dtype, kept.device) == (model.shape, dtype, model.device)
        and kept.is_contiguous()
    ):
        return kept
    return torch.empty(model.shape, dtype=dtype, device=model.device)


def _grouped(slots: list[Slot], groups: int | Sequence[Sequence[torch.Tensor]] | None) -> list[list[Slot]]:
    """The slots in buckets, as Horovod's ``groups`` argument says."""
    if not groups:
        return [[slot] for slot in slots]
    if isinstance(groups, int):
        length, longer = divmod(len(slots), groups)
        cuts = [index * length + min(index, longer) for index in range(groups + 1)]
        return [slots[start:stop] for start, stop in zip(cuts, cuts[1:], strict=False) if start < stop]
    by_parameter = {slot.parameter: slot for slot in slots}
    buckets: list[list[Slot]] = []
    grouped: set[Slot] = set()
    for group in groups:
        if not all(isinstance(parameter, torch.Tensor) for parameter in group):
            raise ConfigurationError("groups must be a number, or a list of lists of parameters")
        members = [by_parameter[parameter] for parameter in group if parameter in by_parameter]
        if grouped.intersection(members) or len(set(members)) != len(members):
            raise ConfigurationError("groups: a parameter may be in one group only")
        grouped.update(members)
        if members:
            buckets.append(members)
    return buckets + [[slot] for slot in slots if slot not in grouped]
