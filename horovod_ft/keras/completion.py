"""Lossy forward recovery in Keras: complete an update's reductions that broke, among the workers that are left.

What at least one worker has in its reduced form is sent to all by the lowest rank that has it. The rest is made of the
local gradients. Every worker then holds the same bits. A worker that died in the same moment has no share in what is
made anew: in a gradient as the policy says, in a metric its samples do not count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from horovod_ft.agreement import Reach
from horovod_ft.keras.arrivals import Arrivals, Place
from horovod_ft.keras.reducer import values_of, with_values
from horovod_ft.keras.stages import Local
from horovod_ft.membership.base import Bytes, Collectives, Group
from horovod_ft.policy import Forward
from horovod_ft.shares import Shares

Array = np.ndarray[Any, Any]


class TotalCollectives(Collectives, Protocol):
    """Collectives that can also add up."""

    def total(self, array: Array, name: str) -> Array:
        """The sum over all workers of an array of one dimension. Blocks."""


class Ways(NamedTuple):
    """How reductions arrive that have not arrived everywhere, by their numbers.

    Attributes:
        held: rank -> those that it has in their reduced form, and sends.
        again: those that are reduced anew by all that are left.
        alone: those for which the share of the worker with the most samples stands for all.
        zero: those that nobody has, and that are left out.
    """

    held: dict[int, list[int]]
    again: list[int]
    alone: list[int]
    zero: list[int]


def ways_of(holders: Sequence[int | None], gradients: int, missing: str) -> Ways:
    """What becomes of each reduction.

    Args:
        holders: see ``agreement.Reach``.
        gradients: so many of the reductions are of gradients, the rest of metrics.
        missing: see ``policy.Forward``; of gradients only, metrics are reduced anew.
    """
    ways = Ways(defaultdict(list), [], [], [])
    of_gradients = {"reduce_again": ways.again, "local": ways.alone, "skip": ways.zero}[missing]
    for index, holder in enumerate(holders):
        if holder is not None:
            ways.held[holder].append(index)
        else:
            (of_gradients if index < gradients else ways.again).append(index)
    return ways


class Completion:
    """Lets everything arrive that has not, in one update. All workers of the group make one.

    Args:
        arrivals, local: of the update.
        shares: what the shares count that are left.
        comm, group: of those who are left.
    """

    def __init__(
        self, arrivals: Arrivals, local: Local, shares: Shares, comm: TotalCollectives, group: Group
    ) -> None:
        self._arrivals = arrivals
        self._places = arrivals.places
        self._gradients = len(arrivals.gradients)
        self._mine = [*local.gradients, *local.deltas.values()]
        self._shares = shares
        self._comm = comm
        self._rank = group.rank

    def run(self, reach: Reach, decision: Forward) -> None:
        """Blocks; all workers of the group call it.

        With ``missing="skip"`` a gradient that nobody has is zero: what momentum has gathered is applied all the same.

        Raises:
            HorovodInternalError: the group broke. Nothing has arrived since; it can be tried again.
        """
        ways = ways_of(reach.holders, self._gradients, decision.missing)
        values = {index: self._places[index].zeros() for index in ways.zero}
        for root, held in sorted(ways.held.items()):
            values |= self._sent(held, root, lambda index: self._places[index].value())
        values |= self._sent(ways.alone, self._shares.largest, self._alone)
        values |= self._reduced(ways.again)
        everybody = len(self._shares.weights) == self._shares.size_before
        whole = set(ways.again) if everybody else set()
        for index, place in enumerate(self._places):
            self._arrivals.put(place, values[index])
            place.lossy = reach.lossy[index] or (reach.holders[index] is None and index not in whole)

    def _sent(self, numbers: Sequence[int], root: int, value: Callable[[int], Any]) -> dict[int, Any]:
        have = [value(index) for index in numbers] if self._rank == root else None
        received = _sent([self._places[index] for index in numbers], have, root, self._comm)
        return dict(zip(numbers, received, strict=True))

    def _alone(self, index: int) -> Any:
        return _times(self._mine[index], self._shares.factor_alone())

    def _reduced(self, numbers: Sequence[int]) -> dict[int, Any]:
        factor = self._shares.factor() / (len(self._shares.weights) if self._shares.average else 1)
        scaled = [
            _times(self._mine[index], factor) if index < self._gradients else self._mine[index] for index in numbers
        ]
        totals = _totals([self._places[index] for index in numbers], scaled, self._comm)
        return dict(zip(numbers, totals, strict=True))


def _times(gradient: Any, factor: float) -> Any:
    values = values_of(gradient)
    return with_values(gradient, values * tf.cast(factor, values.dtype))


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
