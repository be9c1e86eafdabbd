"""Values as JSON: bit for bit, with nothing pickled unless that is allowed."""

from __future__ import annotations

import contextlib
import json
import math
import pickle
import random
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from horovod_ft.checkpoint.values import dump, load
from horovod_ft.errors import DamagedCheckpointError, UnsupportedStateError


def again(value: Any) -> Any:
    document, pickled = dump(value)
    assert pickled == ()
    return load(document)


def same(one: Any, other: Any) -> bool:
    """Equal in type and in every bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, np.ndarray | np.generic):
        return (one.dtype.str, one.shape, one.tobytes()) == (other.dtype.str, other.shape, other.tobytes())
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=True) if len(one) == len(other) else [((0, 0), (1, 1))]
        return all(same(a, b) and same(c, d) for (a, c), (b, d) in pairs)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


TEXT = st.text(st.characters(exclude_categories=()))  # lone surrogates, too
HASHABLE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT | st.binary(),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
ARRAYS = hnp.arrays(
    hnp.boolean_dtypes() | hnp.integer_dtypes() | hnp.floating_dtypes() | hnp.complex_number_dtypes()
    | hnp.byte_string_dtypes() | hnp.unicode_string_dtypes(),
    hnp.array_shapes(min_dims=0, min_side=0, max_side=3),
)  # fmt: skip
VALUES = st.recursive(
    HASHABLE | st.floats() | ARRAYS,
    lambda inner: st.lists(inner, max_size=4)
    | st.lists(inner, max_size=4).map(tuple)
    | st.dictionaries(TEXT, inner, max_size=4)
    | st.dictionaries(HASHABLE, inner, max_size=4)
    | st.dictionaries(HASHABLE, inner, max_size=4).map(OrderedDict),
    max_leaves=12,
)


@given(VALUES)
def test_any_plain_value_comes_back_bit_for_bit(value: Any) -> None:
    assert same(value, again(value))


@pytest.mark.parametrize(
    "value",
    [
        math.inf, -math.inf, math.nan, -0.0, 5e-324, struct.unpack("<d", b"\x01\x00\x00\x00\x00\x00\xf8\xff")[0],
        2**53, 2**53 + 1, -(2**64), True, 1, 1.0, "$int", {"$int": 1}, {"a": 1, "$b": 2}, {}, (), [], "",
        {1: "a", "1": "b", None: "c"}, Counter({30: 1, 60: 2}), OrderedDict(b=1, a=2), np.float64(1), np.bool_(True),
        np.str_("ab"), np.array(5), np.zeros((0, 3), ">i2"), np.asfortranarray(np.arange(6).reshape(2, 3)),
    ],
)  # fmt: skip
def test_what_json_alone_would_change(value: Any) -> None:
    assert same(value, again(value))


def test_whole_numbers_have_no_limit() -> None:
    assert again([1 << 40_000, -(1 << 40_000)]) == [1 << 40_000, -(1 << 40_000)]


def test_numbers_that_other_readers_of_json_would_round_are_no_numbers_there() -> None:
    assert json.loads(dump([2**53, 2**53 + 1])[0]) == [2**53, {"$int": "0x20000000000001"}]


def test_states_of_random_generators_go_on_where_they_were() -> None:
    generator, plain = np.random.default_rng(3), random.Random(3)
    legacy = np.random.RandomState(3)
    states = again([generator.bit_generator.state, plain.getstate(), legacy.get_state()])
    expected = (generator.random(), plain.random(), legacy.random_sample())
    generator.bit_generator.state = states[0]
    plain.setstate(states[1])
    legacy.set_state(states[2])
    assert (generator.random(), plain.random(), legacy.random_sample()) == expected


def test_an_array_that_was_read_can_be_written_to() -> None:
    array = again(np.arange(3))
    array[0] = 7
    assert array[0] == 7


def test_the_document_is_plain_json_that_people_can_read() -> None:
    assert json.loads(dump({"epoch": 3, "lr": 0.1, "place": (1, 2)})[0]) == {
        "epoch": 3, "lr": 0.1, "place": {"$tuple": [1, 2]},
    }  # fmt: skip


# --- what is refused -----------------------------------------------------------------------------------------------


class Number(IntEnum):
    ONE = 1


Point = namedtuple("Point", "x y")


def refusal(value: Any) -> str:
    with pytest.raises(UnsupportedStateError) as error:
        dump(value)
    return str(error.value)


def test_a_refusal_has_the_path_and_the_type() -> None:
    told = refusal({"scheduler": {"milestones": [1, 2, {3}]}})
    assert told.startswith("state.scheduler['milestones'][2]: a set cannot be saved without pickle")
    assert "allow_pickle=True" in told


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({1, 2}, "state: a set"), (object(), "state: an object"), (lambda: 0, "state: a function"), (1j, "a complex"),
        (Number.ONE, "test_values.Number"), (Point(1, 2), "test_values.Point"), (bytearray(b"a"), "a bytearray"),
        (defaultdict(list), "a collections.defaultdict"), (np.array([None]), "a NumPy array of dtype object"),
        (np.zeros(1, [("a", "i4")]), "a NumPy array of dtype [("), (np.zeros(2, "V2"), "dtype |V2"),
        (np.ma.masked_array([1]), "a NumPy array"), ({"a": [0, {"b": {1}}]}, "state.a[1]['b']: a set"),
        ({2: {1}}, "state[2]: a set"), ({"not an identifier": {1}}, "state['not an identifier']: a set"),
        ({frozenset({1}): 0}, "the key frozenset({1}) of state: a frozenset"),
    ],
)  # fmt: skip
def test_what_has_no_form_is_refused(value: Any, told: str) -> None:
    assert told in refusal(value)


def test_what_contains_itself_is_refused() -> None:
    loop: list[Any] = [1]
    loop.append({"again": loop})
    assert refusal({"x": loop}).startswith("state.x[1]['again'] contains itself")


def test_the_same_object_twice_is_no_loop() -> None:
    shared = [1]
    assert again([shared, shared]) == [[1], [1]]


def test_what_is_nested_without_end_is_refused() -> None:
    deep: Any = 0
    for _ in range(300):
        deep = [deep]
    assert "more than 200 deep" in refusal(deep)


# --- pickle --------------------------------------------------------------------------------------------------------


def test_with_permission_what_has_no_form_is_pickled_and_nothing_else() -> None:
    value = {"a": {1, 2}, "b": [1.5, Number.ONE], "c": "plain"}
    document, pickled = dump(value, allow_pickle=True)
    assert pickled == ("state.a", "state.b[1]")
    assert load(document, allow_pickle=True) == value
    assert json.loads(document)["c"] == "plain"


class Harmful:
    """Its pickle calls ``hurt`` when it is read."""

    def __reduce__(self) -> Any:
        return hurt, ()


HURT: list[int] = []


def hurt() -> None:
    HURT.append(1)


def test_a_pickle_is_not_read_without_permission_and_its_path_is_told() -> None:
    document, _ = dump({"x": Harmful()}, allow_pickle=True)
    with pytest.raises(UnsupportedStateError, match=r"^state\.x was saved with pickle"):
        load(document)
    assert HURT == []


def test_what_cannot_even_be_pickled_is_told() -> None:
    with pytest.raises(UnsupportedStateError, match=r"^state\.f: a function cannot be saved, not even with pickle"):
        dump({"f": lambda: 0}, allow_pickle=True)


def test_a_pickle_of_a_class_that_is_gone_is_told() -> None:
    data = pickle.dumps(Number.ONE).replace(b"Number", b"Nimber")
    good, _ = dump({"n": Number.ONE}, allow_pickle=True)
    text = json.loads(good)
    text["n"]["$pickle"][1] = json.loads(dump(data)[0])["$bytes"]
    with pytest.raises(UnsupportedStateError, match=r"^state\.n .* cannot be read back"):
        load(json.dumps(text).encode(), allow_pickle=True)


# --- documents that are none ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form",
    [
        {"$unknown": 1}, {"$int": 5}, {"$int": "0xg"}, {"$float": "00"}, {"$bytes": "?"}, {"$tuple": 5},
        {"$dict": [[1]]}, {"$dict": [[[1], 2]]}, {"$array": ["<f4", [2], ""]}, {"$array": ["|O", [1], "AAAAAAAAAAA="]},
        {"$array": ["<f4", [-1, -1], "AAAAAA=="]}, {"$array": []}, {"$array": ["V8", [1], "AAAAAAAAAAA="]},
        {"$scalar": []}, {"$int": "0x1", "b": 1}, {"$scalar": {"a": 1}},
    ],
)  # fmt: skip
def test_what_is_no_form_is_told(form: Any) -> None:
    with pytest.raises(DamagedCheckpointError, match="the values cannot be read"):
        load(json.dumps(form).encode())


@pytest.mark.parametrize("document", [b"", b"{", b"\xff\xfe", b'{"a": 1'])
def test_what_is_no_json_is_told(document: bytes) -> None:
    with pytest.raises(DamagedCheckpointError, match="the values cannot be read"):
        load(document)


@given(st.recursive(st.none() | st.integers() | st.text(max_size=4), lambda inner: st.lists(inner, max_size=3)
       | st.dictionaries(st.sampled_from(["$int", "$array", "$scalar", "$tuple", "$dict", "$Counter", "a"]), inner,
                         max_size=2), max_leaves=8))  # fmt: skip
def test_nothing_that_can_be_in_a_document_raises_anything_else(form: Any) -> None:
    with contextlib.suppress(DamagedCheckpointError):
        load(json.dumps(form).encode())
