"""A dataset for ``fit`` that deals arrays by a cursor: as little as it takes."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np

from horovod_ft.data import BatchSize, Cursor, EpochOrder
from horovod_ft.keras.runtime import current


class Dealt(keras.utils.PyDataset):  # type: ignore[misc]  # Keras has no types
    """Rows of arrays, dealt to the workers of the present group."""

    def __init__(self, *arrays: Any, batch: BatchSize, seed: int = 5) -> None:
        super().__init__()
        self.cursor = Cursor(EpochOrder(len(arrays[0]), shuffle=True, seed=seed), batch)
        self.watcher: Any = None
        self._arrays = arrays

    def __len__(self) -> int:
        return math.ceil(self.cursor.order.length / self.cursor.batch.of(current().group().size))

    def __getitem__(self, index: int) -> Any:
        return tuple(array[:1] for array in self._arrays)

    def begin_epoch(self, epoch: int) -> None:
        self.cursor.begin_epoch(epoch)

    def resume(self) -> None:
        """Nothing is fetched ahead."""

    def next_batch(self) -> tuple[Any, ...]:
        group = current().group()
        deal = self.cursor.peek(generation=group.generation, rank=group.rank, size=group.size)
        if deal is None:
            raise StopIteration
        self.watcher.taking()
        batch = tuple(np.ascontiguousarray(array[deal.ids]) for array in self._arrays)
        self.cursor.take(deal)
        self.watcher.taken(deal)
        return batch
