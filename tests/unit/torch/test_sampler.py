"""``ElasticSampler`` deals as Horovod's does, and anew on every change of the group."""

from __future__ import annotations

from typing import Any

import horovod.torch
import horovod.torch.elastic.sampler as stock
import pytest
from torch.utils.data import DataLoader

from horovod_ft.errors import ConfigurationError
from horovod_ft.torch.sampler import ElasticSampler


class Place:
    """Rank and size, for Horovod's sampler and ours."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rank, self.size = 0, 1
        for module in (horovod.torch, stock):
            monkeypatch.setattr(module, "rank", lambda: self.rank)
            monkeypatch.setattr(module, "size", lambda: self.size)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(monkeypatch)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("shuffle", [False, True])
def test_deals_what_horovods_sampler_deals(place: Place, size: int, shuffle: bool) -> None:
    place.size = size
    for place.rank in range(size):
        ours, theirs = ElasticSampler(range(20), shuffle, 3), stock.ElasticSampler(range(20), shuffle, 3)
        for one in (ours, theirs):
            one.set_epoch(2)
            one.record_batch(0, 2)
            one.reset()
        assert (list(ours), len(ours)) == (list(theirs), len(theirs))


def test_everything_is_dealt_once_or_padded(place: Place) -> None:
    place.size = 3
    dealt = []
    for place.rank in range(3):
        dealt += list(ElasticSampler(range(10), shuffle=False))
    assert sorted(dealt) == sorted([*range(10), 0, 1])


def test_what_was_processed_is_not_dealt_to_the_next_group(place: Place) -> None:
    place.size = 2
    sampler = ElasticSampler(range(12), shuffle=False)
    sampler.record_batch(0, 2)
    place.size = 3
    sampler.reset()
    assert sampler.remaining_indices == list(range(4, 12))
    assert list(sampler) == [4, 7, 10]


def test_a_group_larger_than_the_rest_repeats_samples(place: Place) -> None:
    place.size, place.rank = 5, 4
    sampler = ElasticSampler(range(4), shuffle=False)
    sampler.processed_num = 2
    sampler.reset()
    assert list(sampler) == [2]


def test_a_processed_epoch_is_empty(place: Place) -> None:
    sampler = ElasticSampler(range(4))
    sampler.record_batch(0, 4)
    sampler.reset()
    assert list(sampler) == []
    assert len(sampler) == 0


def test_a_new_epoch_has_nothing_processed_and_another_order(place: Place) -> None:
    sampler = ElasticSampler(range(50))
    first = list(sampler)
    sampler.record_batch(0, 10)
    sampler.set_epoch(1)
    assert sorted(sampler) == sorted(first)
    assert list(sampler) != first


def test_its_state_carries_epoch_and_progress(place: Place) -> None:
    sampler, other = ElasticSampler(range(10)), ElasticSampler(range(10))
    sampler.set_epoch(3)
    sampler.record_batch(0, 4)
    other.load_state_dict(sampler.state_dict())
    sampler.reset()
    assert (other.epoch, list(other)) == (3, list(sampler))


def test_works_in_torchs_loader(place: Place) -> None:
    data: Any = list(range(6))
    place.size = 2
    loader = DataLoader(data, batch_size=2, sampler=ElasticSampler(data, shuffle=False))
    assert [batch.tolist() for batch in loader] == [[0, 2], [4]]


def test_a_dataset_without_a_length_is_refused(place: Place) -> None:
    with pytest.raises(ConfigurationError, match="needs a dataset with a length"):
        ElasticSampler(iter([1]))  # type: ignore[arg-type]
