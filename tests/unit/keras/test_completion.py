"""Completing an update of Keras whose reductions broke: two workers are left of three."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from horovod_ft.agreement import Reach
from horovod_ft.keras.arrivals import Arrivals
from horovod_ft.keras.completion import Completion, ways_of
from horovod_ft.keras.stages import Local
from horovod_ft.membership.base import Group
from horovod_ft.policy import Forward
from horovod_ft.shares import Shares
from horovod_ft.testing.fake_world import Breakage, FakeMembership, FakeWorld, GroupBroken

#: A matrix, a vector and rows of an embedding; then what the step has added to metrics.
MATRIX, VECTOR, ROWS, METRICS = range(4)
Value = tuple[Any, ...]


class Comm:
    """The collectives of a worker that can also add up."""

    def __init__(self, member: FakeMembership) -> None:
        self._comm = member.comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def total(self, array: Any, name: str) -> Any:
        return np.sum(self._comm.allgather_object(array, name), axis=0)


def sparse(values: list[list[float]], indices: list[int]) -> Any:
    return tf.IndexedSlices(tf.constant(values), tf.constant(indices), tf.constant([4, 1]))


def local_of(rank: int) -> Local:
    """1 on the worker of rank 0, 3 on that of rank 1; which touch rows 0 and 2, and row 2."""
    one = float(2 * rank + 1)
    rows = sparse([[one], [one]], [0, 2]) if rank == 0 else sparse([[one]], [2])
    deltas = {"float32": tf.constant([10 * one, 1.0])}
    return Local([tf.fill([2, 2], one), tf.fill([3], one), rows], deltas, [], {})


def plain(value: Any) -> Value:
    if isinstance(value, tf.IndexedSlices):
        pairs = zip(value.indices.numpy().tolist(), value.values.numpy().reshape(-1).tolist(), strict=True)
        return tuple(sorted(pairs))
    return tuple(value.numpy().reshape(-1).tolist())


class Left:
    """What the survivors have after ``Completion``.

    Args:
        holders: see ``Reach``.
        there: number of a reduction -> its result, on those who have it.
        weights: of the survivors' shares.
        before: size of the group that broke.
        breakages: of the new group.
    """

    def __init__(
        self,
        holders: tuple[int | None, ...] = (None,) * 4,
        there: dict[int, dict[int, Any]] | None = None,
        *,
        decision: Forward = Forward(),  # noqa: B008  cannot change
        weights: tuple[float, float] = (1.0, 1.0),
        before: int = 3,
        lossy: tuple[bool, ...] = (False,) * 4,
        average: bool = True,
        breakages: tuple[Breakage, ...] = (),
    ) -> None:
        shared_by = Group(0, before)
        self._reach = Reach(holders, lossy, (4, 3, 2, 2), weights, shared_by, (0, 1))
        self._shares = Shares(weights, self._reach.largest, before, decision.rescale, average)
        self._decision, self._there = decision, there or {}
        self.outcomes = FakeWorld(2, breakages).run(self._finished)

    def _finished(self, member: FakeMembership) -> dict[str, Any]:
        group = member.start()
        local, arrivals = local_of(group.rank), Arrivals()
        arrivals.begin(local.gradients, local.deltas)
        for index, value in self._there.get(group.rank, {}).items():
            arrivals.put(arrivals.places[index], value)
        completion = Completion(arrivals, local, self._shares, Comm(member), group)
        try:
            completion.run(self._reach, self._decision)
        except GroupBroken:
            return {"done": arrivals.done()}
        return {
            "done": arrivals.done(),
            "values": [plain(place.value()) for place in arrivals.places],
            "lossy": [place.lossy for place in arrivals.places],
        }

    @property
    def values(self) -> list[Value]:
        """Of all reductions, the same on both."""
        first, second = (outcome.value for outcome in self.outcomes.values())
        assert first == second
        assert first["done"] == (True,) * 4
        values: list[Value] = first["values"]
        return values

    @property
    def lossy(self) -> list[bool]:
        lossy: list[bool] = self.outcomes[0].value["lossy"]
        return lossy


def test_what_a_survivor_has_is_sent_to_all_bit_by_bit() -> None:
    whole = float(np.float32(1) / np.float32(3))
    here = {MATRIX: tf.fill([2, 2], whole), ROWS: sparse([[whole], [7.0]], [1, 1])}
    there = {0: {VECTOR: tf.fill([3], 5.0)}, 1: {**here, METRICS: tf.constant([6.0, 3.0])}}
    left = Left((1, 0, 1, 1), there)
    assert left.values == [(whole,) * 4, (5.0,) * 3, ((1, whole), (1, 7.0)), (6.0, 3.0)]
    assert left.lossy == [False] * 4


def test_what_has_come_to_both_is_that_of_the_holder() -> None:
    there = {0: {VECTOR: tf.fill([3], 5.0)}, 1: {VECTOR: tf.fill([3], 4.0)}}
    assert Left((None, 0, None, None), there).values[VECTOR] == (5.0,) * 3


def test_what_nobody_has_is_the_mean_of_what_is_left() -> None:
    left = Left()
    assert left.values == [(2.0,) * 4, (2.0,) * 3, ((0, 0.5), (2, 0.5), (2, 1.5)), (40.0, 2.0)]
    assert left.lossy == [True] * 4


def test_with_unequal_shares_it_is_the_mean_over_samples() -> None:
    """Local gradients are weighted already: 1 and 3 are sums over 0.5 and 1.5 shares, so the mean is 4 / 2."""
    assert Left(weights=(0.5, 1.5)).values[MATRIX] == (2.0,) * 4
    assert Left(weights=(0.5, 0.5)).values[MATRIX] == (4.0,) * 4


def test_not_rescaled_those_who_are_gone_count_as_zero() -> None:
    left = Left(decision=Forward(rescale=False))
    assert left.values[MATRIX] == pytest.approx((4 / 3,) * 4)
    assert left.values[METRICS] == (40.0, 2.0)


def test_a_sum_is_scaled_up_to_those_who_were_there() -> None:
    assert Left(average=False).values[MATRIX] == pytest.approx((6.0,) * 4)


@pytest.mark.parametrize("missing", ["reduce_again", "local", "skip"])
def test_if_nobody_is_gone_what_is_reduced_anew_is_whole(missing: str) -> None:
    left = Left(before=2, decision=Forward(missing))
    assert left.values[METRICS] == (40.0, 2.0)
    again = missing == "reduce_again"
    assert left.lossy == [not again] * 3 + [False]
    assert (left.values[MATRIX] == (2.0,) * 4) == again


def test_what_lacked_a_share_before_still_does() -> None:
    there = {0: {VECTOR: tf.fill([3], 5.0)}}
    assert Left((None, 0, None, None), there, before=2, lossy=(False, True, False, False)).lossy[VECTOR]


def test_the_largest_share_stands_for_all() -> None:
    left = Left(decision=Forward("local"), weights=(0.5, 1.5))
    assert left.values == [(2.0,) * 4, (2.0,) * 3, ((2, 2.0),), (40.0, 2.0)]
    assert left.lossy == [True] * 4


def test_left_out_it_is_zero_but_metrics_count() -> None:
    there = {0: {VECTOR: tf.fill([3], 5.0)}}
    left = Left((None, 0, None, None), there, decision=Forward("skip"))
    assert left.values == [(0.0,) * 4, (5.0,) * 3, (), (40.0, 2.0)]
    assert left.lossy == [True, False, True, True]


@pytest.mark.parametrize("during", ["gradients of the update that failed", "total of float32", "rows"])
def test_a_group_that_breaks_again_leaves_what_has_arrived(during: str) -> None:
    there = {0: {VECTOR: tf.fill([3], 5.0)}}
    left = Left((None, 0, None, None), there, breakages=(Breakage(1, during),))
    assert left.outcomes[1].died
    assert left.outcomes[0].value["done"] == (False, True, False, False)


@pytest.mark.parametrize(
    ("missing", "way"),
    [("reduce_again", lambda ways: ways.again), ("local", lambda ways: ways.alone), ("skip", lambda ways: ways.zero)],
)
def test_metrics_are_reduced_anew_whatever_becomes_of_gradients(missing: str, way: Callable[[Any], list[int]]) -> None:
    ways = ways_of((2, None, 0, 2, None), 3, missing)
    assert ways.held == {2: [0, 3], 0: [2]}
    assert 1 in way(ways)
    assert 4 in ways.again
    assert sorted([*ways.again, *ways.alone, *ways.zero]) == [1, 4]
