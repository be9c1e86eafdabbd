"""``ElasticDataset``: every sample once, for whatever group, however often it changes; in fit, evaluate and predict."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import horovod_ft.keras as hvd
from horovod_ft.data import Deal, EpochOrder, Watcher
from horovod_ft.errors import ConfigurationError
from horovod_ft.keras import dataset as module
from horovod_ft.keras.dataset import ElasticDataset
from horovod_ft.keras.samples import as_tensors
from horovod_ft.membership.base import Group

NUMBERS = np.arange(20)


class Silent:
    """Tracks a dataset and commits nothing."""

    def taking(self) -> None:
        """Nothing to do."""

    def taken(self, deal: Deal) -> None:
        """Nothing to do."""


class Seats:
    """Makes datasets of the workers of one group, and moves them to the next group."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.groups: list[Group] = []

    def dataset(self, x: Any = NUMBERS, y: Any = None, *, rank: int = 0, size: int = 1, **options: Any) -> Any:
        seat = len(self.groups)
        self.groups.append(Group(rank, size, 0))
        runtime = SimpleNamespace(group=lambda: self.groups[seat])
        self._patch.setattr(module, "current", lambda: runtime)
        if "batch_size" not in options:
            options.setdefault("global_batch_size", 6)
        return ElasticDataset(x, y, **options)

    def group(self, size: int, x: Any = NUMBERS, **options: Any) -> list[Any]:
        return [self.dataset(x, rank=rank, size=size, **options) for rank in range(size)]


@pytest.fixture
def seats(monkeypatch: pytest.MonkeyPatch) -> Seats:
    return Seats(monkeypatch)


def ids(dataset: Any, limit: int | None = None) -> list[list[int]]:
    """The batches of the rest of the epoch, each committed, or the next ``limit`` of them."""
    seen: list[list[int]] = []
    while len(seen) != limit:
        try:
            seen.append(dataset.next_batch()[0].tolist())
        except StopIteration:
            break
        dataset.cursor.commit()
    return seen


def by_keras(dataset: Any) -> list[int]:
    """What Keras gets outside of training."""
    return [sample for index in range(dataset.num_batches) for sample in dataset[index][0].tolist()]


# --- one worker ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_the_order_is_that_of_the_epoch(seats: Seats, shuffle: bool, prefetch: int) -> None:
    dataset = seats.dataset(shuffle=shuffle, seed=3, prefetch=prefetch)
    order = EpochOrder(20, shuffle=shuffle, seed=3)
    for epoch in range(2):
        dataset.begin_epoch(epoch)
        assert ids(dataset) == [order(epoch)[at : at + 6].tolist() for at in range(0, 20, 6)]


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [6, 6, 6, 2]), (True, [6, 6, 6])])
def test_the_tail_is_kept_unless_it_is_dropped(seats: Seats, drop_last: bool, sizes: list[int]) -> None:
    dataset = seats.dataset(drop_last=drop_last)
    assert [len(batch) for batch in ids(dataset)] == sizes
    assert len(dataset) == len(sizes)


def test_a_batch_size_can_be_that_of_a_worker(seats: Seats) -> None:
    dataset = seats.dataset(rank=1, size=2, batch_size=3)
    assert ids(dataset, 2) == [[3, 4, 5], [9, 10, 11]]
    assert len(dataset) == 4


def test_an_epoch_is_at_its_end_until_another_one_begins(seats: Seats) -> None:
    dataset = seats.dataset()
    assert (len(ids(dataset)), len(ids(dataset))) == (4, 0)
    dataset.begin_epoch(1)
    assert len(ids(dataset)) == 4


def test_training_that_goes_on_has_what_is_left(seats: Seats) -> None:
    dataset = seats.dataset()
    ids(dataset, 3)
    dataset.resume()
    assert ids(dataset) == [[18, 19]]


def test_without_anybody_who_tracks_the_dataset_a_batch_is_used_up_once_it_is_taken(seats: Seats) -> None:
    dataset = seats.dataset()
    dataset.next_batch()
    assert dataset.cursor.committed == (0, 6)


