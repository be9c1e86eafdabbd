"""The chart of a run, as a PNG: a lane a worker over the whole run, and the recoveries under a magnifying glass.

The only module here that needs matplotlib.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from horovod_ft.cli.lanes import REGROUPING, STARTING, TRAINING, Lane, lanes
from horovod_ft.errors import ConfigurationError
from horovod_ft.events import STAGES, Event
from horovod_ft.timeline import SETTLED, Part, Recovery, labels, lost_workers, parts, recoveries

#: One after the other for the generations; calm, so that marks stand out.
GENERATIONS = ("#9ecae1", "#a1d99b", "#fdd0a2", "#bcbddc", "#c7e9c0", "#fdae6b", "#c6dbef", "#dadaeb")
PALE, DARK, ALARM, NOTICED = "#e4e4e4", "#525252", "#cb181d", "#252525"
STAGE_COLORS = dict(
    zip(
        STAGES,
        ("#d9d9d9", "#e31a1c", "#fb9a99", "#1f78b4", "#33a02c", "#b15928", "#6a3d9a", "#a6cee3", "#fdbf6f"),
        strict=True,
    )
)
#: For the legend. ``recovered`` follows at once: there is nothing of it to be seen.
STAGE_NAMES = {stage: stage.replace("_", " ") for stage in STAGES if stage != "recovered"}
STAGE_NAMES |= {"failure_detected": "until the failure is detected", "resumed": "first step"}
MOST_ZOOMS = 4
MOST_INCHES = 20.0
BAR = 0.62
FAULT_LINE: dict[str, Any] = {"color": ALARM, "linewidth": 1.0, "linestyle": (0, (4, 3))}
GONE: dict[str, Any] = {"color": ALARM, "marker": "x", "markersize": 9, "markeredgewidth": 2.4, "linestyle": ""}


def draw(events: Sequence[Event], target: Path) -> None:
    """Draw the run and write it to a file. Blocks for a second or two.

    Args:
        events: of the whole run, at least one.
        target: the PNG to write; a file that is there is replaced.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    workers = lanes(events)
    shown = sorted(sorted(recoveries(events), key=lambda one: -one.gap_s)[:MOST_ZOOMS], key=lambda one: one.at)
    columns = 2 if len(shown) > 1 else 1
    rows = math.ceil(len(shown) / columns)
    lane_height = min(0.36 * len(workers), MOST_INCHES) + 1.0
    heights = [lane_height, *[lane_height + 0.2] * rows]
    figure = Figure(figsize=(11, sum(heights) + (1.0 if shown else 0.4)), layout="constrained", dpi=130)
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(len(heights), columns, height_ratios=heights)
    origin = min(event.wall for event in events)
    _whole(figure.add_subplot(grid[0, :]), events, workers, origin)
    for index, recovery in enumerate(shown):
        cell = grid[1 + index // columns, index % columns]
        _zoom(figure.add_subplot(cell), recovery, events, workers)
    if shown:
        _stage_legend(figure)
    try:
        figure.savefig(target, format="png")
    except OSError as error:
        reason = error.strerror or error
        raise ConfigurationError(f"cannot write {target}: {reason}; choose another with --png") from error


def _whole(axes: Any, events: Sequence[Event], workers: Sequence[Lane], origin: float) -> None:
    rows = {lane.worker: row for row, lane in enumerate(workers)}
    seen: set[int] = set()
    for lane in workers:
        for stretch in lane.stretches:
            label = None
            if stretch.what == TRAINING and stretch.generation not in seen:
                seen.add(stretch.generation)
                label = _generation(stretch.generation, events)
            axes.barh(
                rows[lane.worker], stretch.stop - stretch.start, left=stretch.start - origin, height=BAR, label=label,
                color=_color(stretch.what, stretch.generation), linewidth=0,
            )  # fmt: skip
        if lane.vanished:
            axes.plot(lane.stretches[-1].stop - origin, rows[lane.worker], clip_on=False, zorder=5, **GONE)
    for event in events:
        at, row = event.wall - origin, rows[event.worker]
        if event.kind == "fault":
            _mark_fault(axes, at, row)
        elif event.kind == "failure_detected":
            axes.vlines(at, row - BAR / 2, row + BAR / 2, color=NOTICED, linewidth=1.6, zorder=3)
    _lanes_axis(axes, workers)
    axes.set_title("The run", loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel("seconds since the first event")
    axes.set_xlim(0, max(1e-3, max(event.wall for event in events) - origin) * 1.01)
    _run_legend(axes)


def _generation(generation: int, events: Sequence[Event]) -> str | None:
    """Its line in the legend, which has room for the first few."""
    size = next(event.size for event in events if event.generation == generation and event.kind in SETTLED)
    text = f"generation {generation}: {size} worker{'' if size == 1 else 's'}"
    return text if generation < len(GENERATIONS) else None


def _color(what: str, generation: int) -> str:
    if what == STARTING:
        return PALE
    return DARK if what == REGROUPING else GENERATIONS[generation % len(GENERATIONS)]


def _mark_fault(axes: Any, at: float, row: int) -> None:
    """A line through all lanes, and whom the fault is for."""
    axes.axvline(at, zorder=0.5, **FAULT_LINE)
    axes.plot(at, row, marker="v", color=ALARM, markersize=7, zorder=4)


def _zoom(axes: Any, recovery: Recovery, events: Sequence[Event], workers: Sequence[Lane]) -> None:
    shares = [part for part in parts(events) if part.generation == recovery.generation]
    origin = min(part.stages[0].start for part in shares)
    end = max(part.stages[-1].stop for part in shares)
    there = [lane for lane in workers if lane.stretches[0].start <= end and lane.stretches[-1].stop >= origin]
    rows = {lane.worker: row for row, lane in enumerate(there)}
    for part in shares:
        for stage in part.stages:
            axes.barh(
                rows[part.worker], stage.duration_s * 1e3, left=(stage.start - origin) * 1e3, height=BAR,
                color=STAGE_COLORS[stage.name], linewidth=0,
            )  # fmt: skip
    for event in events:
        if event.kind == "fault" and origin <= event.wall <= end:
            _mark_fault(axes, (event.wall - origin) * 1e3, rows[event.worker])
    axes.set_title(_zoom_title(recovery, shares, events), loc="left", fontsize=10)
    _lanes_axis(axes, there)
    axes.set_xlim(0, (end - origin) * 1e3 * 1.01)
    axes.set_xlabel("milliseconds since the last step before the failure")


def _zoom_title(recovery: Recovery, shares: Sequence[Part], events: Sequence[Event]) -> str:
    names = labels({event.worker for event in events})
    gone = [names[who] if who else f"of rank {rank}" for rank, who in lost_workers(recovery, events).items()]
    lost = f"worker{'' if len(gone) == 1 else 's'} {', '.join(gone)} lost" if gone else "no worker lost"
    return f"Step {recovery.step + 1}: {lost}, {len(shares)} recovered, gap {recovery.gap_s * 1e3:.0f} ms"


def _lanes_axis(axes: Any, workers: Sequence[Lane]) -> None:
    axes.set_yticks(range(len(workers)), [f"worker {lane.label}" for lane in workers], fontsize=9)
    axes.set_ylim(len(workers) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#eeeeee", zorder=0)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _run_legend(axes: Any) -> None:
    bars, names = axes.get_legend_handles_labels()
    extra = [
        (Patch(color=PALE), "starting"),
        (Patch(color=DARK), "forming the group anew"),
        (Line2D([], [], color=NOTICED, marker="|", markersize=9, linestyle=""), "failure noticed"),
        (Line2D([], [], marker="v", **FAULT_LINE), "injected fault"),
        (Line2D([], [], **GONE), "no further sign of the worker"),
    ]
    axes.legend(
        [*bars, *(handle for handle, _ in extra)], [*names, *(name for _, name in extra)],
        loc="lower right", bbox_to_anchor=(1.0, 0.98), ncols=4, fontsize=8, frameon=False, borderaxespad=0,
    )  # fmt: skip


def _stage_legend(figure: Any) -> None:
    handles = [Patch(color=STAGE_COLORS[stage]) for stage in STAGE_NAMES]
    figure.legend(
        handles, list(STAGE_NAMES.values()), loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False
    )
