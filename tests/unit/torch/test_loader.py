"""``ElasticDataLoader``: every sample once, for whatever group, however often it changes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from horovod_ft.data import Deal, EpochOrder, Watcher
from horovod_ft.errors import ConfigurationError
from horovod_ft.membership.base import Group
from horovod_ft.torch.loader import ElasticDataLoader, Ticket
from horovod_ft.torch.runtime import current

WORKERS = [0, 2]


class Numbers(Dataset[int]):
    """0, 1, 2, ...; the samples are their own ids."""

    def __init__(self, length: int = 20) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Seat:
    """Where the worker under test sits; can be changed at any time."""

    def __init__(self, rank: int = 0, size: int = 1, generation: int = 0) -> None:
        self.group = Group(rank, size, generation)

    def __call__(self) -> Group:
        return self.group


class Silent:
    """Tracks a loader and commits nothing."""

    def taking(self) -> None:
        """Nothing to do."""

    def taken(self, deal: Deal) -> None:
        """Nothing to do."""


def tracked(*args: Any, **kwargs: Any) -> Any:
    loader: Any = ElasticDataLoader(*args, **kwargs)
    loader.watcher = Silent()
    return loader


class Seats:
    """Makes loaders of the workers of one group, and moves them to the next group."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch

    def loader(self, seat: Seat, dataset: Any = None, **options: Any) -> Any:
        self._patch.setattr(current(), "group", seat)
        return tracked(Numbers() if dataset is None else dataset, **options)


@pytest.fixture
def seats(monkeypatch: pytest.MonkeyPatch) -> Seats:
    return Seats(monkeypatch)


def ids(loader: ElasticDataLoader[Any], limit: int | None = None) -> list[list[int]]:
    """The batches of the rest of the epoch, each committed, or the next ``limit`` of them."""
    seen: list[list[int]] = []
    for batch in loader:
        seen.append(batch.tolist())
        loader.cursor.commit()
        if len(seen) == limit:
            break
    return seen


# --- one worker ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_the_order_is_that_of_the_epoch(shuffle: bool, num_workers: int) -> None:
    loader: Any = ElasticDataLoader(Numbers(), global_batch_size=6, shuffle=shuffle, seed=3, num_workers=num_workers)
    order = EpochOrder(20, shuffle=shuffle, seed=3)
    for epoch in range(2):
        assert ids(loader) == [order(epoch)[at : at + 6].tolist() for at in range(0, 20, 6)]
    loader.close()


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [6, 6, 6, 2]), (True, [6, 6, 6])])
def test_the_tail_is_kept_unless_it_is_dropped(drop_last: bool, sizes: list[int]) -> None:
    loader: Any = ElasticDataLoader(Numbers(), global_batch_size=6, drop_last=drop_last)
    assert [len(batch) for batch in ids(loader)] == sizes
    assert len(loader) == len(sizes)


def test_the_second_argument_is_the_batch_size_of_a_worker_as_in_torch(seats: Seats) -> None:
    loader = seats.loader(Seat(1, 2), batch_size=3)
    assert ids(loader, 2) == [[3, 4, 5], [9, 10, 11]]
    assert len(loader) == 4


def test_batches_are_what_torchs_own_loader_gives() -> None:
    data = TensorDataset(torch.randn(7, 2), torch.arange(7))
    ours: Any = ElasticDataLoader(data, 3)
    theirs = DataLoader(data, 3)
    for (x, y), (u, v) in zip(ours, theirs, strict=True):
        assert torch.equal(x, u)
        assert torch.equal(y, v)


def test_a_users_collation_is_used() -> None:
    loader: Any = ElasticDataLoader(Numbers(4), 2, collate_fn=tuple)
    assert list(loader) == [(0, 1), (2, 3)]


def test_a_dataset_that_loads_batches_is_asked_for_batches() -> None:
    class Batched(Numbers):
        asked: list[list[int]] = []  # noqa: RUF012  one test, one instance

        def __getitems__(self, indices: list[int]) -> list[int]:
            self.asked.append(indices)
            return indices

    loader: Any = ElasticDataLoader(Batched(4), 2)
    ids(loader)
    assert Batched.asked == [[0, 1], [2, 3]]


