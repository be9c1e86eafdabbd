"""The arithmetic of a reduction, with another worker that is made up, in eager mode and in a graph."""

from __future__ import annotations

from threading import Event
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError
from tensorflow.python.eager import context

from horovod_ft.errors import ConfigurationError
from horovod_ft.keras.operations import HorovodOperations
from horovod_ft.keras.reducer import GradientReducer
from tests.unit.keras.tools import Broken, TwoWorkers

MODES = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])


def reduced(gradients: list[Any], graph: bool, names: list[str] | None = None, **options: Any) -> list[Any]:
    options = {"operations": TwoWorkers(), **options}
    reducer = GradientReducer(**options)

    def run(*given: Any) -> list[Any]:
        return reducer.reduce(list(given), names or [f"g{place}" for place in range(len(given))])

    return list((tf.function(run) if graph else run)(*gradients))


def rows(values: list[list[float]], indices: list[int]) -> tf.IndexedSlices:
    return tf.IndexedSlices(tf.constant(values), tf.constant(indices, tf.int64), tf.constant([4, 2], tf.int64))


@MODES
def test_gradients_are_averaged(graph: bool) -> None:
    first, second = reduced([tf.constant([1.0, 2.0]), tf.constant(5.0)], graph)
    assert first.numpy().tolist() == [2.0, 4.0]
    assert second.numpy() == 10.0


@MODES
def test_gradients_are_summed(graph: bool) -> None:
    (only,) = reduced([tf.constant([1.0, 2.0])], graph, op=hvd.Sum)
    assert only.numpy().tolist() == [4.0, 8.0]


def test_the_mean_may_be_divided_in_two_steps() -> None:
    seen: list[tuple[Any, float, float]] = []

    class Seen(TwoWorkers):
        def allreduce(self, tensor: Any, name: str, op: Any, prescale: float, postscale: float) -> Any:
            seen.append((op, prescale, postscale))
            return super().allreduce(tensor, name, op, prescale, postscale)

    (only,) = reduced([tf.constant([1.0])], False, predivide=4.0, operations=Seen())
    assert seen == [(hvd.Average, 0.25, 4.0)]
    assert only.numpy().tolist() == [2.0]


@MODES
def test_local_gradients_stay_as_they_are(graph: bool) -> None:
    local = tf.constant([1.0, 2.0])
    reduced([local], graph)
    assert local.numpy().tolist() == [1.0, 2.0]


@MODES
def test_what_has_no_gradient_is_left_out(graph: bool) -> None:
    operations = TwoWorkers()
    reducer = GradientReducer(operations=operations)
    results: list[Any] = []

    def run(given: Any) -> None:
        results[:] = reducer.reduce([None, given, None], ["a", "b", "c"])

    (tf.function(run) if graph else run)(tf.constant(1.0))
    assert [result is None for result in results] == [True, False, True]
    assert operations.asked == ["gradient.b"]


def test_without_any_gradient_nothing_is_reduced() -> None:
    operations = TwoWorkers()
    assert GradientReducer(operations=operations).reduce([None, None], ["a", "b"]) == [None, None]
    assert operations.asked == []


@MODES
def test_rows_of_all_workers_are_kept_and_averaged(graph: bool) -> None:
    (only,) = reduced([rows([[1.0, 2.0], [3.0, 4.0]], [0, 2])], graph)
    assert isinstance(only, tf.IndexedSlices)
    expected = np.zeros((4, 2), np.float32)
    expected[0], expected[2] = [2.0, 4.0], [6.0, 8.0]
    assert tf.convert_to_tensor(only).numpy().tolist() == expected.tolist()


def test_rows_are_summed() -> None:
    (only,) = reduced([rows([[1.0, 2.0]], [1])], False, op=hvd.Sum)
    assert tf.convert_to_tensor(only).numpy()[1].tolist() == [4.0, 8.0]


def test_a_worker_may_have_no_rows() -> None:
    empty = tf.IndexedSlices(tf.zeros([0, 2]), tf.zeros([0], tf.int64), tf.constant([4, 2], tf.int64))
    (only,) = reduced([empty], False)
    assert tf.convert_to_tensor(only).numpy().sum() == 0.0


@MODES
def test_sparse_gradients_can_be_reduced_as_dense_ones(graph: bool) -> None:
    (only,) = reduced([rows([[1.0, 2.0], [1.0, 2.0]], [1, 1])], graph, sparse_as_dense=True)
    assert not isinstance(only, tf.IndexedSlices)
    assert only.numpy()[1].tolist() == [4.0, 8.0]


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64])
def test_a_reduced_gradient_has_the_dtype_of_the_local_one(dtype: tf.DType) -> None:
    dense, sparse = reduced([tf.constant([1.0], dtype), tf.cast(rows([[1.0, 2.0]], [0]), dtype)], False)
    assert dense.dtype == sparse.dtype == dtype
    assert float(dense[0]) == 2.0


