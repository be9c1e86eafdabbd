"""Threads of Horovod are those that appear while a group is formed and that Python has not started."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from horovod_ft.membership import threads
from horovod_ft.membership.threads import ThreadWatch, native_threads


def test_threads_of_python_are_no_concern() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        assert thread.native_id not in native_threads()
    finally:
        done.set()
        thread.join()


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for /proc/self/task of a process with one native thread, number 1000001."""
    monkeypatch.setattr(threads, "TASKS", tmp_path)
    (tmp_path / "1000001").mkdir()
    return tmp_path


def test_a_thread_that_was_there_before_may_end(tasks: Path) -> None:
    watch = ThreadWatch()
    watch.forming()
    (tasks / "1000002").mkdir()
    watch.formed()
    (tasks / "1000001").rmdir()
    assert not watch.stopped()


def test_the_end_of_a_thread_of_the_group_is_seen(tasks: Path) -> None:
    watch = ThreadWatch()
    watch.forming()
    (tasks / "1000002").mkdir()
    (tasks / "1000003").mkdir()
    watch.formed()
    assert not watch.stopped()
    (tasks / "1000003").rmdir()
    assert watch.stopped()


def test_the_next_group_has_threads_of_its_own(tasks: Path) -> None:
    watch = ThreadWatch()
    watch.forming()
    (tasks / "1000002").mkdir()
    watch.formed()
    (tasks / "1000002").rmdir()
    watch.forming()
    (tasks / "1000003").mkdir()
    watch.formed()
    assert not watch.stopped()


def test_where_threads_cannot_be_seen_nothing_has_stopped(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "TASKS", tasks / "nowhere")
    watch = ThreadWatch()
    watch.forming()
    watch.formed()
    assert not watch.stopped()