@pytest.mark.parametrize("num_workers", WORKERS)
def test_shuffling_leaves_the_random_streams_of_the_training_alone(num_workers: int) -> None:
    def streams() -> list[Any]:
        return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]  # type: ignore[index]

    before = streams()
    loader: Any = ElasticDataLoader(Numbers(), 4, shuffle=True, num_workers=num_workers)
    ids(loader)
    assert streams() == before
    loader.close()


def test_workers_that_persist_live_through_epochs() -> None:
    loader: Any = ElasticDataLoader(Pids(), 4, num_workers=2, persistent_workers=True)
    assert {pid for batch in ids(loader) for pid in batch} == {pid for batch in ids(loader) for pid in batch}
    loader.close()


def test_workers_that_do_not_persist_are_gone_after_the_epoch() -> None:
    loader: Any = ElasticDataLoader(Pids(), 4, num_workers=2)
    ids(loader)
    assert loader._torch_loader._iterator is None


class Pids(Numbers):
    """Which process loads a sample."""

    def __getitem__(self, index: int) -> int:
        return torch.utils.data.get_worker_info().seed  # type: ignore[union-attr]


# --- epochs ----------------------------------------------------------------------------------------------------------


def test_a_loop_that_runs_again_after_its_end_begins_the_next_epoch() -> None:
    loader: Any = ElasticDataLoader(Numbers(4), 2)
    assert [(loader.epoch, len(ids(loader))) for _ in range(3)] == [(0, 2), (0, 2), (1, 2)]


@pytest.mark.parametrize("num_workers", WORKERS)
def test_a_loop_after_a_break_goes_on_behind_it(num_workers: int) -> None:
    loader: Any = ElasticDataLoader(Numbers(12), 2, num_workers=num_workers)
    assert ids(loader, 2) == [[0, 1], [2, 3]]
    assert ids(loader, 1) == [[4, 5]]
    assert ids(loader) == [[6, 7], [8, 9], [10, 11]]
    loader.close()


def test_epochs_counts_from_where_training_is() -> None:
    loader: Any = ElasticDataLoader(Numbers(4), 2)
    assert [(epoch, len(ids(loader))) for epoch in loader.epochs(2)] == [(0, 2), (1, 2)]
    assert list(loader.epochs(2)) == []
    assert [epoch for epoch in loader.epochs(4) if ids(loader)] == [2, 3]


def test_an_epoch_that_is_left_early_is_over_for_epochs() -> None:
    loader: Any = ElasticDataLoader(Numbers(4), 2)
    assert [(epoch, ids(loader, 1)) for epoch in loader.epochs(2)] == [(0, [[0, 1]]), (1, [[0, 1]])]


def test_a_second_loop_within_an_epoch_is_empty() -> None:
    loader: Any = ElasticDataLoader(Numbers(4), 2)
    assert [(len(ids(loader)), len(ids(loader))) for _ in loader.epochs(2)] == [(2, 0), (2, 0)]


def test_after_a_restart_of_the_function_an_interrupted_epoch_comes_again_with_what_is_left() -> None:
    loader: Any = ElasticDataLoader(Numbers(4), 2)
    for _ in loader.epochs(2):
        ids(loader, 1)
        break
    loader.resume()
    assert [(epoch, ids(loader)) for epoch in loader.epochs(2)] == [(0, [[2, 3]]), (1, [[0, 1], [2, 3]])]


def test_after_a_restart_an_epoch_without_anything_left_comes_again_and_is_empty() -> None:
    loader: Any = ElasticDataLoader(Numbers(4), 2)
    ids(loader)
    loader.resume()
    assert ids(loader) == []
    assert len(ids(loader)) == 2


def test_an_older_count_of_epochs_that_ends_late_does_not_disturb_the_new_one() -> None:
    loader: Any = ElasticDataLoader(Numbers(4), 2)
    old = loader.epochs(2)
    next(old)
    new = loader.epochs(2)
    next(new)
    ids(loader)
    old.close()
    assert ids(loader) == []  # still the same epoch