def test_compressed_gradients_travel_as_float16() -> None:
    wires: list[Any] = []

    class Seen(TwoWorkers):
        def allreduce(self, tensor: Any, name: str, op: Any, prescale: float, postscale: float) -> Any:
            wires.append(tensor.dtype)
            return super().allreduce(tensor, name, op, prescale, postscale)

    (only,) = reduced([tf.constant([1.0])], False, compression=hvd.Compression.fp16, operations=Seen())
    assert (wires, only.dtype) == ([tf.float16], tf.float32)


def test_names_have_the_prefix() -> None:
    operations = TwoWorkers()
    gradients = [tf.constant(1.0), rows([[1.0, 2.0]], [0])]
    reduced(gradients, False, ["dense.kernel", "words"], prefix="mine", operations=operations)
    assert operations.asked == ["mine.dense.kernel", "mine.words.values", "mine.words.indices"]


@MODES
def test_nothing_goes_on_before_all_have_arrived(graph: bool) -> None:
    variable = tf.Variable(0.0)
    reducer = GradientReducer(operations=Broken())

    def run() -> None:
        first, _ = reducer.reduce([tf.constant(1.0), tf.constant(1.0)], ["a", "b"])
        variable.assign_add(first)

    with pytest.raises(tf.errors.UnknownError if graph else HorovodInternalError, match="Horovod has been shut down"):
        (tf.function(run) if graph else run)()
    assert variable.numpy() == 0.0


@pytest.mark.parametrize("weight", [1.0, 0.5, 0.0])
def test_a_gradient_is_reduced_while_the_next_one_is_computed(weight: float) -> None:
    begun = Event()

    class Noting(TwoWorkers):
        def allreduce(self, tensor: Any, name: str, *given: Any) -> Any:
            if name.endswith("first"):
                tensor = tf.ensure_shape(tf.numpy_function(note, [tensor], tensor.dtype, stateful=False), tensor.shape)
            return super().allreduce(tensor, name, *given)

    def note(value: Any) -> Any:
        begun.set()
        return value

    def computed(_: Any) -> Any:
        return np.float32(begun.wait(10.0))

    reducer = GradientReducer(operations=Noting())
    reducer.set_weight(weight)

    def run(first: Any) -> Any:
        second = tf.ensure_shape(tf.numpy_function(computed, [first], tf.float32, stateful=False), [])
        return second, reducer.reduce([first, second], ["first", "second"])

    assert float(tf.function(run)(tf.constant(1.0))[0]) == 1.0


def test_waiting_for_all_gradients_takes_few_edges() -> None:
    """Each of n operations that waits for n others would be n * n: a step of a small model spends its time in them."""
    many = 50

    def run(*gradients: Any) -> Any:
        return GradientReducer(operations=TwoWorkers()).reduce(gradients, [str(place) for place in range(many)])

    nodes = tf.function(run).get_concrete_function(*[tf.constant(1.0)] * many).graph.as_graph_def().node
    assert sum(name.startswith("^") for node in nodes for name in node.input) < 10 * many


def test_a_step_that_xla_compiles_is_refused() -> None:
    reducer = GradientReducer()
    with pytest.raises(ConfigurationError, match="jit_compile=False"):
        tf.function(lambda x: reducer.reduce([x], ["a"]), jit_compile=True, autograph=False)(tf.constant(1.0))


@pytest.mark.parametrize("shape", [(), (2,), (2, 3), (1,), (1, 1), (3, 1), (0,), (0, 2)])
def test_horovods_operations_keep_the_shape(shape: tuple[int, ...]) -> None:
    run = tf.function(lambda x: HorovodOperations().allreduce(x, "x", hvd.Average, 1.0, 1.0))
    result = run(tf.ones(shape))
    assert result.shape == run.get_concrete_function(tf.ones(shape)).output_shapes == shape
    assert (result.numpy() == 1.0).all()


@pytest.mark.parametrize("shape", [(), (2,), (1,), (2, 3), (1, 1), (3, 1), (1, 3)])
def test_horovods_operations_are_not_computed_while_the_graph_is_optimized(shape: tuple[int, ...]) -> None:
    def run() -> Any:
        return HorovodOperations().allreduce(tf.ones(shape) * 0.0, "x", hvd.Average, 1.0, 1.0) + 1.0

    context.enable_run_metadata()
    try:
        tf.function(run)()
        graphs = context.export_run_metadata().partition_graphs
    finally:
        context.disable_run_metadata()
    assert "HorovodAllreduce" in {node.op for graph in graphs for node in graph.node}


