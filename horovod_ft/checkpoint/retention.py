"""Which checkpoints stay, and the clearing away of all others. Never touches what it does not know for sure.

Only valid checkpoints and abandoned attempts are ever deleted. What is damaged, newer, foreign or cannot be read stays:
it may be sound to somebody else, or again once its disk is back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from horovod_ft.checkpoint.inspection import Candidate, Level, Status
from horovod_ft.checkpoint.store import CheckpointStore
from horovod_ft.errors import ConfigurationError

#: How long nothing has to be written in a folder without a manifest before it counts as abandoned.
GRACE_S = 3600.0


@dataclass(frozen=True)
class Retention:
    """Which valid checkpoints stay.

    Args:
        keep_last: so many of the newest; at least 1.
        keep_every: besides, the first at or after each multiple of so many steps, for good; None for no others.

    Raises:
        ConfigurationError: an argument is wrong.
    """

    keep_last: int
    keep_every: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("keep_last", self.keep_last), ("keep_every", self.keep_every)):
            wrong = isinstance(value, bool) or not isinstance(value, int) or value < 1
            if wrong and not (name == "keep_every" and value is None):
                raise ConfigurationError(f"{name} is {value!r}; it must be a whole number, at least 1")

    def kept(self, valid: Sequence[Candidate]) -> list[Candidate]:
        """Those that stay, out of the valid ones, newest first."""
        stay = {one.folder for one in valid[: self.keep_last]}
        if self.keep_every is not None:
            first = {one.step // self.keep_every: one for one in valid}  # the oldest is the last to be set
            stay |= {one.folder for multiple, one in first.items() if multiple}
        return [one for one in valid if one.folder in stay]


@dataclass(frozen=True)
class Pruned:
    """What pruning has done, or would do.

    Attributes:
        kept: valid checkpoints that stay, newest first.
        deleted: valid checkpoints that are gone.
        abandoned: attempts that were never finished, and are gone.
        left: all others, with the reason why they were not touched.
    """

    kept: tuple[str, ...]
    deleted: tuple[str, ...]
    abandoned: tuple[str, ...]
    left: tuple[tuple[str, str], ...]


def prune(
    store: CheckpointStore,
    retention: Retention,
    *,
    now: float,
    running: Collection[str] = (),
    grace_s: float = GRACE_S,
    level: Level = Level.FULL,
    dry_run: bool = False,
) -> Pruned:
    """Delete what the retention does not keep, and attempts that were abandoned. Blocks.

    Before a valid checkpoint is deleted, the newest of those that stay is verified; if that fails it does not count,
    and the retention is asked again. So the last one that can be restored is never deleted, whatever the others look
    like.

    Args:
        now: seconds since the epoch.
        running: attempts that are being written, or have just been committed: they stay, whatever their age. Training
            may have passed over newer ones that look sound, and then these are all that can be restored.
        grace_s: how long nothing has to be written in an attempt before it counts as abandoned.
        level: how closely the newest is verified. QUICK reads no tensors, and misses altered bytes.
        dry_run: change nothing.

    Raises:
        StorageError: the store cannot be listed, or something cannot be deleted.
    """
    found = list(store.candidates())
    kept, surplus, failed = _divide(store, [one for one in found if one.usable], retention, level, running)
    half = {one.folder: _busy(store, one.folder, now, grace_s, running) for one in found if _half(one)}
    others = [(one.folder, f"{one.status.value}: {one.problem}") for one in found if not one.usable and not _half(one)]
    abandoned = [folder for folder, why in half.items() if not why]
    if not dry_run:
        for folder in [*abandoned, *reversed(surplus)]:  # oldest first, so that what is left is always a sound store
            store.delete(folder)
    left = [*((folder, f"half written: {why}") for folder, why in half.items() if why), *failed, *others]
    return Pruned(tuple(kept), tuple(surplus), tuple(abandoned), tuple(left))


def _divide(
    store: CheckpointStore, valid: Sequence[Candidate], retention: Retention, level: Level, running: Collection[str]
) -> tuple[list[str], list[str], list[tuple[str, str]]]:
    """Folders that stay, those that may go, and those that turned out not to be valid after all."""
    failed: list[tuple[str, str]] = []
    while valid:
        stay = {*(one.folder for one in retention.kept(valid)), *running}
        kept = [one.folder for one in valid if one.folder in stay]
        surplus = [one.folder for one in valid if one.folder not in stay]
        look = store.verify(kept[0], level) if surplus else None
        if look is None or look.usable:
            return kept, surplus, failed
        failed.append((look.folder, f"{look.status.value}: {look.problem}"))
        valid = valid[1:]
    return [], [], failed


def _half(candidate: Candidate) -> bool:
    return candidate.status is Status.HALF_WRITTEN


def _busy(store: CheckpointStore, folder: str, now: float, grace_s: float, running: Collection[str]) -> str:
    """Why an attempt may still be being written; empty if it is abandoned."""
    if folder in running:
        return "it is being written"
    written = store.modified(folder)
    if written is None:
        return "the storage does not say when it was last written"
    return f"it was last written {max(now - written, 0):.0f} s ago" if now - written < grace_s else ""
