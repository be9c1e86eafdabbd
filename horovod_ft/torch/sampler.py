"""``ElasticSampler``: Horovod's sampler for scripts written for it, dealt out anew on every change of the group.

New scripts should use ``ElasticDataLoader``: this one counts what a script says it has processed, and pads an epoch's
end with repeated samples so that all workers get equally many.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

import horovod.torch as hvd
import torch.utils.data

from horovod_ft.errors import ConfigurationError


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Each worker's share of the samples of an epoch that are not processed yet.

    Track it with a ``TorchState``, call ``record_batch`` after each batch, and ``set_epoch`` at the *end* of an epoch.

    Args:
        dataset: of known length.
        shuffle: in another order each epoch, the same on all workers.
        seed: of that order; equal on all workers.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        if not hasattr(dataset, "__len__"):
            raise ConfigurationError(f"ElasticSampler needs a dataset with a length; {type(dataset).__name__} has none")
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: nothing of it is processed."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Every worker has processed ``batch_size`` samples."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Deal what is not processed to the present group."""
        self.rank, self.num_replicas = hvd.rank(), hvd.size()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples: int = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        remaining = self.remaining_indices
        repeats = -(-self.total_size // max(len(remaining), 1))
        padded = (remaining * repeats)[: self.total_size]
        return iter(padded[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
