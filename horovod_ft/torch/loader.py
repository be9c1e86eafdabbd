"""``ElasticDataLoader``: torch's DataLoader over a stream of samples that any group can take over in the middle.

Where the stream is stands in ``data.Cursor``; this file only fetches. What was fetched ahead for a group that is no
more is dropped, and its worker processes stay: they skip what is stale without loading it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from horovod_ft.data import (
    BatchSize,
    Cursor,
    Deal,
    EpochOrder,
    Place,
    Untracked,
    Watcher,
    batches_of_an_epoch,
    warn_about_idle_workers,
)
from horovod_ft.errors import ConfigurationError
from horovod_ft.membership.base import Group
from horovod_ft.torch.runtime import current

Batch_co = TypeVar("Batch_co", covariant=True)


class Ticket(NamedTuple):
    """An order to a worker process: load these samples, unless the stream has moved on."""

    stream: int
    ids: list[int]


class _Fetching(Dataset[tuple[int, Any]]):
    """A dataset of whole batches; runs in the worker processes."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], newest: torch.Tensor) -> None:
        self._dataset = dataset
        self._collate = collate
        self._newest = newest

    def __getitem__(self, ticket: Ticket) -> tuple[int, Any]:
        if ticket.stream != int(self._newest.item()):
            return ticket.stream, None
        if hasattr(self._dataset, "__getitems__"):
            samples = self._dataset.__getitems__(ticket.ids)
        else:
            samples = [self._dataset[index] for index in ticket.ids]
        return ticket.stream, self._collate(samples)


def _as_it_is(fetched: Any) -> Any:
    return fetched


