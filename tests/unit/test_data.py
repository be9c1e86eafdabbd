"""The global order of samples and how it is dealt out: each sample once, whatever happens to the group."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_ft.data import BatchSize, Cursor, Deal, EpochOrder, Place, shares, warn_about_idle_workers
from horovod_ft.errors import ConfigurationError, UsageError

quick = settings(deadline=None, derandomize=True, database=None, max_examples=60)


def a_cursor(samples: int = 10, *, drop_last: bool = False, shuffle: bool = False, **batch: Any) -> Cursor:
    return Cursor(EpochOrder(samples, shuffle=shuffle, seed=3), BatchSize(**batch), drop_last=drop_last)


def deals(cursor: Cursor, size: int, generation: int = 0) -> list[Deal]:
    """The next global batch as all workers of a group see it; empty at the end of the epoch."""
    found = [cursor.peek(generation=generation, rank=rank, size=size) for rank in range(size)]
    return [deal for deal in found if deal is not None]


def contributed(dealt: list[Deal]) -> list[int]:
    return [sample for deal in dealt if not deal.idle for sample in deal.ids.tolist()]


# --- shares of one batch -------------------------------------------------------------------------------------------


@quick
@given(total=st.integers(0, 200), size=st.integers(1, 40))
def test_shares_are_contiguous_and_cover_the_batch(total: int, size: int) -> None:
    cut = list(shares(total, size))
    assert len(cut) == size
    assert [start for start, _ in cut] + [total] == [0] + [stop for _, stop in cut]


@quick
@given(total=st.integers(0, 200), size=st.integers(1, 40))
def test_shares_differ_by_at_most_one(total: int, size: int) -> None:
    lengths = {stop - start for start, stop in shares(total, size)}
    assert max(lengths) - min(lengths) <= 1


@quick
@given(total=st.integers(1, 60), size=st.integers(1, 20))
def test_an_average_of_weighted_means_is_the_mean_over_the_batch(total: int, size: int) -> None:
    dealt = deals(a_cursor(60, total=total), size)
    parts = [Fraction(deal.share, deal.stop - deal.start) for deal in dealt]
    assert sum(parts) == 1
    assert np.mean([deal.weight for deal in dealt]) == pytest.approx(1, abs=1e-12)


@quick
@given(values=st.lists(st.integers(-9, 9), min_size=1, max_size=30), size=st.integers(1, 9))
def test_the_update_does_not_depend_on_the_number_of_workers(values: list[int], size: int) -> None:
    gradients = np.array(values, dtype=np.float64)
    dealt = deals(a_cursor(len(values), total=len(values)), size)
    average = sum(deal.weight * gradients[deal.ids].mean() for deal in dealt) / size
    assert average == pytest.approx(gradients.mean(), abs=1e-12)


def test_equal_shares_have_a_weight_of_exactly_one() -> None:
    assert [deal.weight for deal in deals(a_cursor(12, total=12), 3)] == [1.0, 1.0, 1.0]


def test_a_worker_without_a_share_borrows_a_sample_at_weight_zero() -> None:
    dealt = deals(a_cursor(10, total=2), 4)
    assert [deal.idle for deal in dealt] == [False, False, True, True]
    assert [(len(deal.ids), deal.share, deal.weight) for deal in dealt[2:]] == [(1, 0, 0.0), (1, 0, 0.0)]
    assert contributed(dealt) == [0, 1]


def test_more_workers_than_samples_in_a_batch_is_warned_about() -> None:
    with pytest.warns(UserWarning, match="global_batch_size=2 is smaller than the 5 workers: in every step 3"):
        warn_about_idle_workers(BatchSize(total=2), 5)


@pytest.mark.parametrize("batch", [BatchSize(total=5), BatchSize(per_worker=1)])
def test_enough_samples_for_all_is_not_warned_about(batch: BatchSize) -> None:
    warn_about_idle_workers(batch, 5)  # warnings are errors


# --- the stream ----------------------------------------------------------------------------------------------------


@dataclass
class Training:
    """All workers' cursors, driven in lock step, and the samples of what was committed."""

    cursor: Cursor
    size: int = 3
    generation: int = 0
    opened: list[int] = field(default_factory=list)
    visited: list[int] = field(default_factory=list)

    def step(self) -> bool:
        """Take a global batch; False at the end of the epoch."""
        dealt = deals(self.cursor, self.size, self.generation)
        if not dealt:
            return False
        self.opened += contributed(dealt)
        self.cursor.take(dealt[0])
        return True

    def commit(self) -> None:
        self.cursor.commit()
        self.visited += self.opened
        self.opened = []

    def fail(self, size: int) -> None:
        self.cursor.rollback()
        self.opened = []
        self.regroup(size)

    def regroup(self, size: int) -> None:
        self.size = size
        self.generation += 1

    def finish_epoch(self) -> None:
        while self.step():
            self.commit()