def test_equal_names_in_one_graph_are_told_apart() -> None:
    def run() -> Any:
        with tf.name_scope("one"):
            first = HorovodOperations().allreduce(tf.constant(1.0), "x", hvd.Sum, 1.0, 1.0)
        with tf.name_scope("two"):
            return first + HorovodOperations().allreduce(tf.constant(1.0), "x", hvd.Sum, 1.0, 1.0)

    nodes = tf.function(run).get_concrete_function().graph.as_graph_def().node
    names = sorted(node.name for node in nodes if node.op == "HorovodAllreduce")
    assert names == ["HorovodAllreduce.x", "HorovodAllreduce.x_1"]


# --- several reducers ------------------------------------------------------------------------------------------------


def names_in(function: Any) -> list[str]:
    """Of Horovod's operations in the graph of a function without arguments, and in all graphs inside of it."""
    graph = function.get_concrete_function().graph.as_graph_def()
    nodes = [*graph.node, *(node for inner in graph.library.function for node in inner.node_def)]
    return sorted(node.name for node in nodes if node.op in ("HorovodAllreduce", "HorovodAllgather"))


def pair(*prefixes: str) -> list[GradientReducer]:
    """Reducers of a process that has just joined a group, so that they compare names."""
    formed = tf.Variable(1, dtype=tf.int64)
    return [GradientReducer(prefix, formed=formed) for prefix in prefixes]


def plainly(reducer: GradientReducer) -> Any:
    return reducer.reduce([tf.constant([1.0])], ["w"])[0]


def branch(reducer: GradientReducer) -> Any:
    return tf.cond(tf.greater(tf.random.uniform([]), -1.0), lambda: plainly(reducer), lambda: tf.ones([1]))


def function_of_its_own(reducer: GradientReducer) -> Any:
    return tf.function(plainly, autograph=False)(reducer)


@pytest.mark.parametrize("place", [plainly, branch, function_of_its_own])
def test_two_reducers_in_one_graph_have_names_of_their_own(place: Any) -> None:
    first, second = pair("gradient", "gradient")
    for _ in range(2):  # the second time as a graph that is made anew
        step = tf.function(lambda: (place(first), place(second)), autograph=False)
        assert names_in(step) == [
            "HorovodAllreduce.gradient-2.names",
            "HorovodAllreduce.gradient-2.w",
            "HorovodAllreduce.gradient.names",
            "HorovodAllreduce.gradient.w",
        ]
        assert [value.numpy().tolist() for value in step()] == [[1.0], [1.0]]


def test_what_a_process_has_made_before_does_not_shift_names() -> None:
    """A worker that joins has not made the first one."""
    first, second = pair("gradient", "gradient")
    tf.function(lambda: plainly(first))()
    step = tf.function(lambda: plainly(second))
    assert names_in(step) == ["HorovodAllreduce.gradient.names", "HorovodAllreduce.gradient.w"]


def test_a_name_that_the_user_has_chosen_stays_with_its_reducer() -> None:
    both = pair("gradient-2", "gradient", "gradient")
    names = names_in(tf.function(lambda: [branch(one) for one in both], autograph=False))
    assert [name for name in names if name.endswith(".w")] == [
        "HorovodAllreduce.gradient-2.w", "HorovodAllreduce.gradient-3.w", "HorovodAllreduce.gradient.w",
    ]  # fmt: skip


# --- weights ---------------------------------------------------------------------------------------------------------


@MODES
def test_a_local_gradient_counts_by_its_weight(graph: bool) -> None:
    reducer = GradientReducer(operations=TwoWorkers())
    reduce = (tf.function if graph else lambda function: function)(lambda g: reducer.reduce([g], ["g"]))
    reducer.set_weight(0.5)
    assert reduce(tf.constant([1.0, 2.0]))[0].numpy().tolist() == [1.0, 2.0]
    reducer.set_weight(2.0)
    assert reduce(tf.constant([1.0, 2.0]))[0].numpy().tolist() == [4.0, 8.0]


def test_rows_count_by_their_weight() -> None:
    reducer = GradientReducer(operations=TwoWorkers())
    reducer.set_weight(0.5)
    (only,) = reducer.reduce([rows([[2.0, 4.0]], [1])], ["g"])
    assert tf.convert_to_tensor(only).numpy()[1].tolist() == [2.0, 4.0]


def test_the_weight_one_changes_no_bit() -> None:
    value = tf.constant(np.array([0.1, 1e-40, -3e38], np.float32))
    (weighted,) = GradientReducer().weighted([value])
    assert weighted.numpy().tobytes() == value.numpy().tobytes()


def test_without_a_weight_nothing_is_added_whatever_the_gradient() -> None:
    reducer = GradientReducer(operations=TwoWorkers())
    reducer.set_weight(0.0)
    (only,) = reducer.reduce([tf.constant([np.nan, np.inf])], ["g"])
    assert only.numpy().tolist() == [0.0, 0.0]
