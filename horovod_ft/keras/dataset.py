"""``ElasticDataset``: batches for Keras from a stream of samples that any group can take over in the middle.

Where the stream is stands in ``data.Cursor``; this file only says which samples are fetched, and when.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from horovod_ft.data import (
    BatchSize,
    Cursor,
    Deal,
    EpochOrder,
    Ids,
    Place,
    Untracked,
    Watcher,
    batches_of_an_epoch,
    shares,
    warn_about_idle_workers,
)
from horovod_ft.errors import ConfigurationError
from horovod_ft.keras import fit_hooks
from horovod_ft.keras.ahead import Ahead, Fetch
from horovod_ft.keras.runtime import current
from horovod_ft.keras.samples import Batch, as_tensors, samples_of


class ElasticDataset(keras.utils.PyDataset):  # type: ignore[misc]  # Keras has no types
    """Batches of this worker, at whatever size the group has, for ``fit``, ``evaluate`` and ``predict``.

    In ``fit`` every sample of an epoch is dealt exactly once over all workers. With ``global_batch_size`` a global
    batch has that size whatever the number of workers; slices differ by at most one sample and are weighted in the
    reduction, so that an update does not depend on the number of workers, for a loss that is a mean over samples. A
    group larger than a batch leaves some workers without a share: they compute on a borrowed sample whose gradient gets
    weight zero. With ``batch_size`` each worker has batches of that size.

    In ``evaluate`` and ``predict`` each worker has one contiguous part of the samples, in their own order, every sample
    on one worker: the predictions of all workers one after the other, by rank, are those of the whole. ``evaluate``
    returns this worker's own numbers; those of ``validation_data`` are of all workers in a ``fit`` with a
    ``FaultToleranceCallback``, and with ``MetricAverageCallback`` their mean.

    Args:
        x: arrays, tensors, or a structure of them, of equal length; or a ``tf.data.Dataset`` of single samples, as many
            as it says, in a fixed order; or a function that takes an int64 array of sample ids, shape ``(n,)``, and
            returns the batch of these samples. A ``tf.data.Dataset`` is read once, when this object is made, and **all
            its samples are kept as arrays in the host memory of each worker**: if that is too much, use a function. A
            function is called in another thread, one call at a time.
        y, sample_weight: arrays of targets and of weights, with arrays only.
        global_batch_size, batch_size: in samples; exactly one of them.
        shuffle: in another order each epoch; ``seed`` must then be equal on all workers. ``fit(shuffle=...)`` has no
            meaning.
        drop_last: in ``fit``, leave out a last global batch that is not full.
        length: how many samples a function has.
        prefetch: so many batches are fetched ahead, in one thread.

    Attributes:
        cursor: where training is.
        watcher: hears of each batch that ``next_batch`` gives, and commits the cursor.

    Raises:
        ConfigurationError: an argument is wrong, or samples cannot be dealt.
        UsageError: before ``hvd.init()``.
    """

    def __init__(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        global_batch_size: int | None = None,
        batch_size: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        length: int | None = None,
        prefetch: int = 2,
    ) -> None:
        super().__init__()
        if prefetch < 0:
            raise ConfigurationError(f"prefetch is {prefetch}; it must not be negative")
        batch = BatchSize(global_batch_size, batch_size)
        self._group = current().group
        self._samples = samples_of(x, y, sample_weight, length)
        order = EpochOrder(self._samples.length, shuffle=shuffle, seed=seed)
        self.cursor = Cursor(order, batch, drop_last=drop_last)
        self.watcher: Watcher = Untracked(self.cursor)
        self._ahead = Ahead(prefetch)
        fit_hooks.install()
        warn_about_idle_workers(batch, self._group().size)

    # --- what a training loop uses -----------------------------------------------------------------------------------

    def next_batch(self) -> Batch:
        """Inputs, targets and weights of samples, as far as there are any: this worker's part of the next global batch.

        It is for the present group. Blocks until it is fetched.

        Raises:
            StopIteration: the epoch is at its end.
        """
        return self._next(self.fetch)

    def next_tensors(self) -> Batch:
        """As ``next_batch``, but tensors, as a training step takes them. They are made where the batch is fetched."""
        return self._next(self._fetch_tensors)

    def _next(self, fetch: Fetch) -> Batch:
        deal = self._deal()
        if deal is None:
            raise StopIteration
        self.watcher.taking()
        batch: Batch = self._ahead.batch(deal, lambda one: self._deal(Place(one.epoch, one.stop)), fetch)
        self.cursor.take(deal)
        self.watcher.taken(deal)
        return batch

    def begin_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch."""
        self.cursor.begin_epoch(epoch)

    def resume(self) -> None:
        """Training goes on, maybe elsewhere: what was fetched ahead is dropped."""
        self._ahead.drop()

    def __len__(self) -> int:
        """Batches of a whole epoch of ``fit``; under ``batch_size``, at the present number of workers."""
        return batches_of_an_epoch(self.cursor, self._group().size)

    def deal_of(self, epoch: int, index: int) -> Deal | None:
        """This worker's share of a global batch, by its number in an epoch; None if the epoch has no such batch."""
        return self._deal(Place(epoch, index * self.cursor.batch.of(self._group().size)))

    def fetch(self, ids: Ids) -> Batch:
        """The batch of some samples, fetched in the thread that asks."""
        return self._samples(ids)

    def _fetch_tensors(self, ids: Ids) -> Batch:
        return as_tensors(self._samples(ids))

    def _deal(self, after: Place | None = None) -> Deal | None:
        group = self._group()
        return self.cursor.peek(generation=group.generation, rank=group.rank, size=group.size, after=after)

    # --- what Keras uses in ``evaluate`` and ``predict`` -------------------------------------------------------------

    @property
    def num_batches(self) -> int:
        """Batches of this worker outside of training: those of ``fit``, or fewer if it has fewer samples."""
        start, stop = self._part()
        return min(len(self), stop - start)

    def __getitem__(self, index: int) -> Batch:
        start, stop = self._part()
        first, last = list(shares(stop - start, self.num_batches))[index]
        return self._samples(np.arange(start + first, start + last, dtype=np.int64))

    def _part(self) -> tuple[int, int]:
        """This worker's samples outside of training.

        Raises:
            ConfigurationError: it has none.
        """
        group, length = self._group(), self.cursor.order.length
        if length < group.size:
            raise ConfigurationError(f"the dataset has {length} samples for {group.size} workers")
        return list(shares(length, group.size))[group.rank]
