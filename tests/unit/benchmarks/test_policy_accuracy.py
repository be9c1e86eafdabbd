"""The script ``policy_accuracy.py``: its command line, the order of its runs, and what it prints. No job is started."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import policy_accuracy
from benchmarks.accuracy_runs import Run, Task
from benchmarks.common import BenchmarkError
from benchmarks.policy_accuracy import POLICIES, main, parsed, report, run_all, show, tasks
from tests.unit.benchmarks.made import clean, killed, result


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Console:
    """Keeps what is printed, as on a narrow terminal."""
    console = Console(highlight=False, record=True, width=80)
    monkeypatch.setattr(policy_accuracy, "console", console)
    return console


def given(*arguments: str) -> list[str]:
    return ["--data", "somewhere", *arguments]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is said of a wrong command line."""
    with pytest.raises(SystemExit) as left:
        parsed(arguments)
    assert left.value.code == 2
    return capsys.readouterr().err


# --- the command line ------------------------------------------------------------------------------------------------


def test_the_data_have_to_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--data" in refused(capsys)


def test_defaults() -> None:
    arguments = parsed(given())
    assert (arguments.seeds, arguments.kills, arguments.workers) == (5, 3, 4)
    assert arguments.policy == list(POLICIES)


def test_quick_is_one_seed_and_a_few_samples() -> None:
    arguments = parsed(given("--quick", "--seeds", "4"))
    assert arguments.seeds == 1
    assert arguments.samples < 15_000


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--policy", "rolback"], "there is no recovery policy 'rolback'; installed: auto, checkpoint_restart, lossy"),
        (["--policy", "lossy_forward(missing='all')"], "missing is 'all'; it must be one of"),
        (["--policy", ""], "cannot read the recovery policy ''"),
        (["--kills", "4"], "--kills 4 leaves nobody of --workers 4"),
        (["--kills", "0"], "--kills is 0; it must be at least 1"),
        (["--seeds", "0"], "--seeds is 0; it must be at least 1"),
        (["--samples", "60001"], "--samples is 60001; MNIST has 1 to 60000"),
        (["--samples", "2560"], "10 steps are too few for 3 kills"),
        (["--json", "/no/such/folder/x.json"], "--json /no/such/folder/x.json cannot be written"),
        (["--png", "/"], "--png / cannot be written"),
    ],
)
def test_what_is_wrong_is_said_before_any_job_starts(
    capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert told in refused(capsys, *given(*arguments))


def test_missing_data_are_noticed_before_any_job_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.argv", ["policy_accuracy.py", "--data", str(tmp_path)])
    monkeypatch.setattr(policy_accuracy, "run_workers", lambda *_, **__: pytest.fail("a job was started"))
    with pytest.raises(BenchmarkError, match=r"neither train-images-idx3-ubyte.gz nor"):
        main()


# --- the runs --------------------------------------------------------------------------------------------------------


def by_seed(todo: Sequence[Task], seed: int) -> list[Task]:
    return [task for task in todo if task.seed == seed]


def test_all_policies_of_a_seed_get_the_same_kills_and_another_seed_others() -> None:
    todo = tasks(parsed(given("--seeds", "2")))
    plans = [{task.plan for task in by_seed(todo, seed) if task.policy} for seed in (1, 2)]
    assert [len(plan) for plan in plans] == [1, 1]
    assert plans[0] != plans[1]
    assert all(len(plan) == 3 for (plan,) in plans)


def test_each_seed_has_one_run_without_failures_and_one_for_each_policy() -> None:
    for seed in (1, 2):
        first, *others = by_seed(tasks(parsed(given("--seeds", "2"))), seed)
        assert (first.policy, first.plan) == ("", ())
        assert sorted(task.policy for task in others) == sorted(POLICIES)


def test_each_policy_has_its_turn_to_be_first() -> None:
    todo = tasks(parsed(given("--seeds", "4")))
    assert [by_seed(todo, seed)[1].policy for seed in (1, 2, 3, 4)] == list(POLICIES)


def test_which_policies_may_lose_something() -> None:
    todo = tasks(parsed(given("--policy", "rollback", "--policy", "lossy_forward(at_most=1, within=9.0) | rollback")))
    assert [task.lossy for task in by_seed(todo, 1)] == [False, False, True]


def test_a_run_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch, printed: Console) -> None:
    def run(task: Task, data: Path, folder: Path) -> Run:
        if task.policy == "lossy_forward":
            raise BenchmarkError("it went wrong")
        return killed(task.seed, task.policy, 98.0, 0.25) if task.policy else clean(task.seed, 98.0)

    monkeypatch.setattr(policy_accuracy, "run", run)
    policies = ["--policy", "lossy_forward", "--policy", "rollback"]
    arguments = parsed(given("--seeds", "1", *policies))
    runs, failures = run_all(tasks(arguments), Path(), Path())
    assert [done.policy for done in runs] == ["", "rollback"]
    assert failures == ["run 2 of 3, seed 1, lossy_forward: it went wrong"]
    assert "98.00 %, 25 s, gaps 0.25 s" in printed.export_text()
    assert not any(report(runs, failures, arguments)["goals"].values())


# --- the report ------------------------------------------------------------------------------------------------------


def test_the_report_is_json_and_holds_the_kills_of_each_seed() -> None:
    arguments = parsed(given("--seeds", "1", "--policy", "rollback"))
    told = json.loads(json.dumps(report([clean(1, 98.0), killed(1, "rollback", 98.5, 0.2)], [], arguments)))
    assert told["policies"]["rollback"]["accuracies"] == [98.5]
    assert len(told["plans"]["1"]) == 3
    assert told["steps"] == 235
    assert told["machine"]["cores"] >= 1


def test_a_quick_run_meets_no_goal_and_says_why(printed: Console) -> None:
    arguments = parsed(given("--quick", "--policy", "rollback"))
    show(report([clean(1, 98.0), killed(1, "rollback", 98.0, 0.2)], [], arguments))
    text = printed.export_text()
    assert "goal" not in text
    assert "these accuracies mean nothing" in text


def test_the_table_fits_a_narrow_terminal_and_says_whether_the_goal_is_met(printed: Console) -> None:
    show(result())
    text = printed.export_text()
    for cell in ("97.25..97.50", "-0.50", "+0.10", "0.20..0.40", "3 again", "2 lossy", "60", "of 80"):
        assert cell in text
    assert "within 1 point of the failure-free run in every seed: met" in text
    assert "…" not in text


def test_a_goal_that_is_not_met(printed: Console) -> None:
    told: dict[str, Any] = result(goals={"within 1 point of the failure-free run in every seed": False})
    show(told)
    assert "in every seed: NOT met" in printed.export_text()
