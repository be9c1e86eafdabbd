"""Which endings are worth another attempt: by the launcher's status, and by the error that ended it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from horovod_ft.agent.outcome import LOST, Ending, Verdict, describe, ending, judge

#: As ``launch_gloo_elastic`` of Horovod 0.28.1 words it.
SUMMARY = (
    "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be terminated. "
    "The first process to do so was:\nProcess name: {name}\nExit code: {code}\n"
)


def failed(status: object, worker: str = "node7[0]") -> Ending:
    return Ending(1, "RuntimeError", SUMMARY.format(name=worker, code=status))


def judged(end: Ending, *, ran_before: bool = False) -> Verdict:
    return judge(end, ran_before=ran_before)


# --- the first worker to fail --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", LOST)
def test_a_worker_that_was_lost(number: signal.Signals) -> None:
    assert judged(failed(128 + number)) == Verdict(True, f"worker node7[0] was ended by {number.name}")


def test_the_process_between_launcher_and_worker_was_lost() -> None:
    assert judged(failed(-9)) == Verdict(True, "worker node7[0] was ended by SIGKILL")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGILL, signal.SIGFPE, signal.SIGSYS])
def test_signals_that_come_again_or_are_meant(number: signal.Signals) -> None:
    assert judged(failed(128 + number)) == Verdict(False, f"worker node7[0] was ended by {number.name}")


def test_a_number_that_is_no_signal() -> None:
    assert judged(failed(128 + 100)) == Verdict(False, "worker node7[0] was ended by signal 100")


def test_a_worker_that_asks_for_another_attempt() -> None:
    assert judged(failed(75)) == Verdict(True, "worker node7[0] asked for another attempt, with status 75")


def test_a_host_that_ssh_has_lost() -> None:
    verdict = judged(failed(255))
    assert verdict.recoverable
    assert verdict.reason.startswith("the connection to worker node7[0] was lost")


@pytest.mark.parametrize("status", [1, 2, 3, 126, 127, 128])
def test_a_status_of_the_scripts_own(status: int) -> None:
    verdict = judged(failed(status), ran_before=True)
    assert verdict == Verdict(False, f"worker node7[0] ended with status {status}, which is of the script's own making")


def test_a_job_that_is_not_elastic_names_workers_by_number() -> None:
    assert judged(failed(137, worker="0")) == Verdict(True, "worker 0 was ended by SIGKILL")


def test_a_status_that_horovod_has_lost_is_not_guessed() -> None:
    assert not judged(failed(None)).recoverable


# --- the launcher itself -------------------------------------------------------------------------------------------


def test_a_launcher_that_was_lost() -> None:
    assert judged(Ending(-9)) == Verdict(True, "the launcher was ended by SIGKILL")


def test_a_launcher_that_was_stopped_by_hand() -> None:
    assert judged(Ending(-2)) == Verdict(False, "the launcher was ended by SIGINT")


def test_wrong_arguments() -> None:
    assert judged(Ending(2), ran_before=True) == Verdict(False, "the launcher ended with status 2")


@pytest.mark.parametrize("error", ["ValueError", "RuntimeError", "OSError"])
def test_any_other_error_is_told_in_one_line(error: str) -> None:
    end = Ending(1, error, "no such host\nand much more")
    assert judged(end, ran_before=True) == Verdict(False, f"the launcher failed: {error}: no such host")


def test_too_few_hosts_at_first_are_a_mistake_and_later_a_misfortune() -> None:
    end = Ending(1, "TimeoutException", "Timed out waiting for minimum number of slots to become available.")
    assert not judged(end).recoverable
    assert judged(end, ran_before=True).recoverable
    assert "too few hosts: Timed out" in judged(end).reason


# --- the file ------------------------------------------------------------------------------------------------------


def test_an_error_arrives_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "outcome.json"
    file.write_text(describe(RuntimeError('two\nlines, "quoted"')))
    assert ending(1, file) == Ending(1, "RuntimeError", 'two\nlines, "quoted"')


@pytest.mark.parametrize("text", [None, "", '{"error": "Run', "[]", '{"error": "E"}'])
def test_a_file_that_is_missing_or_cut_short(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "outcome.json"
    if text is not None:
        file.write_text(text)
    assert ending(-9, file) == Ending(-9)
