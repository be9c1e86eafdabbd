"""``Checkpoints``: what a user says about durable checkpoints. Reads and writes nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass

from horovod_ft.checkpoint.retention import Retention
from horovod_ft.checkpoint.schedule import parse_every
from horovod_ft.checkpoint.store import CheckpointStore
from horovod_ft.errors import ConfigurationError


@dataclass(frozen=True)
class Checkpoints:
    """Durable checkpoints of a training, for ``elastic.run(checkpoint=...)``. A folder or URL alone means the defaults.

    Args:
        url: a folder that all hosts share, or any URL of fsspec. A training restores from it what it finds there, so
            each has one of its own.
        every: ``"auto"``, a whole number of steps, or seconds as a float; see ``CheckpointRestart``, which says it in
            its place if it is part of the policy. Default: ``"auto"``.
        keep_last: how many of the newest stay; None to keep all.
        keep_every: besides, the first at or after each multiple of so many steps stays for good.
        allow_pickle: let values of the state be pickled that have no other form, and read such values. Whoever can
            write to the folder can then run code in the job that reads it.
        end_on_error: a checkpoint that cannot be saved ends training, on all workers. Otherwise it is logged and put
            on record, and training goes on.

    Raises:
        ConfigurationError: an argument is wrong.
    """

    url: str | os.PathLike[str]
    every: str | float | None = None
    keep_last: int | None = 3
    keep_every: int | None = None
    allow_pickle: bool = False
    end_on_error: bool = False

    def __post_init__(self) -> None:
        if self.every is not None:
            parse_every(self.every)
        if self.keep_last is None and self.keep_every is not None:
            raise ConfigurationError("keep_every says what stays besides the newest, and keep_last=None keeps all")
        self.retention()

    def retention(self) -> Retention | None:
        """What stays; None for all."""
        return None if self.keep_last is None else Retention(self.keep_last, self.keep_every)

    def store(self) -> CheckpointStore:
        """
        Raises:
            ConfigurationError: the URL cannot be used.
        """
        return CheckpointStore(self.url, allow_pickle=self.allow_pickle)
