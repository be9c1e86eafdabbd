"""The script ``init_scale.py``: which jobs it runs, and what it makes of their seconds. No job is started."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import init_scale
from benchmarks.init_scale import OURS, STOCK, main, measure, summarized


class Jobs:
    """Stands for ``run_workers``: each worker leaves its seconds."""

    def __init__(self, ours_s: float = 0.5) -> None:
        self.ours_s = ours_s
        self.run: list[tuple[str, int]] = []

    def __call__(self, module: str, arguments: list[str], workers: int, folder: Path, **options: Any) -> None:
        assert (module, arguments[1]) == ("init", str(workers))
        stock = options["launcher"] is None
        self.run.append((STOCK if stock else OURS, workers))
        folder.mkdir()
        for rank in range(workers):
            slowest = rank == workers - 1
            seconds = [(4.0 if stock else self.ours_s) if slowest else 0.1] * int(arguments[2])
            (folder / f"init-{rank}.json").write_text(json.dumps(seconds))


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Jobs:
    fake = Jobs()
    monkeypatch.setattr(init_scale, "run_workers", fake)
    monkeypatch.setattr(init_scale, "console", SimpleNamespace(print=lambda *_: None))
    return fake


def test_the_slowest_worker_counts(jobs: Jobs, tmp_path: Path) -> None:
    assert measure(STOCK, 3, 2, tmp_path / "job") == [4.0, 4.0]


def test_launchers_take_turns_and_the_file_has_the_seconds_of_each(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "init.json"
    monkeypatch.setattr("sys.argv", ["init_scale.py", "--sizes", "4", "8", "--times", "2", "--json", str(file)])
    assert main() == 0
    assert jobs.run == [(STOCK, 4), (OURS, 4), (STOCK, 8), (OURS, 8)]
    written = json.loads(file.read_text())
    assert written["init_s"] == {"horovodrun": {"4": 4.0, "8": 4.0}, "horovod-ft run": {"4": 0.5, "8": 0.5}}
    assert written["ratio_median"] == {"4": 8.0, "8": 8.0}
    assert written["goals"] == {"ratio at 8 workers >= 5": True}


@pytest.mark.parametrize(("ours_s", "met"), [(0.8, True), (0.81, False)])
def test_the_goal(ours_s: float, met: bool) -> None:
    result = summarized({STOCK: {8: [4.0, 4.0, 60.0]}, OURS: {8: [ours_s] * 3}})
    assert list(result["goals"].values()) == [met]


def test_without_8_workers_there_is_no_goal() -> None:
    assert summarized({STOCK: {4: [1.0]}, OURS: {4: [1.0]}})["goals"] == {}


@pytest.mark.parametrize("wrong", [["--sizes", "1"], ["--sizes", "17"], ["--times", "0"]])
def test_wrong_arguments(wrong: list[str], monkeypatch: pytest.MonkeyPatch, jobs: Jobs) -> None:
    monkeypatch.setattr("sys.argv", ["init_scale.py", *wrong])
    with pytest.raises(SystemExit) as left:
        main()
    assert (left.value.code, jobs.run) == (2, [])
