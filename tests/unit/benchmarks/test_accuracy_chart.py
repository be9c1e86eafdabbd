"""The chart of the accuracies: every run is a point of it, and it is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from benchmarks.accuracy_chart import draw, wrapped
from benchmarks.common import BenchmarkError
from tests.unit.benchmarks.made import result


@pytest.fixture
def figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Figure:
    """The figure of two seeds and two policies, which is not written: that takes most of the time."""
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, target, format: drawn.append(self))
    draw(result(), tmp_path / "x.png")
    return drawn[0]


def points(axes: Any) -> dict[str, list[tuple[int, float]]]:
    """Seed -> the nearest column and the value of each of its points."""
    return {
        scatter.get_label(): [(round(x), round(y, 6)) for x, y in np.asarray(scatter.get_offsets()).tolist()]
        for scatter in axes.collections
        if str(scatter.get_label()).startswith("seed")
    }


def columns(axes: Any) -> list[str]:
    return [tick.get_text() for tick in axes.get_xticklabels()]


def test_a_png_is_written(tmp_path: Path) -> None:
    draw(result(), tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="choose another with --png"):
        draw(result(), tmp_path / "none" / "chart.png")


def test_every_run_is_a_point_in_the_column_of_its_policy(figure: Figure) -> None:
    accuracy, difference = figure.axes
    assert columns(accuracy) == ["no failures", "rollback", "lossy_forward"]
    assert points(accuracy) == {
        "seed 1": [(0, 98.0), (1, 98.0), (2, 97.5)],
        "seed 2": [(0, 97.0), (1, 97.1), (2, 97.25)],
    }
    assert columns(difference) == ["rollback", "lossy_forward"]
    assert points(difference) == {"seed 1": [(0, 0.0), (1, -0.5)], "seed 2": [(0, 0.1), (1, 0.25)]}


def test_seeds_have_places_of_their_own_in_a_column(figure: Figure) -> None:
    first, second = (np.asarray(scatter.get_offsets())[0, 0] for scatter in figure.axes[0].collections[:2])
    assert first < second


def test_the_median_is_a_line(figure: Figure) -> None:
    lines = [line for line in figure.axes[0].collections if not str(line.get_label()).startswith("seed")]
    heights = [line.get_segments()[0][0][1] for line in lines]  # type: ignore[attr-defined]
    assert heights == pytest.approx([97.5, 97.55, 97.375])


def test_a_policy_without_the_run_of_a_seed(tmp_path: Path) -> None:
    told = result()
    its = told["policies"]["rollback"]
    for name in ("seeds", "accuracies", "points_from_failure_free"):
        its[name] = its[name][1:]
    draw(told, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").exists()


def test_long_names_take_several_lines() -> None:
    assert wrapped('lossy_forward(missing="skip") | rollback') == 'lossy_forward\n(missing="skip") |\nrollback'
