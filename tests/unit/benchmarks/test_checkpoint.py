"""The script ``checkpoint.py``: which jobs it runs, and what it makes of their lines. No job is started."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from benchmarks import checkpoint
from benchmarks.checkpoint import Round, case, check_disk, main, missing_memory, summarized
from benchmarks.common import BenchmarkError

STEP_S = 0.1


class Made:
    """Lines of one round, by a clock that goes on with each step."""

    def __init__(self, number: int = 1, workers: int = 1) -> None:
        self.lines: list[dict[str, Any]] = []
        self.now = 100.0
        self._round = number
        self._workers = workers

    def step(self, side: str = "plain", seconds: float = STEP_S) -> Made:
        self.add("step", side, began=self.now, ended=self.now + seconds)
        self.now += seconds
        return self

    def plain(self) -> Made:
        for seconds in (STEP_S, 5 * STEP_S, STEP_S):
            self.step(seconds=seconds)
        return self

    def save(self, side: str, blocked_s: float = 0.5, steps: tuple[float, ...] = (), nbytes: int = 7) -> Made:
        """Training is held up, goes on for steps of so many seconds, and takes one more once the save is over.

        Each worker is held up for less and writes less than the one before.
        """
        began = self.now
        self.now += blocked_s
        for seconds in steps:
            self.step(side, seconds)
        for rank in range(self._workers):
            self.add("save", side, rank, began=began + rank, ended=self.now + rank, blocked_s=blocked_s / (rank + 1),
                     nbytes=nbytes - rank)  # fmt: skip
        return self.step(side)

    def restore(self, side: str, seconds: float = 0.25) -> Made:
        for rank in range(self._workers):
            self.add("restore", side, rank, seconds=seconds - 0.1 * rank)
        return self

    def add(self, what: str, side: str, rank: int = 0, **values: float) -> None:
        self.lines.append({"what": what, "round": self._round, "side": side, "rank": rank, **values})

    def copy(self) -> Made:
        for rank in range(self._workers):
            self.add("copy", "plain", rank, seconds=0.06 - 0.01 * rank)
        return self

    def round(self) -> Round:
        return Round.of(self.lines)


def whole(number: int = 1, workers: int = 1, ours_s: float = 0.1, **ours: Any) -> Made:
    """All sides, one after the other: ours is over during a third step, async DCP takes twice as long for a step."""
    made = Made(number, workers)
    made.plain().save("ours", ours_s, **{"steps": (STEP_S, STEP_S), **ours})
    made.plain().save("torch", 2.0)
    made.plain().save("dcp", 0.4, steps=(2 * STEP_S, 2 * STEP_S))
    return made.restore("ours", 0.2).restore("torch", 0.3).restore("dcp", 0.4).copy()


def result(*rounds: Made, size_mb: int = 200) -> dict[str, Any]:
    return case(size_mb, 1, [whole(0).round(), *(made.round() for made in rounds)])


# --- a round -------------------------------------------------------------------------------------------------------


def test_the_slowest_worker_counts() -> None:
    made = whole(workers=3).round()
    assert (made.blocked_s("torch"), made.written("torch"), made.restore_s("torch")) == (2.0, 7, 0.3)
    assert made.copy_s() == 0.06


def test_a_save_lasts_as_long_as_worker_0_says() -> None:
    assert whole(workers=3).round().save_s("ours") == pytest.approx(0.1 + 2 * STEP_S)


def test_steps_beside_a_save_are_those_that_lie_wholly_in_it() -> None:
    assert whole().round().beside("dcp") == pytest.approx([2, 2])


def test_no_step_lies_in_a_save_that_training_waits_for() -> None:
    assert whole().round().beside("torch") == []


def test_lost_is_what_steps_took_longer_and_what_lay_between_them() -> None:
    made = whole().round()
    assert made.lost_s("torch") == pytest.approx(2.0)
    assert made.lost_s("dcp") == pytest.approx(0.4 + 2 * STEP_S)


def test_a_save_that_begins_within_a_step_costs_what_that_step_takes_longer() -> None:
    """As ours does, at the end of one."""
    made = Made().plain()
    made.add("save", "ours", began=made.now + 0.08, ended=made.now + 0.25, blocked_s=0.1, nbytes=1)
    made.step("ours", 0.2).step("ours").step("ours")
    made.save("torch").save("dcp").restore("ours").restore("torch").restore("dcp").copy()
    assert made.round().lost_s("ours") == pytest.approx(0.1)


@pytest.mark.parametrize(("what", "side"), [("save", "dcp"), ("restore", "dcp"), ("copy", "plain")])
def test_a_record_that_is_not_whole(what: str, side: str) -> None:
    lines = [line for line in whole().lines if (line["what"], line["side"]) != (what, side)]
    with pytest.raises(BenchmarkError, match="record"):
        Round.of(lines)


# --- all rounds of a job -------------------------------------------------------------------------------------------


def test_the_round_to_warm_up_does_not_count() -> None:
    found = case(200, 2, [whole(0, ours_s=9.0).round(), whole(1).round(), whole(2).round()])
    ours = found["sides"]["ours"]
    assert (found["case"], found["workers"]) == ("200 MB, 2 workers", 2)
    assert (ours["first_blocked_s"], ours["blocked_s"]["max"], ours["blocked_s"]["count"]) == (9.0, 0.1, 2)


def test_speed_is_that_of_steps_beside_a_save_by_that_of_plain_ones() -> None:
    sides = result(whole())["sides"]
    assert sides["ours"]["speed"] == pytest.approx(1.0)
    assert sides["dcp"]["speed"] == pytest.approx(0.5)
    assert sides["torch"]["speed"] is None
    assert sides["dcp"]["steps_beside"] == 2


def test_ratios_are_medians_of_the_rounds_ratios() -> None:
    ratios = result(whole(1, ours_s=0.1), whole(2, ours_s=0.05), whole(3, ours_s=0.4))["ratios"]
    assert ratios["blocked: torch.save / ours"] == pytest.approx(20)
    assert ratios["blocked: async DCP / ours"] == pytest.approx(4)
    assert ratios["restore: torch.save / ours"] == pytest.approx(1.5)


def test_there_is_no_ratio_to_nothing() -> None:
    """Where a save cost nothing that can be told from noise."""
    ratios = result(whole(ours_s=0.0, steps=(0.9 * STEP_S,)))["ratios"]
    assert ratios["lost: torch.save / ours"] is None


# --- the goals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "missed"),
    [
        ({}, []),
        ({"ours_s": 0.101}, ["blocked: torch.save / ours >= 20"]),
        ({"ours_s": 0.5}, ["blocked: torch.save / ours >= 20", "blocked: async DCP / ours >= 1"]),
        ({"steps": (1.1 * STEP_S,)}, ["speed while saving >= 0.95"]),
    ],
)
def test_goals(ours: dict[str, Any], missed: list[str]) -> None:
    goals = summarized([result(whole(**{"ours_s": 0.099, **ours}))])["goals"]
    assert len(goals) == 5
    assert [goal for goal, met in goals.items() if not met] == missed


def test_the_worst_case_decides() -> None:
    found = summarized([result(whole()), result(whole(ours_s=0.5), size_mb=2000)])
    assert found["least"]["blocked: torch.save / ours"]["case"] == "2000 MB, 1 worker"
    assert not found["goals"]["blocked: torch.save / ours >= 20"]


def test_there_is_no_goal_for_what_was_not_seen() -> None:
    """A save that is over before a step is says nothing about the speed of steps."""
    goals = summarized([result(whole(steps=()))])["goals"]
    assert "speed while saving >= 0.95" not in goals


# --- the jobs ------------------------------------------------------------------------------------------------------


class Jobs:
    """Stands for ``run_workers``: worker 0 leaves its lines, and a checkpoint. Jobs of so many workers fail."""

    def __init__(self, failing: tuple[int, ...] = ()) -> None:
        self.run: list[tuple[int, int]] = []
        self.files: list[Path] = []
        self.fixed_hosts: list[bool] = []
        self._failing = failing

    def __call__(self, module: str, arguments: list[str], workers: int, folder: Path, **options: Any) -> None:
        assert (module, arguments[0]) == ("checkpoint", str(folder))
        self.run.append((int(arguments[2]), workers))
        self.fixed_hosts.append(options["fixed_hosts"])
        self.files.append(Path(arguments[1]))
        (self.files[-1] / "shard").touch()
        if workers in self._failing:
            raise BenchmarkError("it failed")
        folder.mkdir()
        lines = [line for number in range(int(arguments[3]) + 1) for line in whole(number).lines]
        (folder / "lines-0.jsonl").write_text("\n".join(map(json.dumps, lines)))


class Script:
    """``main`` with a machine of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self.available = 10**12
        self._patch = monkeypatch.setattr
        self._patch(checkpoint, "console", SimpleNamespace(print=lambda text: self.said.append(str(text))))
        self._patch(psutil, "virtual_memory", lambda: SimpleNamespace(available=self.available, total=1))
        self.jobs = Jobs()

    def __call__(self, *arguments: str) -> int:
        self._patch(checkpoint, "run_workers", self.jobs)
        self._patch(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**12))
        self._patch("sys.argv", ["checkpoint.py", *arguments])
        return main()


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return Script(monkeypatch)