class ElasticDataLoader(Generic[Batch_co]):
    """Batches of this worker, at whatever size the group has.

    Every sample of an epoch is dealt exactly once over all workers. With ``global_batch_size`` a global batch has that
    size whatever the number of workers; slices differ by at most one sample and are weighted in the reduction, so that
    an update does not depend on the number of workers. A group larger than a batch leaves some workers without a share:
    they compute on a borrowed sample whose gradient gets weight zero. With ``batch_size`` each worker has batches of
    that size, as in torch.

    Args:
        dataset: map-style, with a length. A dataset's ``__getitems__`` is used if there is one.
        global_batch_size, batch_size: in samples; exactly one of them.
        shuffle: in another order each epoch; ``seed`` must then be equal on all workers.
        drop_last: leave out a last global batch that is not full.
        num_workers, collate_fn, pin_memory, timeout, worker_init_fn, multiprocessing_context, prefetch_factor,
            persistent_workers: as in ``torch.utils.data.DataLoader``.

    Raises:
        ConfigurationError: no length, a batch size below 1, or both kinds of batch size.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        shuffle: bool = False,
        *,
        global_batch_size: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ConfigurationError(
                f"ElasticDataLoader needs a map-style dataset with __len__ and __getitem__; {type(dataset).__name__} "
                "is none. Without a length and random access, samples cannot be dealt out again when a worker is lost"
            )
        order = EpochOrder(len(dataset), shuffle=shuffle, seed=seed)
        batch = BatchSize(global_batch_size, batch_size)
        self.dataset = dataset
        self.cursor = Cursor(order, batch, drop_last=drop_last)
        self.watcher: Watcher = Untracked(self.cursor)
        self._group: Callable[[], Group] = current().group
        self._persistent = persistent_workers
        self._newest = torch.zeros(1, dtype=torch.int64)
        self._newest.share_memory_()
        self._sampler = _Ahead(self.cursor, self._group)
        self._torch_loader: DataLoader[Any] = DataLoader(
            _Fetching(dataset, collate_fn or default_collate, self._newest),
            batch_size=None,
            sampler=self._sampler,
            num_workers=num_workers,
            collate_fn=_as_it_is,
            pin_memory=pin_memory,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
            persistent_workers=num_workers > 0,
            generator=torch.Generator().manual_seed(seed),  # the training's own random stream is not touched
        )
        self._iterator: Iterator[tuple[int, Any]] | None = None
        self._counting: object | None = None
        self._resumed = False
        warn_about_idle_workers(batch, self._group().size)

    # --- what a training loop uses ---------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch_co]:
        """The rest of the present epoch. A loop that runs again after its epoch's end begins the next one."""
        if self.cursor.exhausted(self._group().size) and not (self._counting or self._resumed):
            self.cursor.begin_epoch(self.cursor.epoch + 1)
        self._resumed = False
        epoch = self.cursor.epoch
        while self.cursor.epoch == epoch:
            deal = self._next_deal()
            if deal is None:
                break
            self.watcher.taking()
            batch = self._fetch(deal)
            self.cursor.take(deal)
            self.watcher.taken(deal)
            yield batch
        if not self._persistent:
            self.close()

    def epochs(self, stop: int) -> Iterator[int]:
        """Count epochs from where training is to ``stop``, exclusive. An epoch counts once its loop body is through.

        After a restart of the training function the epoch that was interrupted comes again, with the batches that are
        left of it, even if there are none: so what a script does at the end of an epoch is done at least once.
        """
        me = self._counting = object()
        try:
            while self.cursor.epoch < stop:
                epoch = self.cursor.epoch
                yield epoch
                if self.cursor.epoch == epoch:
                    self.cursor.begin_epoch(epoch + 1)
        finally:
            if self._counting is me:  # else the training function was entered again, and its new loop counts
                self._counting = None

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, unless training is in it already."""
        if epoch != self.cursor.epoch:
            self.cursor.begin_epoch(epoch)

    @property
    def epoch(self) -> int:
        return self.cursor.epoch

    def __len__(self) -> int:
        """Batches of a whole epoch; under ``batch_size``, at the present number of workers."""
        return batches_of_an_epoch(self.cursor, self._group().size)

    def close(self) -> None:
        """Stop the worker processes, if any. They come back when the loader is used again."""
        self._sampler.lose()  # with what they have fetched ahead
        self._iterator = None
        self._torch_loader._iterator = None

    def resume(self) -> None:
        """The training function runs again: the next loop is over what is left, even if that is nothing."""
        self._resumed = True

    # --- fetching --------------------------------------------------------------------------------------------------

    def _next_deal(self) -> Deal | None:
        group = self._group()
        return self.cursor.peek(generation=group.generation, rank=group.rank, size=group.size)

    def _fetch(self, deal: Deal) -> Any:
        if not self._sampler.promises(deal):
            self._newest += 1
            self._sampler.restart(Place(deal.epoch, deal.start), int(self._newest.item()))
        while True:
            try:
                stream, batch = self._next_fetched()
            except BaseException:
                self._sampler.lose()  # which batch that would have been is not known
                raise
            if stream == self._sampler.stream:
                self._sampler.arrived()
                return batch

    def _next_fetched(self) -> tuple[int, Any]:
        if self._iterator is None:
            self._iterator = iter(self._torch_loader)
        try:
            fetched = next(self._iterator)
        except StopIteration:  # it had come to the epoch's end, and the stream has been set back since
            self._iterator = iter(self._torch_loader)
            fetched = next(self._iterator)
        return fetched


class _Ahead:
    """The sampler behind torch's DataLoader: tickets for the batches to come, from wherever the stream stands.

    It ends at the end of an epoch and can go on after that.
    """

    def __init__(self, cursor: Cursor, group: Callable[[], Group]) -> None:
        self.stream = 0
        self._cursor = cursor
        self._group = group
        self._next: Place | None = None
        self._promised: deque[Deal] = deque()

    def promises(self, deal: Deal) -> bool:
        """Whether the next batch to arrive is this one."""
        if self._promised:
            return self._promised[0].same_batch(deal)
        return self._next == Place(deal.epoch, deal.start)

    def restart(self, place: Place, stream: int) -> None:
        self.stream = stream
        self._next = place
        self._promised.clear()

    def lose(self) -> None:
        """What was ordered does not count any more."""
        self._next = None
        self._promised.clear()

    def arrived(self) -> None:
        self._promised.popleft()

    def __iter__(self) -> Iterator[Ticket]:
        return self

    def __next__(self) -> Ticket:
        group = self._group()
        deal = self._next and self._cursor.peek(
            generation=group.generation, rank=group.rank, size=group.size, after=self._next
        )
        if deal is None:
            raise StopIteration
        self._next = Place(deal.epoch, deal.stop)
        self._promised.append(deal)
        return Ticket(self.stream, deal.ids.tolist())