def test_a_watcher_hears_of_each_batch_before_it_is_fetched_and_before_it_is_trained_on(seats: Seats) -> None:
    heard: list[Any] = []

    class Heard(Watcher):
        def taking(self) -> None:
            heard.append("taking")

        def taken(self, deal: Deal) -> None:
            heard.append(deal.ids.tolist())

    dataset = seats.dataset(np.arange(4), global_batch_size=2)
    dataset.watcher = Heard()
    ids(dataset)
    assert heard == ["taking", [0, 1], "taking", [2, 3]]


# --- where samples come from -----------------------------------------------------------------------------------------


def test_targets_and_weights_go_with_the_inputs(seats: Seats) -> None:
    x, y, weight = np.arange(4), np.arange(4) * 10, np.arange(4) / 10
    dataset = seats.dataset(x, y, sample_weight=weight, global_batch_size=4)
    assert [part.tolist() for part in dataset.next_batch()] == [x.tolist(), y.tolist(), weight.tolist()]


def test_inputs_and_targets_may_be_structures(seats: Seats) -> None:
    x = {"a": tf.range(4), "b": [np.arange(4), np.eye(4)]}
    dataset = seats.dataset(x, (np.arange(4), np.arange(4)), global_batch_size=3)
    inputs, targets = dataset.next_batch()
    assert inputs["a"].tolist() == [0, 1, 2]
    assert [part.shape for part in inputs["b"]] == [(3,), (3, 4)]
    assert [part.tolist() for part in targets] == [[0, 1, 2]] * 2


def test_a_dataset_of_tensorflow_is_read_and_dealt(seats: Seats) -> None:
    pairs = tf.data.Dataset.from_tensor_slices((NUMBERS, NUMBERS * 10)).map(lambda x, y: (x + 1, y))
    dataset = seats.dataset(pairs, rank=1, size=2)
    assert [part.tolist() for part in dataset.next_batch()] == [[4, 5, 6], [30, 40, 50]]


def test_a_dataset_of_tensorflow_may_have_inputs_alone(seats: Seats) -> None:
    dataset = seats.dataset(tf.data.Dataset.range(4).batch(2).unbatch().take(3).cache().apply(_of_length(3)))
    assert ids(dataset) == [[0, 1, 2]]


def _of_length(length: int) -> Callable[[Any], Any]:
    function: Callable[[Any], Any] = tf.data.experimental.assert_cardinality(length)
    return function


def test_samples_may_be_texts(seats: Seats) -> None:
    dataset = seats.dataset(tf.data.Dataset.from_tensor_slices(["a", "bc", "d"]))
    assert dataset.next_batch()[0].tolist() == [b"a", b"bc", b"d"]


def test_a_function_computes_samples_from_their_ids(seats: Seats) -> None:
    dataset = seats.dataset(lambda asked: (asked * 2, asked * 3), length=5, global_batch_size=3)
    assert [part.tolist() for part in dataset.next_batch()] == [[0, 2, 4], [0, 3, 6]]
    assert [part.tolist() for part in dataset.next_batch()] == [[6, 8], [9, 12]]


def test_an_error_of_a_function_is_that_of_its_batch_which_can_be_had_again(seats: Seats) -> None:
    fails = [True]

    def function(asked: Any) -> Any:
        if asked[0] == 6 and fails.pop():
            raise OSError("the disk is gone")
        return asked

    dataset = seats.dataset(function, length=12)
    fails.insert(0, False)
    assert ids(dataset, 1) == [[0, 1, 2, 3, 4, 5]]
    with pytest.raises(OSError, match="disk"):
        dataset.next_batch()
    assert ids(dataset) == [[6, 7, 8, 9, 10, 11]]


def test_a_batch_becomes_tensors_and_what_is_left_out_stays_so() -> None:
    x, y, weights = as_tensors(({"a": np.ones((2, 3), np.float32), "b": [1, 2]}, np.array([1, 2]), None))
    assert (x["a"].dtype.name, x["a"].shape.as_list(), y.numpy().tolist()) == ("float32", [2, 3], [1, 2])
    assert weights is None