def test_set_epoch_goes_to_the_beginning_of_another_epoch_only() -> None:
    loader: Any = ElasticDataLoader(Numbers(4), 2)
    ids(loader, 1)
    loader.set_epoch(0)
    assert ids(loader) == [[2, 3]]
    loader.set_epoch(3)
    assert (loader.epoch, loader.cursor.committed) == (3, (3, 0))
    assert len(ids(loader)) == 2


def test_the_beginning_of_an_epoch_is_committed_only_if_no_batch_is_open() -> None:
    loader = tracked(Numbers(4), 2)
    for _ in loader:
        break
    loader.set_epoch(1)
    assert loader.cursor.taken == (1, 0)
    assert loader.cursor.committed == (0, 0)


def test_without_anybody_who_tracks_the_loader_a_batch_is_used_up_once_it_is_taken() -> None:
    loader: Any = ElasticDataLoader(Numbers(4), 2)
    for _ in loader:
        break
    assert loader.cursor.committed == (0, 2)
    assert loader.cursor.open_ranges() == ()


def test_a_watcher_hears_of_each_batch_before_it_is_fetched_and_before_it_is_trained_on() -> None:
    heard: list[Any] = []

    class Heard(Watcher):
        def taking(self) -> None:
            heard.append("taking")

        def taken(self, deal: Deal) -> None:
            heard.append(deal.ids.tolist())

    loader: Any = ElasticDataLoader(Numbers(4), 2)
    loader.watcher = Heard()
    list(loader)
    assert heard == ["taking", [0, 1], "taking", [2, 3]]


