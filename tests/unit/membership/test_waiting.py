"""A wait in C++ is explained, bounded, and ended when the launcher ends the job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from horovod_ft.errors import TRY_AGAIN
from horovod_ft.membership import waiting
from horovod_ft.membership.waiting import explained_wait

WHAT = "for a friend"


@pytest.fixture(autouse=True)
def _signals_are_as_before() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGTERM)
    yield
    assert signal.getsignal(signal.SIGTERM) is handler
    assert signal.set_wakeup_fd(-1) == -1


def python(body: str, *, explain_after_s: float = 5.0) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own. There it blocks where no Python signal handler can run."""
    script = (
        "import ctypes, os, signal\n"
        "from horovod_ft.membership import waiting\n"
        f"waiting.EXPLAIN_AFTER_S = {explain_after_s}\n"
        "block_in_c = lambda: [ctypes.CDLL(None).pause() for _ in range(10**6)]\n" + body
    )
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)


def test_a_body_that_ends_in_time_is_left_alone(capfd: pytest.CaptureFixture[str]) -> None:
    with explained_wait(WHAT, 60):
        pass
    assert capfd.readouterr().err == ""


def test_an_exception_of_the_body_goes_through() -> None:
    with pytest.raises(KeyError), explained_wait(WHAT, 60):
        raise KeyError


def test_nothing_is_left_open() -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    with explained_wait(WHAT, 60):
        pass
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert threading.active_count() == threads


def test_a_long_wait_is_explained_once(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    told = threading.Event()

    def tell(text: str, **options: Any) -> None:
        print(text, **options)
        told.set()

    monkeypatch.setattr(waiting, "EXPLAIN_AFTER_S", 0.01)
    monkeypatch.setattr(waiting, "print", tell, raising=False)
    with explained_wait(WHAT, 60):
        assert told.wait(10)
    assert capfd.readouterr().err == "horovod_ft: has waited 0 s for a friend.\n"


def test_at_its_bound_the_process_ends_with_a_message() -> None:
    ended = python(f"with waiting.explained_wait({WHAT!r}, 0.05): block_in_c()")
    assert (ended.returncode, ended.stderr) == (TRY_AGAIN, "horovod_ft: gave up: waited 0 s for a friend.\n")


def test_the_bound_counts_after_the_explanation_too() -> None:
    ended = python(f"with waiting.explained_wait({WHAT!r}, 0.1): block_in_c()", explain_after_s=0.01)
    assert ended.returncode == TRY_AGAIN == 75
    assert ended.stderr == "horovod_ft: has waited 0 s for a friend.\nhorovod_ft: gave up: waited 0 s for a friend.\n"


TERM = """
with waiting.explained_wait('for a friend', 60):
    os.kill(os.getpid(), signal.SIGTERM)
    block_in_c()
"""


def test_the_launcher_ending_the_job_ends_the_wait() -> None:
    ended = python(TERM)
    assert ended.returncode == TRY_AGAIN
    assert "the launcher ended the job while this worker waited 0." in ended.stderr
    assert "s for a friend." in ended.stderr


def test_the_users_own_handler_does_not_keep_the_wait_alive() -> None:
    ended = python("signal.signal(signal.SIGTERM, lambda *_: None)\n" + TERM)
    assert ended.returncode == TRY_AGAIN


def test_other_signals_do_not_end_the_wait() -> None:
    harmless = TERM.replace("SIGTERM", "SIGUSR1").replace("60", "0.2")
    ended = python("signal.signal(signal.SIGUSR1, lambda *_: None)\n" + harmless)
    assert "gave up" in ended.stderr


def test_a_handler_of_the_user_is_there_again_afterwards() -> None:
    def handler(number: int, frame: object) -> None:
        """Does nothing."""

    old = signal.signal(signal.SIGTERM, handler)
    try:
        with explained_wait(WHAT, 60):
            assert signal.getsignal(signal.SIGTERM) is handler
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, old)


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    seen: list[object] = []

    def wait() -> None:
        with explained_wait(WHAT, 60):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]
