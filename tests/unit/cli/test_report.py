"""The report on a run: what it reads, what it prints, what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from horovod_ft.agreement import GENERATIONS
from tests.unit.cli.conftest import Call
from tests.unit.cli.made import Run, lost_one


def row(out: str, start: str) -> str:
    """The words of the first row of a table that begins with a text."""
    return " ".join(next(line for line in out.splitlines() if line.strip().startswith(start)).split())


# --- reading -------------------------------------------------------------------------------------------------------


def test_a_folder_that_does_not_exist(call: Call, tmp_path: Path) -> None:
    told = call("report", str(tmp_path / "none"))
    assert (told.code, told.err) == (2, f"horovod-ft: there is no folder {tmp_path / 'none'}\n")


def test_a_folder_without_events(call: Call, tmp_path: Path) -> None:
    told = call("report", str(tmp_path))
    assert told.code == 2
    assert f"run the job with HOROVOD_FT_EVENTS={tmp_path}" in told.err


def test_a_run_that_recorded_nothing(call: Call, tmp_path: Path) -> None:
    (tmp_path / "events-a-0-1.jsonl").touch()
    told = call("report", str(tmp_path))
    assert told.code == 2
    assert "holds no events" in told.err


def test_the_folder_above_will_do(call: Call, tmp_path: Path) -> None:
    lost_one().write(tmp_path / "events")
    assert call("report", "--no-png", str(tmp_path)).code == 0


def test_a_damaged_line_is_passed_over(call: Call, tmp_path: Path) -> None:
    lost_one().write(tmp_path)
    with next(iter(tmp_path.glob("events-*"))).open("a") as file:
        file.write('{"kind": "resu')
    told = call("report", "--no-png", str(tmp_path))
    assert told.code == 0
    assert row(told.out, "1   ") == "1 5.010 4 1 1 2 0.200"


def test_a_file_that_is_no_text(call: Call, tmp_path: Path) -> None:
    lost_one().write(tmp_path)
    (tmp_path / "events-x-9-9.jsonl").write_bytes(b"\xff\xfe\x00")
    told = call("report", "--no-png", str(tmp_path))
    assert told.code == 2
    assert "cannot read the events" in told.err


def test_two_runs_in_one_folder(call: Call, tmp_path: Path) -> None:
    run = lost_one()
    run.add(20.0, "formed", "node0:0:555")
    told = call("report", "--no-png", str(run.write(tmp_path)))
    assert told.code == 2
    assert "more than one run" in told.err


def test_a_newcomer_with_a_start_rank_that_was_used_is_no_second_run(call: Call, tmp_path: Path) -> None:
    run = lost_one()
    run.add(7.0, "joined", "node9:1:900", generation=2, rank=2)
    assert call("report", "--no-png", str(run.write(tmp_path))).code == 0


# --- tables --------------------------------------------------------------------------------------------------------


def test_the_story(call: Call, tmp_path: Path) -> None:
    out = call("report", "--no-png", str(lost_one().write(tmp_path))).out
    assert row(out, "1.000") == "1.000 0 training begins with 3 workers 0, 1, 2"
    assert row(out, "5.000") == "5.000 4 fault: kill worker 1 at step 5 in backward 1"
    assert row(out, "9.000") == "9.000 20 finished 0, 2"


def test_the_sizes(call: Call, tmp_path: Path) -> None:
    assert "Workers over time: 3 -> 2\n" in call("report", "--no-png", str(lost_one().write(tmp_path))).out


def test_recoveries_and_their_stages(call: Call, tmp_path: Path) -> None:
    out = call("report", "--no-png", str(lost_one().write(tmp_path))).out
    recovery, median, slowest = [line.split() for line in out.splitlines() if line.strip()[:1].isdigit()][-3:]
    assert recovery == ["1", "5.010", "4", "1", "1", "2", "0.200"]
    assert median == ["1", "27.0", "2.0", "3.0", "97.0", "10.0", "1.0", "10.0", "49.0"]
    assert slowest == median[1:]


def test_a_stage_that_did_not_happen_is_a_dash(call: Call, tmp_path: Path) -> None:
    run = Run().form(2)
    run.recover(0, 5.0, lost=[1], size=1, resumed=False)
    out = call("report", "--no-png", str(run.write(tmp_path))).out
    assert [line.split()[-1] for line in out.splitlines() if line.strip().startswith("1   ")] == ["0.151", "-"]


def test_a_run_without_failures(call: Call, tmp_path: Path) -> None:
    out = call("report", "--no-png", str(Run().form(2).write(tmp_path))).out
    assert "No recovery: no worker came through a failure." in out


def test_a_run_that_formed_no_group(call: Call, tmp_path: Path) -> None:
    run = Run()
    run.add(0.0, "init", 0)
    assert "Workers over time: no group formed" in call("report", "--no-png", str(run.write(tmp_path))).out


def test_tables_fit_into_eighty_columns(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = call("report", "--no-png", str(lost_one().write(tmp_path))).out
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out


# --- ledger --------------------------------------------------------------------------------------------------------


def ledger(folder: Path, ids: list[int]) -> Path:
    """One worker, one step, a dataset of two samples."""
    folder.mkdir(parents=True)
    records: list[dict[str, object]] = [
        {"kind": "stream", "length": 2, "drop_last": False},
        {"kind": "dealt", "step": 1, "generation": 0, "rank": 0, "size": 1, "epoch": 0, "ids": ids},
        {"kind": "committed", "step": 1, "generation": 0, "ranges": [[0, 0, 2]]},
    ]
    (folder / "ledger-a-0-1.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_a_ledger_beside_the_events_is_verified(call: Call, tmp_path: Path) -> None:
    ledger(tmp_path / "ledger", [0, 1])
    out = call("report", "--no-png", str(lost_one().write(tmp_path / "events"))).out
    assert "Ledger: 1 steps, 2 samples, 1 complete epochs: no sample was lost or repeated" in out


def test_a_ledger_that_is_not_exact_says_why(call: Call, tmp_path: Path) -> None:
    ledger(tmp_path / "ledger", [0, 0])
    out = call("report", "--no-png", str(lost_one().write(tmp_path))).out
    assert "not exact" in out
    assert "1 samples were trained on more than once" in out


def test_samples_that_lost_weight_are_told(call: Call, tmp_path: Path) -> None:
    place = ledger(tmp_path / "ledger", [0, 1])
    lossy = {"kind": "lossy", "step": 1, "generation": 0, "ids": [1], "elements": 3, "of": 4}
    (place / "ledger-b-1-2.jsonl").write_text(json.dumps(lossy) + "\n")
    out = call("report", "--no-png", str(lost_one().write(tmp_path / "events"))).out
    assert "every sample accounted for, and some lost weight" in out
    assert "step 1: 1 samples do not count in 75% of the update" in out


def test_a_ledger_elsewhere(call: Call, tmp_path: Path) -> None:
    place = ledger(tmp_path / "elsewhere", [0, 1])
    told = call("report", "--no-png", "--ledger", str(place), str(lost_one().write(tmp_path / "run")))
    assert "no sample was lost or repeated" in told.out


def test_a_folder_that_was_named_and_holds_no_ledger(call: Call, tmp_path: Path) -> None:
    told = call("report", "--no-png", "--ledger", str(tmp_path), str(lost_one().write(tmp_path / "run")))
    assert told.code == 2
    assert "holds no ledger" in told.err


def test_a_damaged_ledger(call: Call, tmp_path: Path) -> None:
    (ledger(tmp_path / "ledger", [0]) / "ledger-b-1-2.jsonl").write_text('{"kind": "dealt"}\n')
    told = call("report", "--no-png", str(lost_one().write(tmp_path)))
    assert told.code == 2
    assert "is damaged" in told.err


def test_no_ledger_or_an_empty_one_is_not_mentioned(call: Call, tmp_path: Path) -> None:
    folder = str(lost_one().write(tmp_path))
    assert "Ledger" not in call("report", "--no-png", folder).out
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / "ledger-a-0-1.jsonl").touch()
    assert "Ledger" not in call("report", "--no-png", folder).out


# --- chart ---------------------------------------------------------------------------------------------------------


def test_the_chart_lies_in_the_folder(call: Call, tmp_path: Path) -> None:
    told = call("report", str(lost_one().write(tmp_path)))
    assert told.code == 0
    assert f"Chart: {tmp_path / 'report.png'}" in told.out
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_or_where_it_is_wanted(call: Call, tmp_path: Path) -> None:
    call("report", "--png", str(tmp_path / "x.png"), str(lost_one().write(tmp_path / "run")))
    assert (tmp_path / "x.png").exists()
    assert not (tmp_path / "run" / "report.png").exists()


def test_or_is_not_drawn(call: Call, tmp_path: Path) -> None:
    told = call("report", "--no-png", str(lost_one().write(tmp_path)))
    assert "Chart" not in told.out
    assert not (tmp_path / "report.png").exists()


def test_it_cannot_be_wanted_and_not_wanted(call: Call, tmp_path: Path) -> None:
    assert call("report", "--no-png", "--png", "x.png", str(tmp_path)).code == 2


def test_without_matplotlib_the_tables_are_printed_and_it_says_how_to_get_the_chart(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "horovod_ft.cli.chart", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    told = call("report", str(lost_one().write(tmp_path)))
    assert told.code == 0
    assert "Recoveries" in told.out
    assert "pip install 'horovod_ft[report]', or use --no-png" in told.out
    assert not (tmp_path / "report.png").exists()


def test_steps_that_were_computed_again_after_going_back_are_told(call: Call, tmp_path: Path) -> None:
    file = ledger(tmp_path / "ledger", [0, 1]) / "ledger-a-0-1.jsonl"
    again = [
        {"kind": "back", "step": 0, "generation": 1},
        {"kind": "dealt", "step": 1, "generation": 1, "rank": 0, "size": 1, "epoch": 0, "ids": [0, 1]},
        {"kind": "committed", "step": 1, "generation": 1, "ranges": [[0, 0, 2]]},
    ]
    file.write_text(file.read_text() + "".join(json.dumps(record) + "\n" for record in again))
    out = call("report", "--no-png", str(lost_one().write(tmp_path / "events"))).out
    assert "no sample was lost or repeated\n  1 step computed again, after going back to a copy" in out


def test_two_attempts_at_a_job_are_one_run(call: Call, tmp_path: Path) -> None:
    run = lost_one()
    run.add(20.0, "formed", "node0:0:555", generation=GENERATIONS)
    told = call("report", "--no-png", str(run.write(tmp_path)))
    assert told.code == 0
    assert row(told.out, "1   ") == "1 5.010 4 1 1 2 0.200"