# --- when the group changes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", WORKERS)
def test_a_rolled_back_batch_comes_again(num_workers: int) -> None:
    loader = tracked(Numbers(12), 3, num_workers=num_workers)
    seen = []
    for batch in loader:
        seen.append(batch.tolist())
        if len(seen) == 2:
            loader.cursor.rollback()
        else:
            loader.cursor.commit()
    assert seen == [[0, 1, 2], [3, 4, 5], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    loader.close()


@pytest.mark.parametrize("num_workers", WORKERS)
def test_the_last_batch_of_an_epoch_can_be_rolled_back(num_workers: int) -> None:
    loader = tracked(Numbers(4), 2, num_workers=num_workers)
    seen = []
    for batch in loader:
        seen.append(batch.tolist())
        if len(seen) == 2:
            loader.cursor.rollback()
        else:
            loader.cursor.commit()
    assert seen == [[0, 1], [2, 3], [2, 3]]
    loader.close()


@pytest.mark.parametrize("num_workers", WORKERS)
def test_batches_fetched_for_an_old_group_are_dropped(seats: Seats, num_workers: int) -> None:
    seat = Seat(0, 3)
    loader = seats.loader(seat, Numbers(24), global_batch_size=6, num_workers=num_workers)
    seen = []
    for batch in loader:
        seen.append(batch.tolist())
        if len(seen) == 2:  # the group breaks in the second step, and one worker is lost
            seat.group = Group(0, 2, 1)
            loader.cursor.rollback()
        else:
            loader.cursor.commit()
    assert seen == [[0, 1], [6, 7], [6, 7, 8], [12, 13, 14], [18, 19, 20]]
    loader.close()


@pytest.mark.parametrize("num_workers", WORKERS)
def test_stale_orders_are_not_loaded(seats: Seats, num_workers: int) -> None:
    seat = Seat(0, 2)
    loader = seats.loader(seat, Numbers(8), global_batch_size=4, num_workers=num_workers)
    fetching: Any = loader._torch_loader.dataset
    assert next(iter(loader._sampler), None) is None  # nothing is ordered before something is wanted
    ids(loader, 1)
    loader._newest += 1
    assert fetching[Ticket(0, [999])] == (0, None)
    loader.close()


@pytest.mark.parametrize("options", [{"global_batch_size": 6}, {"batch_size": 2}], ids=str)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("sizes", [(3, 2), (2, 3), (4, 1), (1, 4), (3, 3)])
def test_no_sample_is_lost_or_repeated_over_all_ranks(
    seats: Seats, options: dict[str, int], shuffle: bool, sizes: tuple[int, int]
) -> None:
    first, second = sizes
    visited: Counter[int] = Counter()
    places = set()
    for rank in range(first):
        loader = seats.loader(Seat(rank, first), Numbers(31), shuffle=shuffle, **options)
        visited.update(sample for batch in ids(loader, 2) for sample in batch)
        places.add(loader.cursor.committed)
    assert len(places) == 1
    for rank in range(second):
        loader = seats.loader(Seat(rank, second, 1), Numbers(31), shuffle=shuffle, **options)
        loader.cursor.go_to(next(iter(places)))
        for batch in loader:
            deal = loader.cursor.peek(generation=1, rank=rank, size=second, after=loader.cursor.committed)
            assert deal is not None
            visited.update([] if deal.idle else batch.tolist())
            loader.cursor.commit()
    assert visited == Counter(range(31))


def test_a_worker_without_a_share_computes_on_a_borrowed_sample_of_weight_zero(seats: Seats) -> None:
    deals: list[Deal] = []

    class Watcher(Silent):
        def taken(self, deal: Deal) -> None:
            deals.append(deal)

    with pytest.warns(UserWarning, match="smaller than the 3 workers"):
        loader = seats.loader(Seat(2, 3), Numbers(4), global_batch_size=2)
    loader.watcher = Watcher()
    assert ids(loader) == [[0], [2]]
    assert [deal.weight for deal in deals] == [0.0, 0.0]


# --- when loading fails ----------------------------------------------------------------------------------------------


class Fragile(Numbers):
    """Cannot load sample 5 while a shared flag is up."""

    def __init__(self, length: int = 12) -> None:
        super().__init__(length)
        self.broken = torch.ones(1)
        self.broken.share_memory_()

    def __getitem__(self, index: int) -> int:
        if index == 5 and self.broken.item():
            raise OSError("cannot read sample 5")
        return index


@pytest.mark.parametrize("num_workers", WORKERS)
def test_after_an_error_the_same_batch_is_fetched_again(num_workers: int) -> None:
    data = Fragile()
    loader: Any = ElasticDataLoader(data, 2, num_workers=num_workers)
    seen = ids(loader, 2)
    with pytest.raises(OSError, match="cannot read sample 5"):
        ids(loader)
    data.broken.zero_()
    assert seen + ids(loader) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    loader.close()


@pytest.mark.parametrize("num_workers", WORKERS)
def test_closing_in_the_middle_loses_nothing(num_workers: int) -> None:
    loader: Any = ElasticDataLoader(Numbers(12), 2, num_workers=num_workers)
    seen = ids(loader, 2)
    loader.close()
    assert seen + ids(loader) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    loader.close()


# --- wrong arguments -------------------------------------------------------------------------------------------------


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class Endless(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (Stream(), {"batch_size": 2}, "needs a map-style dataset.*Stream is none"),
        (Endless(), {"batch_size": 2}, "needs a map-style dataset.*Endless is none"),
        (Numbers(0), {"batch_size": 2}, "the dataset is empty"),
        (Numbers(), {}, "give either global_batch_size"),
        (Numbers(), {"batch_size": 2, "global_batch_size": 4}, "give either global_batch_size"),
        (Numbers(), {"batch_size": 0}, "batch_size is 0"),
        (Numbers(), {"global_batch_size": -4}, "global_batch_size is -4"),
        (Numbers(), {"global_batch_size": 2.5}, r"global_batch_size is 2\.5"),
        (Numbers(), {"batch_size": 2, "seed": -1}, "seed is -1"),
    ],
)
def test_a_wrong_argument_is_refused(dataset: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ElasticDataLoader(dataset, **options)


def test_an_argument_that_torch_refuses_is_refused() -> None:
    with pytest.raises(ValueError, match="prefetch_factor"):
        ElasticDataLoader(Numbers(), 2, prefetch_factor=3)