HAPPENINGS = st.lists(
    st.one_of(
        st.just(("commit", 0)),
        st.just(("accumulate", 0)),
        st.tuples(st.just("fail"), st.integers(1, 6)),
        st.tuples(st.just("regroup"), st.integers(1, 6)),
    ),
    max_size=25,
)
BATCHES = st.one_of(
    st.builds(lambda n: {"total": n}, st.integers(1, 9)), st.builds(lambda n: {"per_worker": n}, st.integers(1, 4))
)


@quick
@given(samples=st.integers(1, 40), batch=BATCHES, happenings=HAPPENINGS)
def test_an_epoch_visits_each_sample_once_whatever_happens(
    samples: int, batch: dict[str, Any], happenings: list[tuple[str, int]]
) -> None:
    training = Training(a_cursor(samples, shuffle=True, **batch))
    for kind, size in happenings:
        took = training.step()
        if kind == "commit":
            training.commit()
        elif kind == "fail":
            training.fail(size)
        elif kind == "regroup" and took:
            training.commit()
            training.regroup(size)
    training.finish_epoch()
    training.commit()
    assert sorted(training.visited) == list(range(samples))


@quick
@given(samples=st.integers(1, 40), total=st.integers(1, 9), sizes=st.lists(st.integers(1, 6), max_size=10))
def test_global_batches_do_not_depend_on_the_sizes_of_the_groups(samples: int, total: int, sizes: list[int]) -> None:
    def batches(sizes: list[int]) -> list[list[int]]:
        training, found = Training(a_cursor(samples, shuffle=True, total=total)), []
        for size in [*sizes, *[1] * samples]:
            training.fail(size)
            if training.step():
                found.append(training.opened)
                training.commit()
        return found

    assert batches(sizes) == batches([])


