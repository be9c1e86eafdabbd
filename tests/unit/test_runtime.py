"""One runtime a process, whatever the framework: what ``init`` and ``shutdown`` of the adapters share."""

from __future__ import annotations

from typing import Any

import pytest

from horovod_ft import runtime
from horovod_ft.errors import ConfigurationError, UsageError


class Alone:
    """A binding of a group of one."""

    failure_types: tuple[type[BaseException], ...] = (ConnectionError,)

    def __init__(self, timeout_s: float, *arguments: Any, **options: Any) -> None:
        self.given = timeout_s, arguments, options
        self.calls: list[str] = []

    def init(self) -> None:
        self.calls.append("init")

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def allgather_object(self, value: Any, name: str) -> list[Any]:
        return [value]

    def broadcast_object(self, value: Any, root: int, name: str) -> Any:
        return value

    def broadcast_bytes(self, buffer: Any, root: int, name: str) -> None:
        """Nobody else is there."""

    def any_async(self, flags: int) -> Any:
        raise AssertionError


@pytest.fixture(autouse=True)
def empty_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime._Process, "runtime", None)


def binding_of(adapter: str) -> Alone:
    bound: Alone = runtime.current(adapter).binding
    return bound


def fail() -> None:
    raise AssertionError("Horovod's own shutdown was called")


def test_the_binding_gets_the_bound_and_what_the_user_gave() -> None:
    runtime.init("one", Alone, ([0],), {"process_sets": None})
    bound, arguments, options = binding_of("one").given
    assert bound > 0
    assert (arguments, options) == (([0],), {"process_sets": None})


def test_init_again_does_nothing() -> None:
    runtime.init("one", Alone)
    bound = binding_of("one")
    runtime.init("one", Alone)
    assert binding_of("one") is bound
    assert bound.calls == ["init"]


def test_a_second_framework_in_one_process_is_refused() -> None:
    runtime.init("one", Alone)
    with pytest.raises(ConfigurationError, match=r"two\.init\(\) in a process in which one has been initialized"):
        runtime.init("two", Alone)
    assert binding_of("one").calls == ["init"]


def test_a_second_framework_may_follow_the_first() -> None:
    runtime.init("one", Alone)
    runtime.shutdown("one", fail)
    runtime.init("two", Alone)
    assert binding_of("two").calls == ["init"]


def test_shutdown_stops_the_group_once() -> None:
    passed_on: list[str] = []
    runtime.init("one", Alone)
    bound = binding_of("one")
    runtime.shutdown("one", fail)
    runtime.shutdown("one", lambda: passed_on.append("again"))
    assert bound.calls == ["init", "shutdown"]
    assert passed_on == ["again"]


def test_shutdown_of_another_framework_leaves_the_group_alone() -> None:
    passed_on: list[str] = []
    runtime.init("one", Alone)
    runtime.shutdown("two", lambda: passed_on.append("two"))
    assert binding_of("one").calls == ["init"]
    assert passed_on == ["two"]


@pytest.mark.parametrize("adapter", ["one", "two"])
def test_an_adapter_that_was_not_initialized_has_no_runtime(adapter: str) -> None:
    if adapter == "two":
        runtime.init("one", Alone)
    with pytest.raises(UsageError, match=rf"call hvd\.init\(\) first \(import {adapter} as hvd\)"):
        runtime.current(adapter)
