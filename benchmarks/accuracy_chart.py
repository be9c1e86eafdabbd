"""The chart of ``policy_accuracy.py``: every run a point, the median of each policy a line.

Left the test accuracy, right the difference to the failure-free run of the same seed.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.accuracy_runs import GOAL_POINTS
from benchmarks.common import BenchmarkError

REFERENCE = "no failures"
MEDIAN, BAND = "#252525", "#e5f5e0"
#: One after the other for the seeds, which then come again: they are told apart by their place in a column as well.
COLORS = ("#1f78b4", "#e6550d", "#31a354", "#756bb1", "#636363")
#: Half of the width that the points of one policy take.
REACH = 0.22


def draw(result: Mapping[str, Any], target: Path) -> None:
    """Draw a result of ``policy_accuracy.py`` and write it as PNG. Blocks for a second.

    Raises:
        BenchmarkError: the file cannot be written.
    """
    policies = result["policies"]
    seeds = result["failure_free"]["seeds"]
    figure = Figure(figsize=(4.5 + 1.9 * len(policies), 4.8), layout="constrained", dpi=130)
    FigureCanvasAgg(figure)
    accuracy, points = figure.subplots(1, 2, width_ratios=[len(policies) + 1, max(1, len(policies))])
    columns = {REFERENCE: result["failure_free"], **policies}
    _columns(accuracy, {name: (its["seeds"], its["accuracies"]) for name, its in columns.items()}, seeds)
    accuracy.set_title("Test accuracy, %", loc="left", fontsize=11, fontweight="bold")
    points.axhspan(-GOAL_POINTS, GOAL_POINTS, color=BAND, zorder=0)
    points.axhline(0, color="#969696", linewidth=0.8, zorder=1)
    _columns(points, {name: (its["seeds"], its["points_from_failure_free"]) for name, its in policies.items()}, seeds)
    points.set_title("Points from the failure-free run of the seed", loc="left", fontsize=11, fontweight="bold")
    kills = f"{result['kills']} of {result['workers']} workers killed in each run with a policy"
    figure.supxlabel(f"{kills}; a point a run, a line the median; shaded: the goal", fontsize=9, color="#525252")
    handles, labels = accuracy.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=min(10, len(labels)), fontsize=8, frameon=False)
    try:
        figure.savefig(target, format="png")
    except OSError as error:
        raise BenchmarkError(
            f"cannot write {target}: {error.strerror or error}; choose another with --png"
        ) from error


def _columns(axes: Any, columns: Mapping[str, tuple[Sequence[int], Sequence[float]]], seeds: Sequence[int]) -> None:
    """A column a policy; a seed has the same colour and place in all of them."""
    for index, seed in enumerate(seeds):
        offset = REACH * (2 * index / (len(seeds) - 1) - 1) if len(seeds) > 1 else 0.0
        found = [
            (column + offset, values[its.index(seed)])
            for column, (its, values) in enumerate(columns.values())
            if seed in its
        ]
        axes.scatter(
            [x for x, _ in found], [y for _, y in found], s=34, color=COLORS[index % len(COLORS)], alpha=0.85,
            linewidths=0, label=f"seed {seed}", zorder=3,
        )  # fmt: skip
    for column, (_, values) in enumerate(columns.values()):
        axes.hlines(statistics.median(values), column - 0.32, column + 0.32, color=MEDIAN, linewidth=1.8, zorder=2)
    axes.set_xticks(range(len(columns)), [wrapped(name) for name in columns], fontsize=8)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.tick_params(axis="x", length=0)
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.grid(axis="y", color="#eeeeee", zorder=0)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def wrapped(policy: str) -> str:
    """Its name over several lines: arguments on lines of their own."""
    lines = policy.replace("(", "\n(").replace(" | ", " |\n").splitlines()
    return "\n".join(part for line in lines for part in textwrap.wrap(line, 22, break_long_words=False))
