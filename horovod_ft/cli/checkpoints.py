"""``horovod-ft checkpoints``: what lies in a checkpoint store, whether it is sound, what may go. Restores nothing."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from horovod_ft.checkpoint.inspection import Candidate, Level, Status, lines
from horovod_ft.checkpoint.manifest import Manifest
from horovod_ft.checkpoint.retention import GRACE_S, Pruned, Retention
from horovod_ft.checkpoint.retention import prune as prune_store
from horovod_ft.checkpoint.store import CheckpointStore
from horovod_ft.errors import NoCheckpointError

EXIT_DAMAGED = 1
STYLES = {
    Status.VALID: "green", Status.HALF_WRITTEN: "yellow", Status.DAMAGED: "bold red", Status.NEWER: "yellow",
    Status.FOREIGN: "dim", Status.UNREADABLE: "bold red",
}  # fmt: skip
#: What is to be expected in a store: an attempt that was cut off, and things of others.
HARMLESS = (Status.VALID, Status.HALF_WRITTEN, Status.FOREIGN)

app = typer.Typer(no_args_is_help=True, help="Look into a checkpoint store, verify it, clear it up.")

Url = Annotated[str, typer.Argument(metavar="URL", help="Folder of the store, or its URL, such as s3://bucket/run.")]


@app.command()
def ls(url: Url) -> None:
    """List everything in a store, newest first. Reads manifests and sizes, no tensors."""
    print_list(Console(), url, list(CheckpointStore(url).candidates()))


@app.command()
def verify(
    url: Url,
    full: Annotated[bool, typer.Option("--full", help="Read every byte and compare checksums.")] = False,
) -> None:
    """Check every checkpoint in a store: its manifest and the sizes of its files, with --full also their content.

    The exit code is 0 if at least one is valid and none is damaged, unreadable or of a newer format; else 1.
    """
    console = Console()
    with console.status("reading ..."):
        found = list(CheckpointStore(url).candidates(Level.FULL if full else Level.QUICK))
    print_list(console, url, found)
    bad = [candidate.folder for candidate in found if candidate.status not in HARMLESS]
    good = next((candidate for candidate in found if candidate.usable), None)
    console.print(verdict(bad, good, full), soft_wrap=True)
    raise typer.Exit(EXIT_DAMAGED if bad or good is None else 0)


@app.command()
def show(
    url: Url,
    step: Annotated[
        int | None,
        typer.Argument(metavar="STEP", help="Which checkpoint.", show_default="the newest valid one", min=0),
    ] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List all tensors.")] = False,
) -> None:
    """Show what a checkpoint consists of, by its manifest."""
    store = CheckpointStore(url)
    manifest = store.newest_valid() if step is None else of_step(store, step)
    console = Console()
    console.print(summary(manifest), soft_wrap=True)
    console.print(file_table(manifest))
    if tensors:
        console.print(tensor_table(manifest))


@app.command()
def prune(
    url: Url,
    keep_last: Annotated[int, typer.Option(help="How many of the newest valid ones stay.", min=1)],
    keep_every: Annotated[
        int | None, typer.Option(help="Besides, the first at or after each multiple of so many steps stays.", min=1)
    ] = None,
    grace: Annotated[
        float,
        typer.Option(help="Seconds without a write after which an unfinished attempt counts as abandoned.", min=0),
    ] = GRACE_S,
    quick: Annotated[
        bool, typer.Option("--quick", help="Do not read the newest one in full before others are deleted.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
) -> None:
    """Delete the checkpoints that are not to be kept, and attempts that were abandoned.

    The last one that can be restored is never deleted. What is damaged, foreign or of a newer format is left alone.
    """
    store, retention = CheckpointStore(url), Retention(keep_last, keep_every)
    level = Level.QUICK if quick else Level.FULL
    done = prune_store(store, retention, now=time.time(), grace_s=grace, level=level, dry_run=dry_run)
    Console().print(pruned_text(done, dry_run), soft_wrap=True)


# --- what is printed -----------------------------------------------------------------------------------------------


def print_list(console: Console, url: str, found: Sequence[Candidate]) -> None:
    """The table, and under it what is wrong with whom."""
    if not found:
        console.print(Text(f"{url} holds no checkpoint"), soft_wrap=True)
        return
    console.print(table(found))
    for one in found:
        if one.problem:
            console.print(Text.assemble((f"{one.folder}: ", STYLES[one.status]), one.problem), soft_wrap=True)


def table(found: Sequence[Candidate]) -> Table:
    """One row a folder. It fits into 80 columns."""
    rows = Table(box=box.SIMPLE)
    rows.add_column("checkpoint")
    for title in ("saved", "size"):
        rows.add_column(title, justify="right", no_wrap=True)
    rows.add_column("status", no_wrap=True)
    for one in found:
        known = one.manifest
        cells = (moment(known.created), size(known.nbytes)) if known else ("", "")
        rows.add_row(Text(one.folder), *cells, Text(one.status.value, STYLES[one.status]))
    return rows


def verdict(bad: Sequence[str], good: Candidate | None, full: bool) -> Text:
    """The last line."""
    if good is None:
        return Text("No checkpoint can be restored.", style="bold red")
    if bad:
        return Text(f"Not sound: {', '.join(bad)}. A restore would use {good.folder}.", style="bold red")
    how = "every byte was read" if full else "sizes only: --full reads every byte"
    return Text(f"Sound ({how}). A restore would use {good.folder}.", style="green")


def of_step(store: CheckpointStore, step: int) -> Manifest:
    """The manifest of a step, the newest if there are several; it need not be valid.

    Raises:
        NoCheckpointError: there is none.
    """
    same = [one for one in store.candidates() if one.step == step]
    for one in sorted(same, key=lambda one: not one.usable):
        if one.manifest is not None:
            return one.manifest
    problems = tuple((one.folder, one.problem) for one in same)
    told = f" that can be shown:{lines(problems)}" if problems else ""
    raise NoCheckpointError(f"{store.url} holds no checkpoint of step {step}{told}", problems)


def summary(manifest: Manifest) -> Text:
    """One line a fact."""
    pickled = ", ".join(manifest.pickled)
    values = size(sum(one.nbytes for one in (manifest.values, *manifest.workers)))
    facts = {
        "checkpoint": manifest.folder,
        "step": str(manifest.step),
        "saved": f"{moment(manifest.created)}, by {manifest.size} workers of generation {manifest.generation}",
        "with": ", ".join(f"{name} {version}" for name, version in sorted(manifest.versions.items())),
        "tensors": f"{len(manifest.tensors)}, {size(sum(spec.nbytes for spec in manifest.tensors))}",
        "values": f"{values}{f', with pickles of {pickled}' if pickled else ''}",
    }
    width = max(map(len, facts))
    return Text("\n").join(Text.assemble((f"{name:{width}}  ", "bold"), fact) for name, fact in facts.items())


def file_table(manifest: Manifest) -> Table:
    """One row a file, but for the manifest."""
    pieces = {shard.file: str(len(shard.pieces)) for shard in manifest.shards}
    rows = Table(box=box.SIMPLE)
    rows.add_column("file", no_wrap=True)
    for title in ("size", "pieces"):
        rows.add_column(title, justify="right")
    rows.add_column("checksum", overflow="fold")
    for file, (nbytes, text) in manifest.files.items():
        rows.add_row(file, size(nbytes), pieces.get(file, ""), text)
    return rows


def tensor_table(manifest: Manifest) -> Table:
    """One row a tensor."""
    rows = Table(box=box.SIMPLE)
    for title in ("tensor", "dtype", "shape"):
        rows.add_column(title, overflow="fold")
    rows.add_column("size", justify="right")
    for spec in manifest.tensors:
        rows.add_row(Text(spec.name), spec.dtype, Text(str(list(spec.shape))), size(spec.nbytes))
    return rows


def pruned_text(done: Pruned, dry_run: bool) -> Text:
    """One line a folder."""
    delete, keep = ("would delete", "would keep") if dry_run else ("deleted", "kept")
    rows = [
        *_rows(done.kept, keep, "green"),
        *_rows(done.deleted, delete, "red"),
        *((delete, "red", f"{folder} (abandoned)") for folder in done.abandoned),
        *(("left alone", "yellow", f"{folder} ({why})") for folder, why in done.left),
    ]
    told = [Text.assemble((f"{what:12}  ", style), rest) for what, style, rest in rows]
    return Text("\n").join(told) if told else Text("There is nothing to prune.")


def _rows(folders: Iterable[str], what: str, style: str) -> list[tuple[str, str, str]]:
    return [(what, style, folder) for folder in folders]


def moment(seconds: float) -> str:
    """In this machine's time zone."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def size(nbytes: float) -> str:
    """In units of a thousand."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"
