"""The chart is drawn and written, whatever the run was like. What its lanes hold: ``test_lanes.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from horovod_ft.cli.chart import draw
from horovod_ft.errors import ConfigurationError
from tests.unit.cli.made import Run, lost_one

Figures = list[Figure]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Figures:
    """The figures that are written, and nothing is: writing a PNG takes most of the time."""
    written: Figures = []

    def keep(self: Figure, target: Path, format: str) -> None:
        written.append(self)

    monkeypatch.setattr(Figure, "savefig", keep)
    return written


def titles(figure: Figure) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes]


def legend(figure: Figure) -> list[str]:
    shown = figure.axes[0].get_legend()
    return [text.get_text() for text in shown.get_texts()] if shown is not None else []


def test_a_png_is_written(tmp_path: Path) -> None:
    draw(lost_one().events, tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="choose another with --png"):
        draw(Run().form(1).events, tmp_path / "none" / "report.png")


def test_a_recovery_gets_a_part_of_its_own(figures: Figures, tmp_path: Path) -> None:
    draw(lost_one().events, tmp_path / "x.png")
    assert titles(figures[0]) == ["The run", "Step 5: worker 1 lost, 2 recovered, gap 200 ms"]


def test_a_run_without_failures_has_the_run_alone(figures: Figures, tmp_path: Path) -> None:
    run = Run().form(2)
    run.add(3.0, "finished", 0)
    draw(run.events, tmp_path / "x.png")
    assert titles(figures[0]) == ["The run"]


def test_every_worker_has_a_lane(figures: Figures, tmp_path: Path) -> None:
    draw(lost_one().events, tmp_path / "x.png")
    assert [tick.get_text() for tick in figures[0].axes[0].get_yticklabels()] == ["worker 0", "worker 1", "worker 2"]


def test_a_recovery_shows_those_who_were_there(figures: Figures, tmp_path: Path) -> None:
    run = lost_one()
    run.add(7.0, "init", 5, rank=2)
    run.add(8.0, "joined", 5, generation=2, rank=2)
    draw(run.events, tmp_path / "x.png")
    whole, zoom = figures[0].axes
    assert (len(whole.get_yticks()), len(zoom.get_yticks())) == (4, 3)


def test_the_legend_names_each_group_once(figures: Figures, tmp_path: Path) -> None:
    draw(lost_one().events, tmp_path / "x.png")
    assert legend(figures[0])[:2] == ["generation 0: 3 workers", "generation 1: 2 workers"]


def test_of_many_recoveries_the_longest_are_shown_in_their_order(figures: Figures, tmp_path: Path) -> None:
    run = Run().form(1)
    for index in range(6):
        run.recover(0, 5.0 + index, lost=[], size=1, generation=index + 1, step=index, resumed=False)
        gap_s = 0.1 if index in (1, 3) else 0.3
        run.add(5.5 + index, "resumed", 0, generation=index + 1, gap_s=gap_s, size=1)
    draw(run.events, tmp_path / "x.png")
    assert [title.split(":")[0] for title in titles(figures[0])] == ["The run", "Step 1", "Step 3", "Step 5", "Step 6"]


def test_a_lost_worker_that_recorded_nothing_is_called_by_its_rank(figures: Figures, tmp_path: Path) -> None:
    run = Run().form(1)
    run.recover(0, 5.0, lost=[1], size=1)
    draw(run.events, tmp_path / "x.png")
    assert "worker of rank 1 lost" in titles(figures[0])[1]


def test_a_single_event(figures: Figures, tmp_path: Path) -> None:
    run = Run()
    run.add(0.0, "init", 0)
    draw(run.events, tmp_path / "x.png")
    assert titles(figures[0]) == ["The run"]
