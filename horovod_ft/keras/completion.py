"""Lossy forward recovery in Keras: complete an update's reductions that broke, among the workers that are left.

What at least one worker has in its reduced form is sent to all by the lowest rank that has it. The rest is made of the
local gradients. Every worker then holds the same bits. A worker that died in the same moment has no share in what is
made anew: in a gradient as the policy says, in a metric its samples do not count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from horovod_ft.agreement import Reach
from horovod_ft.keras.arrivals import Arrivals, Place
from horovod_ft.keras.stages import Local
from horovod_ft.membership.base import Bytes, Collectives, Group
from horovod_ft.policy import Forward
from horovod_ft.shares import Shares

Array = np.ndarray[Any, Any]


class TotalCollectives(Collectives, Protocol):
    """Collectives that can also add up."""

    def total(self, array: Array, name: str) -> Array:
        """The sum over all workers of an array of one dimension. Blocks."""


def complete(
    arrivals: Arrivals,
    local: Local,
    reach: Reach,
    decision: Forward,
    shares: Shares,
    comm: TotalCollectives,
    group: Group,
) -> None:
    """Let everything arrive that has not. Blocks; all workers of the group call it.

    With ``missing="skip"`` a gradient that nobody has is zero: what momentum has gathered is applied all the same.

    Raises:
        HorovodInternalError: the group broke. Nothing has arrived since; it can be tried again.
    """
    places = arrivals.places
    gradients = len(arrivals.gradients)
    mine = [*local.gradients, *local.deltas.values()]
    nobody_gone = len(shares.weights) == shares.size_before and decision.missing == "reduce_again"
    values: dict[int, Any] = {}
    lossy = [already or (holder is None and not nobody_gone)
             for holder, already in zip(reach.holders, reach.lossy, strict=True)]  # fmt: skip
    again: list[int] = []
    alone: list[int] = []
    for index, holder in enumerate(reach.holders):
        if holder is not None:
            continue
        if index >= gradients or decision.missing == "reduce_again":
            again.append(index)
        elif decision.missing == "local":
            alone.append(index)
        else:
            values[index] = places[index].zeros()
    for root in sorted({holder for holder in reach.holders if holder is not None}):
        held = [index for index, holder in enumerate(reach.holders) if holder == root]
        have = [places[index].value() for index in held] if group.rank == root else None
        values.update(zip(held, _sent([places[i] for i in held], have, root, comm), strict=True))
    if alone:
        factor = shares.factor_alone()
        have = [_times(mine[index], factor) for index in alone] if group.rank == shares.largest else None
        values.update(zip(alone, _sent([places[i] for i in alone], have, shares.largest, comm), strict=True))
    factor = shares.factor() / (len(shares.weights) if shares.average else 1)
    scaled = [mine[index] if index >= gradients else _times(mine[index], factor) for index in again]
    values.update(zip(again, _totals([places[index] for index in again], scaled, comm), strict=True))
    for index, place in enumerate(places):
        arrivals.put(place, values[index])
        place.lossy = lossy[index]


def _times(gradient: Any, factor: float) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_times(gradient.values, factor), gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


def _sent(places: Sequence[Place], have: Sequence[Any] | None, root: int, comm: Collectives) -> list[Any]:
    """What one worker has for these places, on all workers."""
    dense = [place for place in places if not place.sparse]
    buffer: Bytes = np.empty(sum(place.nbytes for place in dense), dtype=np.uint8)
    rows: list[Any] | None = None
    if have is not None:
        flat = [_bytes(value) for value, place in zip(have, places, strict=True) if not place.sparse]
        np.concatenate(flat or [buffer], out=buffer)
        rows = [(value.values.numpy(), value.indices.numpy()) for value in have if isinstance(value, tf.IndexedSlices)]
    if dense:
        comm.broadcast_bytes(buffer, root, "gradients of the update that failed")
    if len(dense) < len(places):
        rows = comm.broadcast_object(rows, root, "rows of gradients of the update that failed")
    return _placed(places, buffer, rows or [])


def _placed(places: Sequence[Place], buffer: Bytes, rows: Sequence[Any]) -> list[Any]:
    at, left, values = 0, iter(rows), []
    for place in places:
        if place.sparse:
            values.append(place.slices(*next(left)))
        else:
            values.append(place.tensor(buffer[at : at + place.nbytes]))
            at += place.nbytes
    return values


def _totals(places: Sequence[Place], local: Sequence[Any], comm: TotalCollectives) -> list[Any]:
    """The sums over all workers of what each has for these places."""
    flat: dict[str, list[Array]] = defaultdict(list)
    for place, value in zip(places, local, strict=True):
        if not place.sparse:
            flat[value.dtype.name].append(value.numpy().reshape(-1))
    sums = {dtype: comm.total(np.concatenate(parts), f"total of {dtype}") for dtype, parts in sorted(flat.items())}
    rows = [(value.values.numpy(), value.indices.numpy()) for value in local if isinstance(value, tf.IndexedSlices)]
    everyones = list(zip(*comm.allgather_object(rows, "rows"), strict=True)) if rows else []
    at: dict[str, int] = defaultdict(int)
    left, values = iter(everyones), []
    for place, value in zip(places, local, strict=True):
        if place.sparse:
            of_all = next(left)
            values.append(place.slices(*(np.concatenate(parts) for parts in zip(*of_all, strict=True))))
            continue
        dtype, begin = value.dtype.name, at[value.dtype.name]
        at[dtype] += place.elements
        values.append(tf.reshape(tf.constant(sums[dtype][begin : begin + place.elements]), place.kind[0]))
    return values


def _bytes(value: Any) -> Bytes:
    flat: Bytes = np.ascontiguousarray(value.numpy()).reshape(-1).view(np.uint8)
    return flat
