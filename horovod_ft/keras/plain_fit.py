"""A ``fit`` on an ``ElasticDataset`` without fault tolerance: the epochs of this worker, and the weights of its slices.

Keras fetches batches ahead and in an order of its own, so it is given the epochs by number, and the weight of a slice
is set when its batch is trained on.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import keras

from horovod_ft.data import Cursor, Deal
from horovod_ft.keras.optimizer import distributed_in


class FitEpochs(keras.utils.PyDataset):  # type: ignore[misc]  # Keras has no types
    """What Keras gets in place of the dataset, in one ``fit``: the batches of the epoch that it is in.

    Attributes:
        epoch: that Keras is in.
    """

    def __init__(self, dataset: Any) -> None:
        super().__init__()
        self.dataset = dataset
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset.fetch(self.deal(index).ids)

    def deal(self, index: int) -> Deal:
        """This worker's share of a global batch of the epoch."""
        deal: Deal | None = self.dataset.deal_of(self.epoch, index)
        if deal is None:
            raise IndexError(f"an epoch has {len(self)} batches; there is none with the number {index}")
        return deal


class SliceWeights(keras.callbacks.Callback):  # type: ignore[misc]
    """Tells the epochs where ``fit`` is, and the model's optimizer how much this worker's slice counts.

    Args:
        epochs: of this ``fit``.
        length: batches in a call of the training function, at most.
    """

    def __init__(self, epochs: FitEpochs, length: int) -> None:
        super().__init__()
        self._epochs = epochs
        self._length = length
        self._warned = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epochs.epoch = epoch
        self._epochs.dataset.begin_epoch(epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        weights = {deal.weight for deal in self._deals(batch)}
        one_for_all = len(weights) == 1 and set_weight(self.model, max(weights))
        if not one_for_all and weights != {1.0}:
            set_weight(self.model, 1.0)
            self._warn()

    def on_train_end(self, logs: Any = None) -> None:
        set_weight(self.model, 1.0)

    def _deals(self, begin: int) -> Iterator[Deal]:
        for index in range(begin, min(begin + self._length, len(self._epochs))):
            yield self._epochs.deal(index)

    def _warn(self) -> None:
        if self._warned:
            return
        self._warned = True
        if distributed_in(self.model.optimizer) is None:
            because = "the model's optimizer is not made by hvd.DistributedOptimizer"
        else:
            because = "with steps_per_execution there is one weight for several batches"
        warnings.warn(
            "the workers' slices of a global batch differ in size, and cannot be weighted in the average of gradients: "
            f"{because}. The samples of a smaller slice count for more. Use a global_batch_size that is a multiple of "
            "the number of workers, with drop_last=True, or a FaultToleranceCallback",
            stacklevel=2,
        )


def set_weight(model: Any, weight: float) -> bool:
    """Let a model's gradients count by this from now on. Returns False if its optimizer is not distributed."""
    distributed = distributed_in(model.optimizer)
    if distributed is not None:
        distributed.ft_reduction.reducer.set_weight(weight)
    return distributed is not None


def dataset_of(iterator: Any) -> Any:
    """The ``ElasticDataset`` that an epoch iterator of Keras has; None if it has something else."""
    dataset = getattr(iterator.data_adapter, "py_dataset", None)
    return dataset if isinstance(getattr(dataset, "cursor", None), Cursor) and hasattr(dataset, "deal_of") else None


def follow(iterator: Any, callbacks: Any) -> None:
    """A ``fit`` without fault tolerance begins. If it is on an ``ElasticDataset``, let it go by its epochs.

    Args:
        iterator: of the ``fit``.
        callbacks: the list of its callbacks, which gets one more.
    """
    if callbacks.model is not None:
        set_weight(callbacks.model, 1.0)  # a fit before this one may have ended by an error
    dataset = None if iterator is None else dataset_of(iterator)
    if dataset is None:
        return
    epochs = FitEpochs(dataset)
    iterator.data_adapter.py_dataset = epochs
    iterator.data_adapter.shuffle = False  # else each worker has the batches in an order of its own
    iterator._num_batches = len(epochs)
    weights = SliceWeights(epochs, iterator.steps_per_execution)
    weights.set_params(callbacks.params)
    weights.set_model(callbacks.model)
    callbacks.callbacks.append(weights)
