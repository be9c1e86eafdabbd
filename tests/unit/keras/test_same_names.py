"""All workers reduce the same gradients, or all of them say that they do not: once after each forming of the group."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from horovod_ft.keras.same_names import SameNames, number_of

MINE, OTHERS = ("a", "b"), ("a",)


class Group:
    """Operations of workers that have these names, of which this one is the first."""

    def __init__(self, *names: tuple[str, ...]) -> None:
        self.numbers = [number_of(its) for its in names]
        self.sums: list[str] = []

    def allreduce(self, tensor: Any, name: str, op: Any, prescale: float, postscale: float) -> Any:
        def add(mine: Any) -> Any:
            self.sums.append(name)
            others = [[number, number * number] for number in self.numbers[1:]]
            return mine + tf.reduce_sum(tf.constant(others, tf.int64), axis=0)

        summed = tf.py_function(add, [tensor], tf.int64)
        summed.set_shape(tensor.shape)
        return summed

    def allgather(self, tensor: Any, name: str) -> Any:
        raise NotImplementedError

    def size(self) -> Any:
        return tf.constant(len(self.numbers))


def made(group: Group) -> tuple[Any, tf.Variable]:
    """A step that passes on 1.0 once names are known to be the same, and how often the group has been formed."""
    formed = tf.Variable(1, dtype=tf.int64)
    same = SameNames(group, formed)

    def step() -> Any:
        with same.checked(MINE, "gradient"):
            return tf.constant(1.0) + 0.0

    return tf.function(step, autograph=False), formed


@pytest.mark.parametrize("size", [1, 2, 3])
def test_workers_with_the_same_gradients_go_on(size: int) -> None:
    step, _ = made(Group(*[MINE] * size))
    assert float(step()) == 1.0


@pytest.mark.parametrize("others", [(OTHERS,), (MINE, OTHERS), (OTHERS, OTHERS), (OTHERS, ("a", "c"))])
def test_workers_with_other_gradients_are_told(others: tuple[tuple[str, ...], ...]) -> None:
    step, _ = made(Group(MINE, *others))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"different variables.*this one has 2.*a, b"):
        step()


def test_the_worker_that_is_in_the_minority_is_told_too() -> None:
    """Its number is the mean of the others', so that the sum alone would look right."""
    group = Group(MINE, MINE, MINE)
    group.numbers = [number_of(MINE), number_of(MINE) - 1, number_of(MINE) + 1]
    with pytest.raises(tf.errors.InvalidArgumentError):
        made(group)[0]()


def test_they_are_asked_once() -> None:
    group = Group(MINE, MINE)
    step, _ = made(group)
    for _ in range(3):
        step()
    assert group.sums == ["gradient.names"]


def test_they_are_asked_again_when_the_group_has_been_formed_anew() -> None:
    group = Group(MINE, MINE)
    step, formed = made(group)
    step()
    formed.assign_add(1)
    step()
    step()
    assert len(group.sums) == 2


def test_a_graph_that_is_made_later_on_one_worker_alone_asks_nobody() -> None:
    group = Group(MINE, MINE)
    step, _ = made(group)
    step()
    formed_before = len(group.sums)
    tf.function(step.python_function, autograph=False)()
    assert len(group.sums) == formed_before


def test_workers_that_were_told_are_told_again() -> None:
    step, _ = made(Group(MINE, OTHERS))
    for _ in range(2):
        with pytest.raises(tf.errors.InvalidArgumentError):
            step()


def test_without_a_group_of_ours_nobody_is_asked() -> None:
    group = Group(MINE, OTHERS)
    step, formed = made(group)
    formed.assign(0)
    assert float(step()) == 1.0


def test_the_order_and_the_kind_of_gradients_matter() -> None:
    assert len({number_of(names) for names in [("a", "b"), ("b", "a"), ("ab",), ("a", "b.values")]}) == 4


def test_a_number_and_its_square_can_be_summed_over_all_workers() -> None:
    assert number_of(["x" * 1000]) ** 2 * 2**15 < 2**63
