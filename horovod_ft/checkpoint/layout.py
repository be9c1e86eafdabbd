"""Names of folders and files in a checkpoint store. Joins nothing to a path: it says which names may be joined to one.

A store is a folder with one folder a checkpoint. Both levels are plain names, so that a storage needs no deeper paths::

    step-0000001234-9f3c2a71d0b84e65/
        shard-00001-of-00004.safetensors    a worker's part of the tensors; the first is rank 0's
        worker-00001-of-00004.json          what that worker has written, and the values that only it has
        values.json                         everything else that is no tensor
        manifest.json                       written last: a folder without it is no checkpoint
"""

from __future__ import annotations

import re
from random import Random
from typing import NamedTuple

from horovod_ft.errors import UsageError

MANIFEST = "manifest.json"
VALUES = "values.json"
#: Ends the name of a file that is still being written, on storages that rename it afterwards.
TEMPORARY = ".tmp"

_FOLDER = re.compile(r"step-([0-9]{10,18})-([0-9a-z]{1,32})", re.ASCII)
_SHARD = re.compile(r"shard-([0-9]{5,9})-of-([0-9]{5,9})\.safetensors", re.ASCII)
_WORKER = re.compile(r"worker-([0-9]{5,9})-of-([0-9]{5,9})\.json", re.ASCII)
#: One component of a path that leads nowhere else: no separator, not hidden, nothing that a URL would expand.
_PLAIN = re.compile(r"[A-Za-z0-9_+-][A-Za-z0-9._+-]{0,199}", re.ASCII)


class Place(NamedTuple):
    """What the name of a checkpoint's folder says.

    Attributes:
        step: committed steps.
        attempt: tells several attempts to save the same step apart.
    """

    step: int
    attempt: str


def new_attempt(random: Random) -> str:
    """An id for an attempt to save, 64 bits of ``random``. One worker draws it and tells the others."""
    return f"{random.getrandbits(64):016x}"


def folder_name(step: int, attempt: str) -> str:
    """The folder of a checkpoint; names sort by step.

    Raises:
        UsageError: the step is negative, or the attempt is not of 1 to 32 lowercase letters and digits.
    """
    name = f"step-{step:010d}-{attempt}"
    if _FOLDER.fullmatch(name) is None:
        raise UsageError(
            f"step {step!r} and attempt {attempt!r} name no checkpoint: a step is 0 or more, an attempt has 1 to 32 "
            "lowercase letters and digits"
        )
    return name


def parse_folder(name: str) -> Place | None:
    """What a folder's name says; None if it is not that of a checkpoint."""
    match = _FOLDER.fullmatch(name)
    return Place(int(match[1]), match[2]) if match else None


def shard_name(rank: int, size: int) -> str:
    """The file with the tensors that worker ``rank`` of ``size`` writes.

    Raises:
        UsageError: there is no such worker.
    """
    return f"shard-{_numbered(rank, size)}.safetensors"


def worker_name(rank: int, size: int) -> str:
    """The file with everything else that worker ``rank`` of ``size`` writes.

    Raises:
        UsageError: there is no such worker.
    """
    return f"worker-{_numbered(rank, size)}.json"


def parse_shard(name: str) -> tuple[int, int] | None:
    """Rank and size of the worker that wrote a file; None if the name is not that of a shard."""
    return _rank_and_size(_SHARD, name)


def parse_worker(name: str) -> tuple[int, int] | None:
    """As ``parse_shard``, for the file beside it."""
    return _rank_and_size(_WORKER, name)


def is_plain(name: str) -> bool:
    """Whether a name can be joined to a folder's path without leaving that folder."""
    return _PLAIN.fullmatch(name) is not None


def _numbered(rank: int, size: int) -> str:
    if not 0 <= rank < size:
        raise UsageError(f"there is no worker {rank} of {size}")
    return f"{rank + 1:05d}-of-{size:05d}"


def _rank_and_size(pattern: re.Pattern[str], name: str) -> tuple[int, int] | None:
    match = pattern.fullmatch(name)
    if match is None:
        return None
    rank, size = int(match[1]) - 1, int(match[2])
    return (rank, size) if 0 <= rank < size and _numbered(rank, size) == f"{match[1]}-of-{match[2]}" else None
