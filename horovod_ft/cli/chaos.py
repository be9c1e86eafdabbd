"""``horovod-ft chaos``: run a command under a fault plan, and say afterwards which of the faults have happened."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from horovod_ft.agent.supervisor import ENDING, start
from horovod_ft.errors import ConfigurationError, FaultPlanError
from horovod_ft.events import Event, read_events
from horovod_ft.faults.plan import Fault, parse_plan
from horovod_ft.settings import Settings, writable_folder
from horovod_ft.timeline import labels

EXIT_NOT_FIRED = 3


def chaos(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="For example horovodrun with its arguments.")
    ],
    plan: Annotated[str, typer.Option(help="The fault plan: a TOML file, or the TOML text itself.")],
    events: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the events, new or empty.", show_default="HOROVOD_FT_EVENTS, else a new one under runs/"
        ),
    ] = None,
) -> None:
    """Run COMMAND with faults injected into its workers, then say which entries of the plan fired.

    The exit code is that of COMMAND if it is not 0; else 3 if an entry of the plan never fired, else 0. On several
    hosts the folder for the events has to be shared by them.
    """
    text = plan_text(plan)
    faults = parse_plan(text)
    folder = events_folder(events or Settings.from_environment().events)
    console = Console(stderr=True)
    env = {**os.environ, "HOROVOD_FT_FAULTS": text, "HOROVOD_FT_EVENTS": str(folder)}
    code = run(command, env)
    outcome = match(faults, read_events(folder))
    console.print(table(outcome))
    console.print(Text(f"The whole story: horovod-ft report {shlex.quote(str(folder))}"), soft_wrap=True)
    raise typer.Exit(code or (0 if all(entry.workers for entry in outcome) else EXIT_NOT_FIRED))


def plan_text(source: str) -> str:
    """The plan as TOML text, checked. Handed on as text it reaches workers that could not find the file.

    Raises:
        FaultPlanError: it cannot be read, or an entry is wrong.
    """
    try:
        parse_plan(source)
    except FaultPlanError as error:
        raise FaultPlanError(str(error).replace("HOROVOD_FT_FAULTS", "--plan")) from error
    return source if "=" in source else Path(source).expanduser().read_text()


def events_folder(given: Path | None) -> Path:
    """An empty folder: events of an earlier run would be taken for those of this one.

    Raises:
        ConfigurationError: it holds events already, or cannot be written.
    """
    folder = (given or Path("runs") / time.strftime(f"chaos-%Y%m%d-%H%M%S-{os.getpid()}") / "events").expanduser()
    if any(folder.glob("events-*.jsonl")):
        raise ConfigurationError(f"{folder} holds the events of another run: give --events a new or an empty folder")
    return writable_folder(folder, "--events").resolve()


# --- the command ---------------------------------------------------------------------------------------------------


def run(command: Sequence[str], env: Mapping[str, str]) -> int:
    """Run a command to its end, with our standard streams. Signals to us go to all of its process group.

    It has a group of its own, so that a Ctrl-C reaches it once and not twice, and is ended when we die by a SIGKILL.

    Returns:
        its exit status; 128 + n if signal n ended it, as shells have it.

    Raises:
        ConfigurationError: it cannot be started.
    """
    sys.stdout.flush()
    with _forwarding() as forward_to:
        process = start(command, env)
        forward_to(process.pid)
        code = process.wait()
    return 128 - code if code < 0 else code


@contextlib.contextmanager
def _forwarding() -> Iterator[Callable[[int], None]]:
    """Give the signals that we get to a process group: at once when it has been named, kept until then."""
    groups: list[int] = []
    kept: list[int] = []

    def handle(number: int, frame: FrameType | None = None) -> None:
        if not groups:
            kept.append(number)
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(groups[0], number)

    def forward_to(group: int) -> None:
        groups.append(group)
        for number in kept:
            handle(number)

    before = {number: signal.signal(number, handle) for number in ENDING}
    try:
        yield forward_to
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- the outcome ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One entry of the plan and the labels of the workers in which it fired; a host's entry fires in each of its."""

    fault: Fault
    workers: tuple[str, ...]


def match(faults: Iterable[Fault], events: Sequence[Event]) -> list[Entry]:
    """Find the entries of a plan among the events of a run."""
    names = labels({event.worker for event in events})
    fired: dict[str, list[str]] = defaultdict(list)
    for event in events:
        if event.kind == "fault":
            fired[str(event.data.get("fault"))].append(names[event.worker])
    return [Entry(fault, tuple(fired[str(fault)])) for fault in faults]


def table(outcome: Sequence[Entry]) -> Table:
    """One row an entry."""
    shown = Table(box=box.SIMPLE, title="Fault plan", title_justify="left", title_style="bold")
    for title in ("entry", "fired", "in worker"):
        shown.add_column(title)
    for entry in outcome:
        happened = Text("yes", style="green") if entry.workers else Text("never", style="bold red")
        shown.add_row(Text(str(entry.fault)), happened, Text(", ".join(entry.workers)))
    return shown
