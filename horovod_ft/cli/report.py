"""``horovod-ft report``: what happened in a run, from the events that its workers recorded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from horovod_ft.agreement import GENERATIONS
from horovod_ft.cli.chronicle import Row, chronicle
from horovod_ft.errors import ConfigurationError
from horovod_ft.events import STAGES, Event, read_events
from horovod_ft.ledger import LedgerReport, verify_ledger
from horovod_ft.timeline import Recovery, by_worker, labels, lost_workers, recoveries, world_sizes

STYLES = {
    "fault": "red", "failure_detected": "red", "aborted": "bold red", "warning": "yellow",
    "recovered": "green", "forward": "yellow", "resumed": "green", "joined": "cyan", "finished": "bold",
}  # fmt: skip
#: Stages and their headings, such that the table fits into 80 columns. ``recovered`` follows at once and takes no time.
TITLES = {stage: stage.replace("_", "\n") for stage in STAGES if stage != "recovered"}
TITLES |= {"transferred": "trans-\nferred", "reformed": "re-\nformed", "resumed": "re-\nsumed"}
TITLES |= {"decision": "deci-\nsion"}


def report(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="HOROVOD_FT_EVENTS of the run, or the folder above it.")
    ],
    png: Annotated[Path | None, typer.Option(help="Where the chart goes.", show_default="DIR/report.png")] = None,
    no_png: Annotated[bool, typer.Option("--no-png", help="Draw no chart.")] = False,
    ledger: Annotated[
        Path | None,
        typer.Option(help="HOROVOD_FT_LEDGER of the run.", show_default="the folder 'ledger' beside the events"),
    ] = None,
) -> None:
    """Show what happened in a run: its story, each recovery stage by stage, and a chart of all workers."""
    if png is not None and no_png:
        raise ConfigurationError("give --png or --no-png, one of them")
    console = Console()
    events = read(folder)
    console.print(story(chronicle(events)))
    console.print(sizes(events))
    found = recoveries(events)
    if found:
        console.print(recovery_table(found, events))
        console.print(stage_table(found))
    else:
        console.print("No recovery: no worker came through a failure.")
    if not no_png:
        show_chart(events, png or folder / "report.png", console)
    show_ledger(folder, ledger, console)


def read(folder: Path) -> list[Event]:
    """The events of one run, which lie in the folder itself or in ``events`` below it.

    Raises:
        ConfigurationError: there is no such folder, no event in it, or it holds the events of more than one run.
    """
    if not folder.is_dir():
        raise ConfigurationError(f"there is no folder {folder}")
    holding = next((place for place in (folder, folder / "events") if any(place.glob("events-*.jsonl"))), None)
    try:
        events = read_events(holding) if holding is not None else []
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the events in {holding}: {error}") from error
    if not events:
        raise ConfigurationError(
            f"{folder} holds no events (files events-*.jsonl): run the job with HOROVOD_FT_EVENTS={folder}"
        )
    if _several_runs(events):
        raise ConfigurationError(f"{holding} holds the events of more than one run: give each run a folder of its own")
    return events


def _several_runs(events: Sequence[Event]) -> bool:
    """Two processes that began the same attempt had the same start rank; newcomers, who may get one again, join."""
    began: dict[tuple[int, str], set[str]] = defaultdict(set)
    for event in events:
        if event.kind == "formed":
            began[event.generation // GENERATIONS, event.worker.rsplit(":", 2)[1]].add(event.worker)
    return any(len(workers) > 1 for workers in began.values())


# --- tables --------------------------------------------------------------------------------------------------------


def story(rows: Sequence[Row]) -> Table:
    """The chronicle as a table."""
    table = Table(box=box.SIMPLE, title="What happened", title_justify="left", title_style="bold")
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("event")
    table.add_column("workers")
    for row in rows:
        style = STYLES.get(row.kind, "")
        table.add_row(f"{row.at_s:.3f}", str(row.step), Text(row.text, style=style), Text(", ".join(row.workers)))
    return table


def sizes(events: Sequence[Event]) -> Text:
    """One line with the sizes of the groups."""
    told = " -> ".join(map(str, world_sizes(events))) or "no group formed"
    return Text.assemble(("Workers over time: ", "bold"), told)


def recovery_table(found: Sequence[Recovery], events: Sequence[Event]) -> Table:
    """One row a recovery."""
    names = labels(by_worker(events))
    origin = min(event.wall for event in events)
    table = Table(box=box.SIMPLE, title="Recoveries", title_justify="left", title_style="bold")
    for title in ("#", "at, s", "after step", "lost ranks", "lost workers", "workers left", "gap, s"):
        table.add_column(title, justify="left" if title.startswith("lost") else "right")
    for number, recovery in enumerate(found, 1):
        gone = lost_workers(recovery, events)
        table.add_row(
            str(number), f"{recovery.at - origin:.3f}", str(recovery.step),
            ", ".join(map(str, gone)) or "none",
            Text(", ".join(names[worker] if worker else "unknown" for worker in gone.values()) or "none"),
            str(recovery.size), Text(f"{recovery.gap_s:.3f}", style="bold"),
        )  # fmt: skip
    return table


def stage_table(found: Sequence[Recovery]) -> Table:
    """Milliseconds of each stage: median over the workers, and under it the slowest."""
    table = Table(
        box=box.SIMPLE, title="Stages in ms: median of the workers, and the slowest", title_justify="left",
        title_style="bold",
    )  # fmt: skip
    table.add_column("#", justify="right")
    for title in TITLES.values():
        table.add_column(title, justify="right", no_wrap=True)
    for number, recovery in enumerate(found, 1):
        table.add_row(str(number), *(_cell(recovery, stage) for stage in TITLES))
    return table


def _cell(recovery: Recovery, stage: str) -> Text:
    if stage not in recovery.stages:
        return Text("-")
    return Text.assemble(f"{recovery.stages[stage] * 1e3:.1f}\n", (f"{recovery.slowest[stage] * 1e3:.1f}", "dim"))


# --- ledger and chart ----------------------------------------------------------------------------------------------


def show_ledger(folder: Path, given: Path | None, console: Console) -> None:
    """Print the ledger's verdict, if there is a ledger.

    Raises:
        ConfigurationError: a folder was given and holds none, or a file of it is damaged.
    """
    place = given or next(
        (place for place in (folder / "ledger", folder.parent / "ledger") if any(place.glob("ledger-*.jsonl"))), None
    )
    if place is None:
        return
    if given is None and not any(path.stat().st_size for path in place.glob("ledger-*.jsonl")):
        return  # the script tracks no loader
    console.print(ledger_text(_verified(place)))


def _verified(place: Path) -> LedgerReport:
    try:
        return verify_ledger(place)
    except ConfigurationError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"the ledger in {place} is damaged: {error!r}") from error


def ledger_text(found: LedgerReport) -> Text:
    """The verdict, and every problem on a line of its own."""
    text = Text.assemble(
        ("Ledger: ", "bold"), f"{found.steps} steps, {found.samples} samples, {found.epochs} complete epochs: "
    )
    if found.exact:
        text.append("no sample was lost or repeated", style="green")
        return text.append(_redone(found))
    if found.complete:
        text.append("every sample accounted for, and some lost weight", style="yellow")
        for step, lossy in sorted(found.lossy.items()):
            share = lossy.elements / lossy.of
            text.append(f"\n  step {step}: {len(lossy.ids)} samples do not count in {share:.0%} of the update")
        return text.append(_redone(found))
    text.append("not exact" if found.steps else "no step was committed", style="bold red")
    for problem in found.problems:
        text.append(f"\n  {problem}", style="red")
    return text


def _redone(found: LedgerReport) -> str:
    if not found.redone:
        return ""
    return f"\n  {found.redone} step{'' if found.redone == 1 else 's'} computed again, after going back to a copy"


def show_chart(events: Sequence[Event], target: Path, console: Console) -> None:
    """Write the chart; without matplotlib say how to get it, which is no error: the tables have been printed."""
    try:
        from horovod_ft.cli.chart import draw  # noqa: PLC0415  matplotlib is optional, and slow to load
    except ImportError:
        remedy = "pip install 'horovod_ft[report]', or use --no-png"
        console.print(Text(f"No chart: matplotlib is not installed: {remedy}", style="yellow"))
        return
    draw(events, target)
    console.print(Text(f"Chart: {target}"), soft_wrap=True)