def test_tensors_are_made_in_the_thread_that_fetches(seats: Seats) -> None:
    made: list[tuple[int, str]] = []

    def spy(batch: Any) -> Any:
        made.append((int(batch[0][0]), threading.current_thread().name))
        return as_tensors(batch)

    dataset = seats.dataset(np.arange(12), np.arange(12) * 10, global_batch_size=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "as_tensors", spy)
        for first in (0, 2):
            inputs, targets = dataset.next_tensors()
            assert tf.is_tensor(inputs)
            assert tf.is_tensor(targets)
            assert inputs.numpy().tolist() == [first, first + 1]
            assert targets.numpy().tolist() == [first * 10, first * 10 + 10]
    assert made[:2] == [(0, made[0][1]), (2, made[0][1])]
    assert threading.current_thread().name != made[0][1]


def test_tensors_that_were_fetched_ahead_are_not_given_to_who_asks_for_arrays(seats: Seats) -> None:
    dataset = seats.dataset(np.arange(12), global_batch_size=2)
    kinds = [tf.is_tensor(ask()[0]) for ask in (dataset.next_tensors, dataset.next_batch, dataset.next_tensors)]
    assert kinds == [True, False, True]
    assert ids(dataset) == [[6, 7], [8, 9], [10, 11]]


# --- when the group changes ------------------------------------------------------------------------------------------


def test_a_rolled_back_batch_comes_again(seats: Seats) -> None:
    dataset = seats.dataset(np.arange(9), global_batch_size=3)
    dataset.watcher = Silent()
    ids(dataset, 1)
    for _ in range(2):
        assert dataset.next_batch()[0].tolist() == [3, 4, 5]
        dataset.cursor.rollback()
    assert ids(dataset) == [[3, 4, 5], [6, 7, 8]]


def test_batches_fetched_for_an_old_group_are_dropped(seats: Seats) -> None:
    dataset = seats.dataset(np.arange(24), size=3)
    dataset.watcher = Silent()
    assert ids(dataset, 1) == [[0, 1]]
    dataset.next_batch()
    seats.groups[0] = Group(0, 2, 1)  # the group breaks in the second step, and one worker is lost
    dataset.cursor.rollback()
    assert ids(dataset) == [[6, 7, 8], [12, 13, 14], [18, 19, 20]]


def test_batches_are_fetched_ahead_in_one_other_thread_but_not_beyond_the_depth(seats: Seats) -> None:
    fetched: list[tuple[int, str]] = []
    third = threading.Event()

    def function(asked: Any) -> Any:
        fetched.append((int(asked[0]), threading.current_thread().name))
        if asked[0] == 4:
            third.set()
        return asked

    dataset = seats.dataset(function, length=12, global_batch_size=2)
    dataset.next_batch()
    assert third.wait(10.0)
    dataset.resume()
    assert [first for first, _ in fetched] == [0, 2, 4]
    assert threading.current_thread().name not in {name for _, name in fetched}
    assert len({name for _, name in fetched}) == 1


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("sizes", [(1, 4), (4, 3, 2), (2, 3, 1), (3, 3)])
def test_no_sample_is_lost_or_repeated_over_all_ranks(seats: Seats, sizes: tuple[int, ...], shuffle: bool) -> None:
    """Each group trains on two batches and breaks in a third one, which the next group has to compute anew."""
    x = np.arange(40)
    seen: Counter[int] = Counter()
    workers = seats.group(max(sizes), x, shuffle=shuffle)
    for worker in workers:
        worker.watcher = Silent()
    for generation, size in enumerate(sizes):
        last = generation == len(sizes) - 1
        for rank in range(size):
            seats.groups[rank] = Group(rank, size, generation)
            seen.update(sample for batch in ids(workers[rank], None if last else 2) for sample in batch)
            if not last:
                workers[rank].next_batch()
                workers[rank].cursor.rollback()
        for worker in workers:  # those that come back have the group's cursor
            worker.cursor.go_to(workers[0].cursor.committed)
    assert seen == Counter(range(40))


