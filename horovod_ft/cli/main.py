"""The console script ``horovod-ft``: puts the commands together, and turns our own errors into one clear line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from horovod_ft.cli import checkpoints
from horovod_ft.cli.chaos import chaos
from horovod_ft.cli.doctor import doctor
from horovod_ft.cli.policies import policies
from horovod_ft.cli.report import report
from horovod_ft.cli.run import Run, run
from horovod_ft.errors import HorovodFtError
from horovod_ft.version import __version__

#: For everything that the user got wrong, as the shell and typer have it.
EXIT_USAGE = 2

app = typer.Typer(
    name="horovod-ft",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # the other modes break lines where the source does
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(doctor)
app.command()(report)
# Options after the first word that is not ours belong to the command that is run.
app.command(context_settings={"allow_interspersed_args": False})(chaos)
app.command(cls=Run)(run)
app.command()(policies)
app.add_typer(checkpoints.app, name="checkpoints")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"horovod_ft {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Tools around horovod_ft, fault tolerance for Horovod's elastic mode."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; ``arguments`` are those of the process by default.

    Raises:
        SystemExit: always. 0 when all is well, 2 for wrong usage and for every error of our own; other codes belong to
            the commands.
    """
    try:
        app(args=arguments, prog_name="horovod-ft")
    except HorovodFtError as error:
        print(f"horovod-ft: {error}", file=sys.stderr)
        raise SystemExit(EXIT_USAGE) from error


if __name__ == "__main__":
    main()
