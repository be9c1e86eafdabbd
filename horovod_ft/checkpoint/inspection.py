"""Looks at what lies in a store and says, of each folder, whether it can be used and why not. Changes nothing.

One bad checkpoint is never an error here: it is what a look is for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import BinaryIO

from horovod_ft.checkpoint import layout
from horovod_ft.checkpoint import manifest as manifests
from horovod_ft.checkpoint.checksum import CHUNK, Hasher
from horovod_ft.checkpoint.manifest import Manifest
from horovod_ft.checkpoint.storage import Storage, explained
from horovod_ft.errors import (
    DamagedCheckpointError,
    ForeignCheckpointError,
    NewerCheckpointError,
    StorageError,
)


class Status(Enum):
    """What a folder in a store is."""

    VALID = "valid"
    HALF_WRITTEN = "half written"
    DAMAGED = "damaged"
    NEWER = "newer"
    FOREIGN = "foreign"
    UNREADABLE = "unreadable"


class Level(Enum):
    """How closely to look: QUICK reads manifests and asks for the sizes of files, FULL reads every byte."""

    QUICK = "quick"
    FULL = "full"


@dataclass(frozen=True)
class Candidate:
    """A folder in a store.

    Attributes:
        folder: its name.
        status: what it is, at the level that was looked at.
        problem: why it cannot be used; empty if it can.
        manifest: None if it has none that can be read.
    """

    folder: str
    status: Status
    problem: str = ""
    manifest: Manifest | None = None

    @property
    def usable(self) -> bool:
        return self.status is Status.VALID

    @property
    def step(self) -> int:
        """By its name; -1 if that is not the name of a checkpoint."""
        place = layout.parse_folder(self.folder)
        return place.step if place else -1


def candidates(storage: Storage, level: Level = Level.QUICK) -> Iterator[Candidate]:
    """Everything in a store, newest first: by step, and of one step the one saved last. Foreign folders at the end.

    A checkpoint is looked at when it is asked for, so whoever takes the first good one pays for no other.

    Raises:
        StorageError: the store itself cannot be listed.
    """
    with explained("list checkpoints in", storage.url):
        folders = storage.folders()
    unlooked = sorted((Candidate(folder, Status.FOREIGN) for folder in folders), key=lambda one: -one.step)
    for _, same in groupby(unlooked, key=lambda one: one.step):
        looked = [inspect(storage, one.folder, level) for one in same]
        yield from sorted(looked, key=lambda one: -one.manifest.created if one.manifest else 0.0)


def inspect(storage: Storage, folder: str, level: Level = Level.QUICK) -> Candidate:
    """Look at one folder."""
    if layout.parse_folder(folder) is None:
        return Candidate(folder, Status.FOREIGN, "it is not named as a checkpoint of horovod_ft")
    try:
        with explained("look at", storage.url, folder):
            sizes = storage.sizes(folder)
        if layout.MANIFEST not in sizes:
            return Candidate(folder, Status.HALF_WRITTEN, "it has no manifest: it was never finished")
        manifest = read_manifest(storage, folder)
    except DamagedCheckpointError as error:
        return Candidate(folder, _status_of(error), str(error))
    except StorageError as error:
        return Candidate(folder, Status.UNREADABLE, str(error))
    return _look(storage, manifest, sizes, level)


def _look(storage: Storage, manifest: Manifest, sizes: dict[str, int], level: Level) -> Candidate:
    problem, status = missing(manifest, sizes), Status.DAMAGED
    if not problem and level is Level.FULL:
        try:
            for file in manifest.files:
                check_file(storage, manifest, file)
        except DamagedCheckpointError as error:
            problem = str(error)
        except StorageError as error:
            problem, status = str(error), Status.UNREADABLE
    return Candidate(manifest.folder, status if problem else Status.VALID, problem, manifest)


def read_manifest(storage: Storage, folder: str) -> Manifest:
    """
    Raises:
        DamagedCheckpointError: it says why the checkpoint cannot be used.
        StorageError: it cannot be read.
    """
    with opened(storage, folder, layout.MANIFEST) as file:
        data = file.read()
    return manifests.decode(data, folder)


@contextmanager
def opened(storage: Storage, folder: str, file: str) -> Iterator[BinaryIO]:
    """A file of a checkpoint, for reading.

    Raises:
        DamagedCheckpointError: it is not there.
        StorageError: it cannot be opened, or an OSError came while it was read.
    """
    with explained("read", storage.url, folder, file):
        try:
            reading = storage.open(folder, file)
        except FileNotFoundError as error:
            raise DamagedCheckpointError(f"{file} is missing") from error
        with reading:
            yield reading


def missing(manifest: Manifest, sizes: dict[str, int]) -> str:
    """Which file is not there, or is not as long as it should be; empty if all are."""
    for file, (nbytes, _) in manifest.files.items():
        if file not in sizes:
            return f"{file} is missing, or is no regular file"
        if sizes[file] != nbytes:
            return f"{file} has {sizes[file]} bytes, and its manifest says {nbytes}"
    return ""


def check_file(storage: Storage, manifest: Manifest, file: str) -> None:
    """Read a file of a checkpoint, and compare its checksum.

    Raises:
        DamagedCheckpointError: it is another one.
        StorageError: it cannot be read.
    """
    hasher = Hasher()
    with opened(storage, manifest.folder, file) as reading:
        while data := reading.read(CHUNK):
            hasher.update(data)
    nbytes, text = manifest.files[file]
    if hasher.nbytes != nbytes or hasher.text() != text:
        raise DamagedCheckpointError(f"{file} has been altered: its checksum is {hasher.text()}, not {text}")


def _status_of(error: DamagedCheckpointError) -> Status:
    if isinstance(error, NewerCheckpointError):
        return Status.NEWER
    return Status.FOREIGN if isinstance(error, ForeignCheckpointError) else Status.DAMAGED


def lines(problems: Sequence[tuple[str, str]]) -> str:
    """Each with its reason, on a line of its own."""
    return "".join(f"\n  {folder}: {problem}" for folder, problem in problems)