def test_a_job_for_each_size_and_number_of_workers(script: Script, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    assert script("--sizes", "200", "1000", "--workers", "1", "2", "--rounds", "2", "--json", str(file)) == 0
    assert script.jobs.run == [(200_000_000, 1), (200_000_000, 2), (1_000_000_000, 1), (1_000_000_000, 2)]
    written = json.loads(file.read_text())
    assert [one["case"] for one in written["cases"]][:2] == ["200 MB, 1 worker", "200 MB, 2 workers"]
    assert written["cases"][0]["sides"]["ours"]["restore_s"]["count"] == 2


def test_one_worker_needs_a_discovery_script(script: Script) -> None:
    script("--sizes", "200", "--workers", "1", "2")
    assert script.jobs.fixed_hosts == [False, True]


@pytest.mark.parametrize("failing", [(), (2,)])
def test_checkpoints_are_put_where_the_user_says_and_do_not_stay(
    script: Script, tmp_path: Path, failing: tuple[int, ...]
) -> None:
    script.jobs = Jobs(failing)
    script("--sizes", "200", "--workers", "2", "--folder", str(tmp_path))
    assert script.jobs.files[0].is_relative_to(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_fails_does_not_stop_the_others(script: Script, tmp_path: Path) -> None:
    script.jobs = Jobs(failing=(2,))
    file = tmp_path / "result.json"
    assert script("--sizes", "200", "--workers", "1", "2", "4", "--json", str(file)) == 1
    written = json.loads(file.read_text())
    assert [one["workers"] for one in written["cases"]] == [1, 4]
    assert written["failures"] == ["it failed"]


def test_a_case_that_does_not_fit_into_memory_is_left_out_and_told(script: Script, tmp_path: Path) -> None:
    script.available = 4 * 10**9
    file = tmp_path / "result.json"
    script("--sizes", "200", "2000", "--workers", "2", "--json", str(file))
    assert script.jobs.run == [(200_000_000, 2)]
    assert "2000 MB with 2 workers needs 11 GB" in json.loads(file.read_text())["left_out"][0]


def test_nothing_fits(script: Script, tmp_path: Path) -> None:
    script.available = 10
    file = tmp_path / "result.json"
    assert script("--sizes", "200", "--workers", "1", "--json", str(file)) == 1
    assert not file.exists()


def test_the_table_has_all_cases_and_goals(script: Script) -> None:
    script("--sizes", "200", "--workers", "1", "4")
    expected = "200 MB, 1 worker, steps of 100 ms, plain copy 0.0600 s: blocked: torch.save / ours 20.00"
    assert expected in "\n".join(script.said)
    assert sum("goal: " in text for text in script.said) == 5


@pytest.mark.parametrize(
    "wrong",
    [["--rounds", "0"], ["--rounds", "9"], ["--workers", "0"], ["--sizes", "19"], ["--folder", "/nowhere/at/all"]],
)
def test_wrong_arguments(wrong: list[str], script: Script) -> None:
    with pytest.raises(SystemExit) as left:
        script(*wrong)
    assert (left.value.code, script.jobs.run) == (2, [])


def test_memory_that_is_just_enough() -> None:
    assert missing_memory(1000, 2, 5_800_000_000) == ""
    assert missing_memory(1000, 2, 5_799_999_999) != ""


def test_a_disk_that_is_too_small(tmp_path: Path) -> None:
    check_disk(tmp_path, 1000, 4_500_000_000)
    with pytest.raises(BenchmarkError, match="--folder"):
        check_disk(tmp_path, 1000, 4_499_999_999)
