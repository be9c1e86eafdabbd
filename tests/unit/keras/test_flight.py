"""The wait for a blocking operation has a bound, and hears of Horovod's end."""

from __future__ import annotations

import functools
import math
import threading
import time
import weakref
from collections.abc import Iterator

import pytest
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

from horovod_ft.keras import flight
from horovod_ft.keras.flight import Flight


def running() -> bool:
    return False


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """An operation that waits for it ends with the test at the latest."""
    opened = threading.Event()
    yield opened
    opened.set()


def test_the_result_of_an_operation_that_has_ended() -> None:
    begun = Flight(lambda: 7, running)
    assert begun.wait(math.inf)
    assert begun.result() == 7


def test_the_error_of_an_operation_is_raised_where_its_result_is_asked_for() -> None:
    def fail() -> None:
        raise KeyError("mine")

    begun = Flight(fail, running)
    assert begun.wait(math.inf)
    with pytest.raises(KeyError, match="mine"):
        begun.result()


def test_a_broken_group_is_horovods_error() -> None:
    def fail() -> None:
        raise tf.errors.UnknownError(None, None, "Horovod has been shut down.")

    begun = Flight(fail, running)
    begun.wait(math.inf)
    with pytest.raises(HorovodInternalError):
        begun.result()


def test_a_wait_ends_at_its_deadline(gate: threading.Event) -> None:
    assert not Flight(gate.wait, running).wait(5.0, mono=lambda: 5.0)


def test_an_operation_that_goes_on_can_be_waited_for_again(gate: threading.Event) -> None:
    begun = Flight(gate.wait, running)
    begun.wait(5.0, mono=lambda: 5.0)
    gate.set()
    assert begun.wait(math.inf)
    assert begun.result() is True


def test_a_wait_for_what_horovod_has_given_up_ends(gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight, "ASK_S", 0.0)
    with pytest.raises(HorovodInternalError, match="Horovod has stopped"):
        Flight(gate.wait, lambda: True).wait(math.inf)


def test_a_thread_takes_the_next_operation_when_one_has_ended() -> None:
    Flight(threading.current_thread, running).wait(math.inf)
    there = set(threading.enumerate())  # threads of tests before this one may become free at any moment, too
    for _ in range(20):
        begun = Flight(threading.current_thread, running)
        begun.wait(math.inf)
        assert begun.result() in there - {threading.current_thread()}


def test_an_operation_does_not_wait_for_one_that_goes_on(gate: threading.Event) -> None:
    hangs = Flight(gate.wait, running)
    begun = Flight(lambda: 7, running)
    assert begun.wait(math.inf)
    assert not hangs.wait(0.0)


def test_what_an_operation_holds_is_let_go_when_it_has_ended() -> None:
    class Held:
        """Something large, say."""

    held = Held()
    gone = weakref.ref(held)
    begun = Flight(functools.partial(bool, held), running)
    begun.wait(math.inf)
    del held, begun
    until = time.monotonic() + 10.0
    while gone() is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert gone() is None