def test_a_worker_without_a_share_computes_on_a_borrowed_sample_of_weight_zero(seats: Seats) -> None:
    deals: list[Deal] = []

    class Noted(Silent):
        def taken(self, deal: Deal) -> None:
            deals.append(deal)

    with pytest.warns(UserWarning, match="smaller than the 3 workers"):
        dataset = seats.dataset(np.arange(4), rank=2, size=3, global_batch_size=2)
    dataset.watcher = Noted()
    assert ids(dataset) == [[0], [2]]
    assert [deal.weight for deal in deals] == [0.0, 0.0]


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        ((np.arange(3), np.arange(4)), {}, r"different lengths: \[3, 4\]"),
        (np.arange(3), {"y": np.arange(4)}, "different lengths"),
        (np.arange(0), {}, "empty"),
        (iter([1, 2]), {}, "generator"),
        (iter([1, 2]), {"length": 2}, "generator"),
        (np.arange(3), {"length": 3}, "length"),
        (np.arange(3), {"sample_weight": np.arange(3)}, "with y only"),
        (lambda asked: asked, {}, "length"),
        (lambda asked: asked, {"length": 0}, "empty"),
        (lambda asked: asked, {"length": 3, "y": np.arange(3)}, "arrays only"),
        (np.arange(3), {"global_batch_size": 2, "batch_size": 2}, "not both"),
        (np.arange(3), {"global_batch_size": None}, "either"),
        (np.arange(3), {"prefetch": -1}, "prefetch"),
        (np.arange(3), {"seed": -1}, "seed"),
    ],
)
def test_a_wrong_argument_is_refused(seats: Seats, x: Any, options: dict[str, Any], message: str) -> None:
    options = {"global_batch_size": 2, **options}
    with pytest.raises(ConfigurationError, match=message):
        seats.dataset(x, **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda one: one.repeat(), "infinite"),
        (lambda one: one.filter(lambda x: x > 3), "unknown"),
        (lambda one: one.batch(2), "are batches"),
        (lambda one: one.batch(2, num_parallel_calls=2).map(lambda x: x + 1).prefetch(1), "are batches"),
        (lambda one: one.shuffle(9).map(lambda x: x + 1), "shuffle=True to ElasticDataset"),
        (lambda one: one.take(0), "empty"),
        (lambda one: tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1], [1, 2]])), "one shape"),
        (lambda one: one.map(tf.range), "one shape"),
    ],
)
def test_a_dataset_of_tensorflow_that_cannot_be_dealt_is_refused(seats: Seats, make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        seats.dataset(make(tf.data.Dataset.range(6)))


# --- what Keras does with it -----------------------------------------------------------------------------------------


def compiled(optimizer: Any = None, *, scale: float = 1.0, **options: Any) -> Any:
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer=keras.initializers.Constant(scale))
    model = keras.Sequential([keras.Input((1,)), layer])
    model.compile(optimizer or hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)), loss="mse", **options)
    return model


def column(length: int = 20) -> Any:
    return np.arange(length, dtype=np.float32).reshape(-1, 1)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_outside_of_training_the_workers_have_the_samples_in_their_order(seats: Seats, size: int) -> None:
    parts = [by_keras(one) for one in seats.group(size, shuffle=True, global_batch_size=8)]
    assert [sample for part in parts for sample in part] == NUMBERS.tolist()
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_outside_of_training_no_batch_is_empty(seats: Seats) -> None:
    with pytest.warns(UserWarning, match="smaller than the 4 workers"):
        workers = seats.group(4, np.arange(10), global_batch_size=2)
    assert [[len(one[index][0]) for index in range(one.num_batches)] for one in workers] == [
        [1, 1, 1],
        [1, 1, 1],
        [1, 1],
        [1, 1],
    ]


def test_more_workers_than_samples_are_refused_outside_of_training(seats: Seats) -> None:
    with pytest.warns(UserWarning, match="smaller"):
        dataset = seats.dataset(np.arange(2), size=3, global_batch_size=2)
    with pytest.raises(ConfigurationError, match="2 samples for 3 workers"):
        dataset[0]


@pytest.mark.parametrize("size", [1, 3])
def test_the_predictions_of_all_workers_are_those_of_the_whole(seats: Seats, size: int) -> None:
    model = compiled(scale=2.0)
    parts = [model.predict(one, verbose=0) for one in seats.group(size, column(), shuffle=True)]
    assert np.concatenate(parts).tolist() == (2.0 * column()).tolist()


