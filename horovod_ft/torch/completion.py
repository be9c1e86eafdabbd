"""Lossy forward recovery in PyTorch: complete an update's reductions that broke, among the workers that are left.

What at least one worker has in its reduced form is sent to all by the lowest rank that has it. The rest is made of the
local gradients, which are whole because gradients are reduced out of place. Every worker then holds the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import horovod.torch as hvd
import torch

from horovod_ft.membership.base import Collectives, Group
from horovod_ft.policy import Forward
from horovod_ft.shares import Shares
from horovod_ft.torch.binding import PREFIX
from horovod_ft.torch.reducer import GradientReducer
from horovod_ft.torch.slots import Bucket, Slot, flat

#: Waits for a handle, bounded: ``wait(handle, what)`` returns its output.
Wait = Callable[[int, str], Any]


class Completion:
    """One optimizer's update, after its reductions broke and a new group has formed.

    Args:
        reducer: drained.
        group: the new one.
        comm, wait: of the new group.
    """

    def __init__(self, reducer: GradientReducer, group: Group, comm: Collectives, wait: Wait) -> None:
        self._reducer = reducer
        self._group = group
        self._comm = comm
        self._wait = wait

    @torch.no_grad()
    def run(
        self, holders: Sequence[int | None], lossy: Sequence[bool], decision: Forward, shares: Shares
    ) -> list[Slot]:
        """Complete every bucket; ``reducer.take_all`` remains to be called. Blocks; all workers of the group call it.

        Args:
            holders: for each of the reducer's buckets the rank that has it.
            lossy: for each of them, whether what that rank has lacks a share already.

        Returns:
            parameters whose gradients lack a share.

        Raises:
            HorovodInternalError: the group broke. What is complete counts as done; it can be tried again.
        """
        reducer = self._reducer
        reducer.resume()
        nobody_gone = len(shares.weights) == shares.size_before and decision.missing == "reduce_again"
        try:
            for bucket, holder, already in zip(reducer.buckets, holders, lossy, strict=True):
                if bucket.members:
                    bucket.lossy = already or (holder is None and not nobody_gone)
                    self._begin(bucket, holder, decision, shares)
            for bucket in reducer.buckets:
                outputs = [self._wait(handle, "gradients of the update that failed") for handle in bucket.handles or ()]
                if bucket.outputs is None and not bucket.skipped:
                    bucket.outputs = outputs
        except BaseException:
            reducer.drain()
            raise
        return [slot for bucket in reducer.buckets if bucket.lossy for slot in bucket.members]

    def _begin(self, bucket: Bucket, holder: int | None, decision: Forward, shares: Shares) -> None:
        bucket.handles, bucket.failed, bucket.skipped = [], False, False
        reducer = self._reducer
        for slot in bucket.members:
            slot.look()
        if holder is not None:
            self._send_result(bucket, holder)
        elif decision.missing == "skip":
            bucket.skipped = True
        elif decision.missing == "local":
            self._send_local(bucket, shares)
        else:
            reducer.hand_over(bucket, shares.factor())

    def _send_result(self, bucket: Bucket, root: int) -> None:
        if self._reducer.goes_sparse(bucket):
            self._send_sparse(bucket, root, bucket.outputs)
            return
        for slot in bucket.members:
            if bucket.outputs is not None:
                self._reducer.unpack(slot)
            self._broadcast(bucket, slot, root)

    def _send_local(self, bucket: Bucket, shares: Shares) -> None:
        root, reducer = shares.largest, self._reducer
        if reducer.goes_sparse(bucket):
            local = reducer.local_sparse(bucket.members[0], shares.factor_alone())
            self._send_sparse(bucket, root, [local.values(), local.indices().t().contiguous()])
            return
        for slot in bucket.members:
            if self._group.rank == root:
                reducer.local_in_place(slot, shares.factor_alone())
            self._broadcast(bucket, slot, root)

    def _broadcast(self, bucket: Bucket, slot: Slot, root: int) -> None:
        assert bucket.handles is not None
        slot.wire = None
        memory = flat(slot.room()).reshape(-1).view(torch.uint8)  # Horovod does not know every dtype
        bucket.handles.append(hvd.broadcast_async_(memory, root, name=self._name(slot)))

    def _send_sparse(self, bucket: Bucket, root: int, parts: Sequence[torch.Tensor] | None) -> None:
        slot = bucket.members[0]
        sent = parts is not None and [part.cpu() for part in parts]
        received = self._comm.broadcast_object(sent, root, f"forward.{slot.name}")
        device = slot.parameter.device
        bucket.outputs, bucket.sparse = [part.to(device) for part in received], True

    def _name(self, slot: Slot) -> str:
        return f"{PREFIX}forward.{self._reducer.prefix}{slot.name}"
