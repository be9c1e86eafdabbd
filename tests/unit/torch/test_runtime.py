"""``hvd.init`` checks everything before it starts anything, and ``hvd.shutdown`` takes it down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import horovod.torch
import pytest

import horovod_ft.torch as hvd
from horovod_ft import runtime
from horovod_ft.errors import ConfigurationError, FaultPlanError, PolicyError, UsageError
from horovod_ft.events import read_events
from horovod_ft.membership.driver import DriverMembership
from horovod_ft.membership.static import StaticMembership
from horovod_ft.settings import Settings
from horovod_ft.torch.binding import TorchBinding
from horovod_ft.torch.runtime import current


class Started:
    """Stands in for Horovod's own init and shutdown."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        monkeypatch.setattr(horovod.torch, "init", lambda *_, **__: self.calls.append("init"))
        monkeypatch.setattr(horovod.torch, "shutdown", lambda: self.calls.append("shutdown"))
        monkeypatch.setattr(runtime._Process, "runtime", None)


@pytest.fixture
def horovod_calls(monkeypatch: pytest.MonkeyPatch) -> Started:
    return Started(monkeypatch)


def test_init_starts_horovod_once_and_shutdown_stops_it(horovod_calls: Started) -> None:
    hvd.init()
    hvd.init()
    hvd.shutdown()
    assert horovod_calls.calls == ["init", "shutdown"]


def test_shutdown_without_init_is_passed_on(horovod_calls: Started) -> None:
    hvd.shutdown()
    assert horovod_calls.calls == ["shutdown"]


def test_before_init_there_is_no_runtime(horovod_calls: Started) -> None:
    with pytest.raises(UsageError, match=r"call hvd\.init\(\) first"):
        current()


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("HOROVOD_FT_POLICY", "lossless", PolicyError),
        ("HOROVOD_FT_FAULTS", "[[fault]]\nworker = 1\nphase = 'sleep'", FaultPlanError),
        ("HOROVOD_FT_EVENTS", "/dev/null/events", ConfigurationError),
        ("HOROVOD_FT_LEDGER", "/dev/null/ledger", ConfigurationError),
        ("HOROVOD_FT_TIMEOUT", "soon", ConfigurationError),
        ("HOROVOD_FT_EVENT", "x", ConfigurationError),
    ],
)
def test_a_wrong_setting_starts_nothing(
    horovod_calls: Started, monkeypatch: pytest.MonkeyPatch, name: str, value: str, error: type[Exception]
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(error):
        hvd.init()
    assert horovod_calls.calls == []
    assert runtime._Process.runtime is None


@pytest.mark.parametrize("arguments", [{"comm": [0, 1]}, {"process_sets": "dynamic"}], ids=str)
def test_process_sets_and_communicators_are_refused_in_an_elastic_job(
    horovod_calls: Started, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]
) -> None:
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    with pytest.raises(ConfigurationError, match="cannot form them anew"):
        hvd.init(**arguments)
    assert horovod_calls.calls == []


def test_arguments_that_ask_for_nothing_are_fine_in_an_elastic_job(
    horovod_calls: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    hvd.init(comm=None, process_sets=[])
    assert horovod_calls.calls == ["init"]


@pytest.mark.parametrize(("elastic", "kind"), [(True, DriverMembership), (False, StaticMembership)])
def test_the_launcher_decides_how_groups_are_formed(elastic: bool, kind: type[Any]) -> None:
    made = runtime.Runtime(Settings(elastic=elastic), "horovod_ft.torch", TorchBinding)
    assert type(made.membership) is kind


def test_events_are_written_into_their_folder(
    horovod_calls: Started, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOROVOD_FT_EVENTS", str(tmp_path))
    hvd.init()
    event = read_events(tmp_path)[0]
    assert (event.kind, event.rank, event.size) == ("init", 0, 1)


@pytest.mark.parametrize(("attempt", "waiting"), [(0, 1), (1, 0)])
def test_a_fault_plan_strikes_in_the_first_attempt_only(
    horovod_calls: Started, monkeypatch: pytest.MonkeyPatch, attempt: int, waiting: int
) -> None:
    monkeypatch.setenv("HOROVOD_FT_FAULTS", '[[fault]]\nworker = 0\nstep = 1\nphase = "forward"')
    monkeypatch.setenv("HOROVOD_FT_ATTEMPT", str(attempt))
    hvd.init()
    assert len(current().injector.waiting) == waiting
    hvd.shutdown()
