"""Events: complete records, whole lines, and observers that cannot hurt training."""

from __future__ import annotations

import json
import logging
from itertools import count
from pathlib import Path

import pytest

from horovod_ft.errors import ConfigurationError
from horovod_ft.events import Event, EventBus, EventWriter, JsonLines, file_name, read_events


@pytest.fixture
def bus() -> EventBus:
    """Its clocks tick by one with each event."""
    wall, mono = count(1000), count(5)
    return EventBus("host:2:77", wall=lambda: float(next(wall)), mono=lambda: float(next(mono)))


def test_an_event_says_what_happened_when_to_whom_and_where(bus: EventBus) -> None:
    at = bus.position
    at.generation, at.rank, at.size, at.step = 3, 1, 4, 17
    assert bus.emit("fault", phase="data") == Event("fault", 1000.0, 5.0, "host:2:77", 3, 1, 4, 17, {"phase": "data"})


def test_all_observers_see_all_events(bus: EventBus) -> None:
    seen: list[tuple[str, str]] = []
    bus.subscribe(lambda event: seen.append(("first", event.kind)))
    bus.subscribe(lambda event: seen.append(("second", event.kind)))
    bus.emit("started")
    assert seen == [("first", "started"), ("second", "started")]


def test_an_observer_that_fails_is_logged_and_detached(bus: EventBus, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []

    def broken(event: Event) -> None:
        seen.append("broken")
        raise OSError("no space left")

    bus.subscribe(broken)
    bus.subscribe(lambda event: seen.append("sound"))
    with caplog.at_level(logging.ERROR, "horovod_ft"):
        bus.emit("a")
        bus.emit("b")
    assert seen == ["broken", "sound", "sound"]
    assert "was detached; training goes on" in caplog.text


def test_an_event_survives_the_way_through_json(bus: EventBus) -> None:
    event = bus.emit("agreed", holders=[0, 2], duration_s=0.25)
    assert Event.from_json(event.to_json()) == event


def test_data_that_is_not_json_is_recorded_as_text(bus: EventBus) -> None:
    event = bus.emit("warning", place=Path("/x"))
    assert json.loads(event.to_json())["data"] == {"place": "/x"}


def test_a_record_is_in_the_file_as_soon_as_it_is_written(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "x.jsonl")
    lines.write("one")
    assert (tmp_path / "x.jsonl").read_text() == "one\n"
    lines.close()


def test_a_file_is_appended_to(tmp_path: Path) -> None:
    for text in ("one", "two"):
        lines = JsonLines(tmp_path / "x.jsonl")
        lines.write(text)
        lines.close()
    assert (tmp_path / "x.jsonl").read_text() == "one\ntwo\n"


def test_each_worker_writes_a_file_of_its_own_and_all_are_read_in_order_of_time(tmp_path: Path) -> None:
    clock = count()
    for worker in ("a:0:1", "b:1:2"):
        bus = EventBus(worker, wall=lambda: -float(next(clock)), mono=lambda: 0.0)
        bus.subscribe(EventWriter(tmp_path, worker))
        bus.emit("started")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events-a-0-1.jsonl", "events-b-1-2.jsonl"]
    assert [event.worker for event in read_events(tmp_path)] == ["b:1:2", "a:0:1"]


@pytest.mark.parametrize("rubbish", ['{"kind": "sta', "[]", '{"kind": "x"}', "7"])
def test_a_line_that_is_no_event_is_skipped(
    tmp_path: Path, bus: EventBus, rubbish: str, caplog: pytest.LogCaptureFixture
) -> None:
    event = bus.emit("started")
    (tmp_path / "events-x.jsonl").write_text(event.to_json() + "\n" + rubbish)
    assert read_events(tmp_path) == [event]
    assert "skipped" in caplog.text


def test_a_workers_name_makes_a_plain_file_name() -> None:
    assert file_name("rack/host:3:99") == "rack_host-3-99"


def test_a_folder_that_cannot_be_written_to_names_the_variable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="HOROVOD_FT_EVENTS"):
        EventWriter(tmp_path / "file", "w")
