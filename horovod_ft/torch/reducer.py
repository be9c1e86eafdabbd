"""Asynchronous, out-of-place reduction of gradients from backward hooks.

Horovod's own optimizer reduces ``p.grad`` in place. When a reduction fails half way, ``p.grad`` then holds a mix of
local values, partial sums and sums that were never divided. Here the result goes into a second tensor, and ``p.grad``
is exchanged for it only when *every* gradient of the step has arrived. Until then the local gradients are intact.

The two tensors change places each step, so that no memory is taken or given back in the steady state.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops

from horovod_ft.errors import UsageError
from horovod_ft.torch.handles import unknown
from horovod_ft.torch.slots import Bucket, Slot, flat, grouped, hooked, kept_or_new, remove, trainable

#: Bound of the wait for outstanding handles of a broken group; they end as soon as Horovod's thread has noticed.
DRAIN_S = 10.0


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
        prefix: put in front of the names; tells two optimizers apart whose parameters have the same names.
        weight: factor for this worker's gradients (``Deal.weight``); 1.0 without a tracked loader.
        average: the reduction is an average, not a sum.
        probe: called with the number of gradients handed over so far, before the next; None outside of fault plans.
        on_failure: told once when the group breaks; the user's code may catch the exception that follows.
        buckets: what is reduced together; usually one gradient each.
        keep: a failure in the backward pass is not raised there, but where the gradients are waited for.
        lose_after: for fault plans: reductions after so many of this update count as failed here; None outside.
        waited_s: how long the last update waited for its gradients, in seconds.
        stopped: as in ``handles.wait``.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        compression: Any,
        passes: int,
        op: Any,
        predivide: float,
        groups: int | Sequence[Sequence[torch.Tensor]] | None,
        sparse_as_dense: bool,
    ) -> None:
        self.prefix = ""
        self.weight = 1.0
        self.probe: Callable[[int], None] | None = None
        self.on_failure: Callable[[BaseException], None] | None = None
        self.stopped: Callable[[], bool] = unknown
        self.keep = False
        self.lose_after: int | None = None
        self.waited_s = 0.0
        self.passes = passes
        self.synchronized = False
        self._compression = compression
        self._op = op
        self.average = average = op == hvd.Average
        self._scales = {
            "prescale_factor": 1.0 / predivide if average else 1.0,
            "postscale_factor": predivide if average else 1.0,
        }
        self._sparse_as_dense = sparse_as_dense
        self._plain = compression is hvd.Compression.none
        self._slots: list[Slot] = []
        self.buckets: list[Bucket] = []
        self._submitted: list[Bucket] = []
        self._ready = 0
        self._failure: BaseException | None = None
        self._drained = self._refused = False
        self._factor = 1.0
        self._add([Slot(name, parameter, passes) for name, parameter in named if trainable(parameter)], groups)

    def add(self, named: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """Reduce these parameters too, each on its own."""
        self._add([Slot(name, parameter, self.passes) for name, parameter in named if trainable(parameter)], None)

    def _add(self, slots: list[Slot], groups: int | Sequence[Sequence[torch.Tensor]] | None) -> None:
        buckets = [Bucket(members) for members in grouped(slots, groups)]
        self._slots += slots
        self.buckets += buckets
        bucket_of = {slot: bucket for bucket in buckets for slot in bucket.slots}
        hooks = [hooked(slot.parameter, self._hook_of(slot, bucket_of[slot])) for slot in slots]
        # A parameter outlives an optimizer that was thrown away, and with its hooks would keep the optimizer's buffers.
        weakref.finalize(self, remove, hooks).atexit = False

    # --- the backward pass -----------------------------------------------------------------------------------------

    def _hook_of(self, slot: Slot, bucket: Bucket) -> Callable[[torch.Tensor], None]:
        alive = weakref.ref(self)

        def hook(parameter: torch.Tensor) -> None:
            reducer = alive()
            if reducer is not None:
                reducer._gradient_ready(slot, bucket)

        return hook

    def _gradient_ready(self, slot: Slot, bucket: Bucket) -> None:
        if not self.keep or self._refused:
            self.check()
        if slot.left <= 0:
            raise AssertionError(
                f"the gradient of {slot.name} was computed more than backward_passes_per_step={self.passes} times "
                "before optimizer.step(). Raise backward_passes_per_step to accumulate gradients over several passes"
            )
        self.synchronized = False
        slot.left -= 1
        if slot.left == 0:
            self._ready += 1
            bucket.ready += 1
            if bucket.ready == len(bucket.slots) and self._failure is None:
                if torch.is_grad_enabled():  # by create_graph=True
                    with torch.no_grad():
                        self._submit(bucket, bucket.slots)
                else:
                    self._submit(bucket, bucket.slots)

    @torch.no_grad()
    def set_weight(self, weight: float) -> None:
        """Weight of the gradients to come. Those that were accumulated before keep theirs."""
        if weight != self.weight and self.accumulating():
            for slot in self._slots:
                gradient = slot.parameter.grad
                if gradient is not None:
                    weighted = gradient.mul_(self.weight) if self.weight else torch.zeros_like(gradient)
                    slot.carried = weighted if slot.carried is None else slot.carried.add_(weighted)
                    slot.parameter.grad = None
        self.weight = weight

    def set_passes(self, passes: int) -> None:
        """Change how many backward passes are summed up, from the next step on.

        Raises:
            UsageError: in the middle of a step.
        """
        if self.underway():
            raise UsageError(
                "backward_passes_per_step was changed between loss.backward() and optimizer.step(); change it before "
                "the first backward() of a step"
            )
        self.passes = passes
        for slot in self._slots:
            slot.left = passes

    def cleared(self) -> None:
        """The user has cleared all gradients: those of earlier batches go with them, and reduced ones are no more."""
        self.synchronized = False
        for slot in self._slots:
            slot.carried = None

    def accumulating(self) -> bool:
        """Some backward passes are done, and none of their gradients has been handed over yet."""
        return self.passes > 1 and self._ready == 0 and any(0 < slot.left < self.passes for slot in self._slots)

    def _taking_part(self, bucket: Bucket) -> list[Slot]:
        """All that are not frozen, as in torch; with zeros if this worker did not use them."""
        return [slot for slot in bucket.slots if slot.left < self.passes or slot.parameter.requires_grad]

    def _submit(self, bucket: Bucket, members: list[Slot]) -> None:
        if self.probe is not None:
            self.probe(self._handed_over())
        bucket.members = members
        bucket.handles = []
        self._submitted.append(bucket)
        try:
            for slot in members:
                slot.look()
            if self.goes_sparse(bucket):
                self._submit_sparse(bucket)
            elif members:
                self._submit_dense(bucket)
        except BaseException as error:
            bucket.failed = True
            self._note(error)
            if self._failure is None and not bucket.handles:  # refused, so that the next try has to be a whole one
                self._submitted.remove(bucket)
                bucket.handles = None
            if not self.keep or not isinstance(error, hvd.HorovodInternalError):
                raise

    def _submit_dense(self, bucket: Bucket) -> None:
        assert bucket.handles is not None
        members = bucket.members
        name = self.prefix + members[0].name
        # Horovod's public functions either reduce in place or allocate an output in every call. Their common core takes
        # an output; Horovod's last release is from 2023, so its private names do not move any more.
        if len(members) == 1:
            tensor, output = self._wires(members[0])
            handle = mpi_ops._allreduce_async(
                tensor, output, name, self._op, process_set=hvd.global_process_set, **self._scales
            )
        else:
            inputs, outputs = zip(*(self._wires(slot) for slot in members), strict=True)
            handle = mpi_ops._grouped_allreduce_async(
                list(inputs), list(outputs), name, self._op, process_set=hvd.global_process_set, **self._scales
            )
        bucket.handles.append(handle)

    def _wires(self, slot: Slot) -> tuple[torch.Tensor, torch.Tensor]:
        """What goes into the reduction and where its result goes: both contiguous, on the parameter's device."""
        local = self._weighted(slot)
        if self._plain and local.dtype != torch.bfloat16:  # Horovod has no bfloat16
            slot.wire = None
            return flat(local), flat(slot.room())
        if self._compression in (hvd.Compression.none, hvd.Compression.fp16):
            half = self._compression is hvd.Compression.fp16
            slot.wire = kept_or_new(slot.wire, local, torch.float16 if half else torch.float32)
            slot.wire.copy_(local)
        else:
            wire, slot.context = self._compression.compress(local)
            shared = wire.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
            slot.wire = wire.clone(memory_format=torch.contiguous_format) if shared else wire.contiguous()
        return slot.wire, slot.wire

    def _weighted(self, slot: Slot) -> torch.Tensor:
        """This worker's gradient as a dense tensor that lies in memory as the parameter does."""
        gradient = slot.parameter.grad
        if gradient is not None and gradient.is_sparse:
            gradient = gradient.to_dense()
        weight = self.weight * self._factor
        if weight == 1.0 and slot.carried is None and gradient is not None and slot.fits(gradient):
            # Another tensor with the same memory: model.to() gives p.grad itself another memory, and Horovod's thread
            # would then read what does not fit the output.
            return gradient.detach()
        local = slot.room()
        if gradient is None or weight == 0.0:  # without a gradient: others may have used the parameter
            local.zero_()
        else:
            torch.mul(gradient, weight, out=local)
        if slot.carried is not None:
            local.add_(slot.carried, alpha=self._factor)
        return local

    def unpack(self, slot: Slot) -> None:
        """The reduced gradient has arrived: let the memory for the result hold it."""
        if slot.wire is not None:
            exact = self._compression in (hvd.Compression.none, hvd.Compression.fp16)
            slot.room().copy_(slot.wire if exact else self._compression.decompress(slot.wire, slot.context))

    def _take(self, slot: Slot) -> None:
        """Every gradient of the step has arrived: let ``p.grad`` be the reduced one."""
        self.unpack(slot)
        result = slot.result
        assert result is not None
        local = slot.parameter.grad
        reduced = result.to_sparse(slot.sparse) if slot.sparse else result
        slot.parameter.grad = reduced
        slot.result = local if reduced is result else result
        slot.carried = None

    def _submit_sparse(self, bucket: Bucket) -> None:
        assert bucket.handles is not None
        slot = bucket.members[0]
        name = self.prefix + slot.name
        local = self._weighted_sparse(slot)
        values = local.values() / hvd.size() if self._op == hvd.Average else local.values()
        bucket.handles.append(hvd.allgather_async(values, name=f"{name}.values"))
        bucket.handles.append(hvd.allgather_async(local.indices().t().contiguous(), name=f"{name}.indices"))

        bucket.sparse = True

    def _weighted_sparse(self, slot: Slot) -> torch.Tensor:
        """This worker's gradient as a sparse tensor."""
        gradient, carried, weight = slot.parameter.grad, slot.carried, self.weight * self._factor
        if gradient is not None and weight != 1.0:
            gradient = gradient * weight if weight else torch.zeros_like(gradient)
        if carried is not None:
            carried = carried * self._factor
        parts = [part for part in (gradient, carried) if part is not None] or [slot.nothing()]
        local: torch.Tensor = sum(parts[1:], start=parts[0])
        return local.coalesce()

    def _take_sparse(self, slot: Slot, values: torch.Tensor, indices: torch.Tensor) -> None:
        slot.parameter.grad = slot.made_of(indices.t(), values).coalesce()
        slot.carried = None

    # --- the update ------------------------------------------------------------------------------------------------

    def in_flight(self) -> bool:
        """Some gradients are complete, and the reduced ones have still to be waited for."""
        return self._ready > 0 and (self._failure is None or (self.keep and not self._drained))

    def underway(self) -> bool:
        """Gradients of a step that has not ended are complete, or being summed up, or were lost with the group."""
        return self._ready > 0 or self._failure is not None or self.accumulating()

    def check(self) -> None:
        """Make sure that a failure that the user's code has caught does not turn into a wrong update.

        Raises:
            HorovodInternalError: the group broke in this step, and nothing has recovered it yet.
        """
        if self._failure is not None:
            raise hvd.HorovodInternalError(f"the group broke earlier in this step: {self._failure}") from self._failure

    @torch.no_grad()
    def synchronize(self) -> None:
        """Hand over what is missing, wait for all gradients, and put the reduced ones into ``p.grad``. Blocks.

        Does nothing if they are there already.

        Raises:
            HorovodInternalError: the group broke. All ``p.grad`` are the local ones.
        """
        self.check()
        if self.synchronized:
            return
        for bucket in self.buckets:
            if bucket.handles is None:
                self._submit(bucket, self._taking_part(bucket))
        self.check()  # a failure that was kept a moment ago
        began = time.perf_counter()
        try:
            for bucket in self._submitted:
                bucket.collect(self.stopped)
            if self.lose_after is not None:
                raise hvd.HorovodInternalError("a reduction failed on this worker, as the fault plan asks for")
        except BaseException as error:
            self._note(error)
            raise
        self.waited_s = time.perf_counter() - began
        if self.probe is not None:
            self.probe(self._handed_over())
        self.take_all()

    def take_all(self) -> None:
        """Every gradient of the step has arrived: let every ``p.grad`` be the reduced one, and begin anew."""
        for bucket in self._submitted:
            if bucket.skipped:
                for slot in bucket.members:
                    slot.parameter.grad = slot.carried = None
            elif bucket.sparse:
                assert bucket.outputs is not None
                self._take_sparse(bucket.members[0], *bucket.outputs)
            else:
                for slot in bucket.members:
                    self._take(slot)
        self._rest()
        self.synchronized = True

    def _handed_over(self) -> int:
        return sum(len(bucket.members) for bucket in self._submitted)

    def _note(self, error: BaseException) -> None:
        if isinstance(error, hvd.HorovodInternalError):
            self._failure = error
            if self.on_failure is not None:
                self.on_failure(error)

    def wait_for(self, count: int) -> None:
        """Wait until the first ``count`` gradients that were handed over are reduced. For fault plans."""
        seen = 0
        for bucket in self._submitted:
            if seen >= count:
                return
            seen += len(bucket.members)
            bucket.poll(time.monotonic() + DRAIN_S, self.stopped)

    def drain(self) -> tuple[int, int]:
        """The group broke: wait until Horovod holds no tensor any more. Returns gradients reduced, and handed over."""
        if self._failure is None:
            self._failure = hvd.HorovodInternalError("the group broke outside of the reduction")
        self._drained = True
        deadline = time.monotonic() + DRAIN_S
        for bucket in self._submitted:
            bucket.end(deadline, self.stopped)
        if self.lose_after is not None:
            self._lose(self.lose_after)
        done = sum(len(bucket.members) for bucket in self._submitted if bucket.outputs is not None)
        return done, self._handed_over()

    def _lose(self, after: int) -> None:
        """Forget what has been reduced, but for the first gradients that were handed over."""
        seen = 0
        for bucket in self._submitted:
            if seen >= after:
                bucket.lose()
            seen += len(bucket.members)

    def discard(self) -> None:
        """Forget the gradients of a failed step."""
        self._rest()
        for slot in self._slots:
            slot.carried = None
            slot.parameter.grad = None
        self.synchronized = False

    def refuse(self, error: BaseException) -> None:
        """Raise in every hook and update until ``discard``."""
        self._failure = error
        self._refused = self._drained = True

    # --- going forward after a failure: see completion.py ------------------------------------------------------------

    def in_update(self) -> bool:
        """After a failure: some of the gradients are computed, and their reduction has failed or is still to come."""
        return self._ready > 0 or self.accumulating()

    def whole(self) -> bool:
        """After a failure: all gradients of the update are computed, and could be reduced now."""
        return all(slot.left == 0 for slot in self._slots if slot.parameter.requires_grad)

    def resume(self) -> None:
        """A new group stands: everything that takes part in the update is to be completed in it."""
        for bucket in self.buckets:
            bucket.members = bucket.members or self._taking_part(bucket)
        self._submitted = [bucket for bucket in self.buckets if bucket.members]

    def goes_sparse(self, bucket: Bucket) -> bool:
        return len(bucket.members) == 1 and bucket.members[0].sparse > 0 and not self._sparse_as_dense

    @contextmanager
    def _times(self, factor: float) -> Iterator[None]:
        self._factor = factor
        try:
            yield
        finally:
            self._factor = 1.0

    def hand_over(self, bucket: Bucket, factor: float) -> None:
        """Reduce the local gradients of a bucket, each times ``factor`` and this worker's weight."""
        with self._times(factor):
            if self.goes_sparse(bucket):
                self._submit_sparse(bucket)
            else:
                self._submit_dense(bucket)

    def local_sparse(self, slot: Slot, factor: float) -> torch.Tensor:
        """The local gradient times ``factor`` and this worker's weight."""
        with self._times(factor):
            return self._weighted_sparse(slot)

    def local_in_place(self, slot: Slot, factor: float) -> None:
        """Let the memory for the result hold the local gradient times ``factor`` and this worker's weight."""
        with self._times(factor):
            local = self._weighted(slot)
        if local is not slot.result:
            slot.room().copy_(local)

    def recovered(self) -> None:
        """The group's failure was recovered, and did not touch an update of this reducer."""
        self._failure = None
        self._drained = False

    @property
    def elements(self) -> int:
        """How many numbers its gradients have."""
        return sum(slot.parameter.numel() for slot in self._slots)

    def frontier(self) -> tuple[list[bool], list[bool], list[int]]:
        """After ``drain``, for each bucket: whether its reduced gradients are here, lack something; their numbers."""
        buckets = [(bucket, bucket.members or self._taking_part(bucket)) for bucket in self.buckets]
        return (
            [bucket.outputs is not None or not members for bucket, members in buckets],
            [bucket.lossy for bucket in self.buckets],
            [sum(slot.parameter.numel() for slot in members) for _, members in buckets],
        )

    def _rest(self) -> None:
        self._submitted = []
        self._ready = 0
        self._failure = None
        self._drained = self._refused = False
        self.lose_after = None
        for slot in self._slots:
            slot.left = self.passes
        for bucket in self.buckets:
            bucket.rest()