def test_evaluation_is_of_this_workers_samples(seats: Seats) -> None:
    dataset = seats.dataset(column(), column() + 3.0, rank=1, size=3, shuffle=True)
    assert compiled().evaluate(dataset, verbose=0) == pytest.approx(9.0)


def fitted(model: Any, dataset: Any, epochs: int = 1, **options: Any) -> list[tuple[int, float]]:
    """What the model was trained on in ``fit``: the sum of each batch, and the weight of its gradients."""
    seen: list[tuple[int, float]] = []

    def noted(total: Any, weight: Any) -> Any:
        seen.append((int(total), float(weight)))
        return total

    original = model.train_step

    def train_step(data: Any) -> Any:
        weight = model.optimizer.ft_reduction.reducer._weight
        total = tf.numpy_function(noted, [tf.reduce_sum(data[0]), weight], tf.float32)
        with tf.control_dependencies([total]):
            return original(data)

    model.train_step = train_step
    model.fit(dataset, epochs=epochs, verbose=0, **options)
    return seen


def sums(dataset: Any, epochs: int) -> list[tuple[int, float]]:
    """The same as it should be, by the cursor."""
    deals = [dataset.deal_of(epoch, index) for epoch in range(epochs) for index in range(len(dataset))]
    return [(int(deal.ids.sum()), deal.weight) for deal in deals]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_fit_without_a_callback_has_the_epochs_of_the_worker_and_their_weights(seats: Seats, shuffle: bool) -> None:
    dataset = seats.dataset(column(), column(), rank=0, size=2, global_batch_size=7, shuffle=shuffle)
    assert fitted(compiled(), dataset, epochs=3) == sums(dataset, 3)
    assert {weight for _, weight in sums(dataset, 3)} == {8 / 7, 1.0}


def test_a_fit_begins_with_the_epoch_that_it_is_told(seats: Seats) -> None:
    dataset = seats.dataset(column(), column(), shuffle=True)
    assert fitted(compiled(), dataset, epochs=3, initial_epoch=2) == sums(dataset, 3)[-len(dataset) :]


def test_evaluation_of_the_same_dataset_does_not_disturb_a_fit(seats: Seats) -> None:
    dataset = seats.dataset(column(), column(), size=2, shuffle=True)
    assert fitted(compiled(), dataset, epochs=2, validation_data=dataset) == sums(dataset, 2)


def test_after_a_fit_gradients_count_as_ever(seats: Seats) -> None:
    model = compiled()
    fitted(model, seats.dataset(column(), column(), size=3, global_batch_size=7))
    assert float(model.optimizer.ft_reduction.reducer._weight) == 1.0


def test_a_weight_that_a_failed_fit_has_left_is_gone_in_the_next_one(seats: Seats) -> None:
    model = compiled()
    model.optimizer.ft_reduction.reducer.set_weight(0.5)
    seats.dataset()
    model.fit(column(), column(), verbose=0)
    assert float(model.optimizer.ft_reduction.reducer._weight) == 1.0


def test_uneven_slices_that_cannot_be_weighted_are_warned_about_once(seats: Seats) -> None:
    dataset = seats.dataset(column(), column(), size=2, global_batch_size=7)
    with pytest.warns(UserWarning, match="DistributedOptimizer") as caught:
        compiled("sgd").fit(dataset, epochs=2, verbose=0)
    assert len([one for one in caught if "slices" in str(one.message)]) == 1


def test_slices_of_different_weights_in_one_execution_are_warned_about(seats: Seats) -> None:
    dataset = seats.dataset(column(), column(), size=2, global_batch_size=7)
    with pytest.warns(UserWarning, match="steps_per_execution"):
        compiled(steps_per_execution=3).fit(dataset, verbose=0)


def test_executions_of_several_batches_have_the_weight_of_their_batches(seats: Seats) -> None:
    dataset = seats.dataset(column(14), column(14), size=2, global_batch_size=7)
    assert fitted(compiled(steps_per_execution=2), dataset) == sums(dataset, 1)
