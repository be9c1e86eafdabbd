"""Reduced gradients outlive a graph that fails, each with the step in which it has arrived."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from horovod_ft.keras.arrivals import Arrivals

VECTOR = tf.constant([1.0, 2.0])
DELTAS = {"float32": tf.constant([5.0])}


def rows(*indices: int) -> Any:
    values = tf.constant([[float(index)] for index in indices])
    return tf.IndexedSlices(values, tf.constant(indices), tf.constant([4, 1]))


def begun(*gradients: Any) -> Arrivals:
    arrivals = Arrivals()
    arrivals.begin(gradients or [VECTOR, rows(0, 3)], DELTAS)
    return arrivals


def test_nothing_has_arrived_when_a_step_begins() -> None:
    arrivals = begun()
    arrivals.keep([VECTOR, rows(0, 3)], DELTAS)
    assert arrivals.done() == (True, True, True)
    arrivals.begin([VECTOR, rows(0, 3)], DELTAS)
    assert arrivals.done() == (False, False, False)


def test_what_has_arrived_comes_out_as_it_came() -> None:
    arrivals = begun()
    arrivals.keep([VECTOR, rows(2, 2, 1)], DELTAS)  # as many rows as all workers have together
    (vector, sparse), sums = arrivals.values()
    assert vector.numpy().tolist() == [1.0, 2.0]
    assert (sparse.indices.numpy().tolist(), sparse.values.numpy().tolist()) == ([2, 2, 1], [[2.0], [2.0], [1.0]])
    assert sums["float32"].numpy().tolist() == [5.0]


def test_a_graph_that_fails_leaves_what_it_has_put_away() -> None:
    arrivals = begun()

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def broken(late: Any) -> None:
        (place, *_) = arrivals.places
        place.keep(VECTOR, tf.convert_to_tensor(arrivals._present))
        with tf.control_dependencies([tf.convert_to_tensor(place._mark)]):  # a read of it comes after it is set
            tf.debugging.assert_equal(late, 1)

    with pytest.raises(tf.errors.InvalidArgumentError):
        broken(tf.constant(2))
    assert arrivals.done() == (True, False, False)


def test_what_has_come_in_another_way_has_arrived() -> None:
    arrivals = begun()
    arrivals.put(arrivals.places[1], arrivals.places[1].slices(np.ones((1, 1), np.float32), np.array([2], np.int32)))
    assert arrivals.done() == (False, True, False)
    assert arrivals.places[1].value().values.numpy().tolist() == [[1.0]]


@pytest.mark.parametrize("after", range(4))
def test_what_is_lost_has_not_arrived(after: int) -> None:
    arrivals = begun()
    arrivals.keep([VECTOR, rows(0)], DELTAS)
    arrivals.lose(after)
    assert arrivals.done() == tuple(index < after for index in range(3))


def test_a_pass_without_an_update_has_metrics_only() -> None:
    arrivals = begun()
    arrivals.begin([], DELTAS)
    assert (arrivals.gradients, len(arrivals.places)) == ([], 1)


def test_places_are_kept_for_gradients_of_the_same_kind() -> None:
    arrivals = begun()
    before = arrivals.gradients
    arrivals.begin([VECTOR * 2, rows(1, 2, 3)], DELTAS)
    assert arrivals.gradients is before
    arrivals.begin([tf.zeros(3), rows(1)], DELTAS)
    assert [place.elements for place in arrivals.gradients] == [3, 4]


def test_zeros_change_nothing() -> None:
    vector, sparse = (place.zeros() for place in begun().gradients)
    assert vector.numpy().tolist() == [0.0, 0.0]
    assert sparse.values.shape == (0, 1)
    assert tf.convert_to_tensor(sparse).numpy().tolist() == [[0.0]] * 4


def test_lossy_is_forgotten_when_a_step_begins() -> None:
    arrivals = begun()
    arrivals.places[0].lossy = True
    arrivals.begin([VECTOR, rows(0)], DELTAS)
    assert not any(place.lossy for place in arrivals.places)
