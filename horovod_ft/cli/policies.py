"""``horovod-ft policies``: the recovery policies that are installed, one line each."""

from __future__ import annotations

import inspect
from importlib.metadata import EntryPoint, entry_points

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from horovod_ft.policy_names import ENTRY_POINTS


def policies() -> None:
    """List the installed recovery policies, by the names that HOROVOD_FT_POLICY understands."""
    table = Table(box=box.SIMPLE)
    table.add_column("policy", style="bold", no_wrap=True)
    table.add_column("what it does")
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
        table.add_row(Text(point.name), Text.assemble(summary(point), (f"\n{signature(point)}", "dim")))
    console = Console()
    if table.row_count:
        console.print(table)
    else:
        console.print("No recovery policy is installed: install horovod_ft with pip, which registers its own.")


def summary(point: EntryPoint) -> str:
    """First line of the policy's docstring. A policy that cannot be loaded says so and does not hide the others."""
    try:
        factory = point.load()
    except Exception as error:  # whatever another package's import raises
        return f"cannot be loaded ({point.value}): {error!r}"
    return (inspect.getdoc(factory) or "no description").splitlines()[0]


def signature(point: EntryPoint) -> str:
    """How it is called, with the defaults of its arguments; its name alone if they cannot be told."""
    try:
        parameters = inspect.signature(point.load()).parameters.values()
    except Exception:
        return point.name
    return f"{point.name}({', '.join(_argument(parameter) for parameter in parameters)})"


def _argument(parameter: inspect.Parameter) -> str:
    if parameter.default is inspect.Parameter.empty:
        return parameter.name
    return f"{parameter.name}={parameter.default!r}"
