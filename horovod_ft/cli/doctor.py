"""``horovod-ft doctor``: look at everything that a fault-tolerant job rests on, and say what to do about the rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from horovod_ft.cli.check import Check, Status, failed
from horovod_ft.cli.environment import environment_checks
from horovod_ft.cli.hosts import discover, host_checks, parse_hosts
from horovod_ft.cli.variables import variable_checks
from horovod_ft.errors import ConfigurationError

STYLES = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILED: "bold red"}


def doctor(
    np: Annotated[int | None, typer.Option(help="Workers of the job, as -np of horovodrun.", min=1)] = None,
    min_np: Annotated[int | None, typer.Option(help="As --min-np of horovodrun.", min=1)] = None,
    hosts: Annotated[str | None, typer.Option(metavar="a:1,b:1", help="Hosts of the job, with their slots.")] = None,
    discovery_script: Annotated[Path | None, typer.Option(help="Script that lists the hosts of the job.")] = None,
    cooldown: Annotated[
        tuple[int, int] | None,
        typer.Option(metavar="LO HI", help="As --blacklist-cooldown-range of horovodrun, in seconds."),
    ] = None,
) -> None:
    """Check this environment, and the job described by the options, for everything that recovery needs.

    The exit code is 0 unless a check failed. Takes some seconds: frameworks are loaded and a small MPI job is run.
    """
    console = Console()
    with console.status("loading what is installed ..."):
        checks = [
            *environment_checks(),
            *variable_checks(),
            *job_checks(hosts, discovery_script, np, min_np, cooldown),
        ]
    show(checks, console)
    raise typer.Exit(exit_code(checks))


def job_checks(
    hosts: str | None,
    script: Path | None,
    np: int | None,
    min_np: int | None,
    cooldown: tuple[int, int] | None,
) -> Iterator[Check]:
    """Checks of the job that the options describe; none when they describe none."""
    if hosts is not None and script is not None:
        raise ConfigurationError("give --hosts or --discovery-script, one of them")
    if min_np is not None and hosts is None and script is None and np is None:
        raise ConfigurationError("--min-np can be checked only together with --np, --hosts or --discovery-script")
    known: dict[str, int] | None = None
    if script is not None:
        found, known = discover(script)
        yield found
    elif hosts is not None:
        try:
            known = parse_hosts(hosts)
        except ConfigurationError as error:
            yield failed("--hosts", str(error), "write it as a:1,b:1")
        else:
            if not known:
                yield failed("--hosts", "names no host", "write it as a:1,b:1")
    yield from host_checks(known or None, np, min_np, cooldown)


def exit_code(checks: Iterable[Check]) -> int:
    """0 unless a check failed."""
    return int(any(check.status is Status.FAILED for check in checks))


def show(checks: Sequence[Check], console: Console) -> None:
    """Print the table, and under it what to do."""
    table = Table(box=box.SIMPLE)
    for title in ("check", "result", "detail"):
        table.add_column(title)
    for check in checks:
        style = STYLES[check.status]
        table.add_row(Text(check.name), Text(check.status.value, style=style), Text(check.detail))
    console.print(table)
    for check in checks:
        if check.remedy:
            console.print(Text.assemble((f"{check.name}: ", STYLES[check.status]), check.remedy))
    console.print(verdict(checks))


def verdict(checks: Iterable[Check]) -> Text:
    """The last line."""
    bad = [check.name for check in checks if check.status is Status.FAILED]
    if bad:
        return Text(f"Not ready: {', '.join(bad)}", style=STYLES[Status.FAILED])
    return Text("Ready for fault-tolerant training.", style=STYLES[Status.OK])