@quick
@given(samples=st.integers(1, 40), batch=st.integers(1, 9), sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_drop_last_leaves_out_a_batch_that_is_not_full_and_no_other(samples: int, batch: int, sizes: list[int]) -> None:
    training = Training(a_cursor(samples, drop_last=True, total=batch))
    for size in sizes:
        training.fail(size)
        training.step()
        training.commit()
    training.finish_epoch()
    assert training.visited == list(range(samples // batch * batch))


def test_without_drop_last_the_last_batch_is_what_is_left() -> None:
    training = Training(a_cursor(10, total=4))
    training.step()
    training.step()
    assert [(deal.start, deal.stop) for deal in deals(training.cursor, 3)] == [(8, 10)] * 3


def test_a_batch_for_each_worker_grows_with_the_group() -> None:
    cursor = a_cursor(100, per_worker=4)
    assert [deals(cursor, size)[0].stop for size in (1, 2, 5)] == [4, 8, 20]


@pytest.mark.parametrize(("drop_last", "left", "exhausted"), [(False, 1, False), (True, 1, True), (False, 0, True)])
def test_an_epoch_is_exhausted_if_no_batch_is_left(drop_last: bool, left: int, exhausted: bool) -> None:
    cursor = a_cursor(10, drop_last=drop_last, total=4)
    cursor.go_to(Place(0, 10 - left))
    assert cursor.exhausted(size=2) is exhausted
    assert (cursor.peek(generation=0, rank=0, size=2) is None) is exhausted


def test_peeking_ahead_does_not_move_the_cursor() -> None:
    cursor = a_cursor(10, total=4)
    ahead = cursor.peek(generation=0, rank=0, size=2, after=Place(0, 4))
    assert ahead is not None
    assert (ahead.start, cursor.taken, cursor.committed) == (4, Place(0, 0), Place(0, 0))


def test_what_was_taken_is_lasting_only_once_committed() -> None:
    training = Training(a_cursor(10, total=4))
    training.step()
    assert (training.cursor.taken, training.cursor.committed) == (Place(0, 4), Place(0, 0))
    training.commit()
    assert training.cursor.committed == Place(0, 4)


def test_a_rollback_deals_the_same_global_batch_again() -> None:
    training = Training(a_cursor(10, shuffle=True, total=4))
    training.step()
    before = training.opened
    training.fail(size=2)
    training.step()
    assert training.opened == before


def test_a_deal_can_be_taken_only_where_it_begins() -> None:
    cursor = a_cursor(10, total=4)
    deal = deals(cursor, 2)[0]
    cursor.take(deal)
    with pytest.raises(UsageError, match="does not begin at"):
        cursor.take(deal)


def test_going_to_a_place_is_committed() -> None:
    cursor = a_cursor(10, total=4)
    cursor.go_to(Place(3, 8))
    cursor.rollback()
    assert (cursor.epoch, cursor.taken) == (3, Place(3, 8))


def test_the_same_slice_for_another_group_is_another_deal() -> None:
    cursor = a_cursor(10, total=4)
    assert deals(cursor, 2)[0].same_batch(deals(cursor, 2)[0])
    assert not deals(cursor, 2)[0].same_batch(deals(cursor, 2, generation=1)[0])
    assert not deals(cursor, 2)[0].same_batch(deals(cursor, 3)[0])


# --- the order -----------------------------------------------------------------------------------------------------


@quick
@given(length=st.integers(1, 300), seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
def test_the_order_is_a_permutation_and_follows_from_seed_and_epoch(length: int, seed: int, epoch: int) -> None:
    order = EpochOrder(length, shuffle=True, seed=seed)(epoch)
    assert sorted(order.tolist()) == list(range(length))
    assert order.tolist() == EpochOrder(length, shuffle=True, seed=seed)(epoch).tolist()


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(EpochOrder(50, shuffle=True, seed=seed)(epoch)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4


def test_the_order_does_not_depend_on_which_epochs_were_asked_for_before() -> None:
    order = EpochOrder(50, shuffle=True, seed=0)
    first = order(4).tolist()
    order(9)
    assert order(4).tolist() == first


def test_without_shuffling_samples_come_as_they_are() -> None:
    assert EpochOrder(4, shuffle=False, seed=0)(7).tolist() == [0, 1, 2, 3]


def test_ids_are_int64() -> None:
    assert {EpochOrder(4, shuffle=shuffle, seed=0)(0).dtype for shuffle in (True, False)} == {np.dtype(np.int64)}


# --- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "seed", "said"), [(0, 0, "the dataset is empty"), (4, -1, "seed is -1; it must not be negative")]
)
def test_an_order_of_nothing_or_of_a_negative_seed_is_refused(length: int, seed: int, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        EpochOrder(length, shuffle=True, seed=seed)


@pytest.mark.parametrize("sizes", [{}, {"total": 4, "per_worker": 4}])
def test_exactly_one_kind_of_batch_size_is_given(sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match=r"either global_batch_size=G .* or batch_size=B .* not both"):
        BatchSize(**sizes)


@pytest.mark.parametrize("value", [0, -4, 2.5, True, "8"])
@pytest.mark.parametrize(("field_", "name"), [("total", "global_batch_size"), ("per_worker", "batch_size")])
def test_a_batch_size_is_a_whole_number_from_one(field_: str, name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{name} is .*; it must be a whole number of samples, at least 1"):
        BatchSize(**{field_: value})
