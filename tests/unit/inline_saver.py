"""A saver without a thread of its own, so that what tests see does not depend on when a thread gets its turn."""

from __future__ import annotations

import time
from typing import Any

from horovod_ft.checkpoint import CheckpointStore, layout
from horovod_ft.checkpoint.saver import Captured, SaveEnded
from horovod_ft.errors import CheckpointError

#: How long worker 0 waits for the others, who write at the same time in their threads, or are dead.
WAIT_S = 0.5


class InlineSaver:
    """Saves before ``submit`` returns. What it can do is what ``checkpoint.saver.Saver`` can."""

    def __init__(self, store: CheckpointStore, **_: Any) -> None:
        self.busy = False
        self.newest: tuple[int, float] | None = None
        self._store = store
        self.breaks = 0
        self._endings: list[SaveEnded] = []

    def submit(self, captured: Captured) -> None:
        folder = layout.folder_name(captured.step, captured.attempt)
        error: CheckpointError | None = None
        written = False
        try:
            self._write_part(captured, folder)
            written = True
            self._commit(captured, folder)
        except CheckpointError as met:
            error = met
        self._endings.append(SaveEnded(captured.step, folder, 0.0, 0, error is None, error, written))

    def _write_part(self, captured: Captured, folder: str) -> None:
        rank, size = captured.rank, captured.size
        shard = self._store.write_shard(folder, rank, size, captured.parts)
        self._store.write_worker(folder, rank, size, shard, captured.local)

    def _commit(self, captured: Captured, folder: str) -> None:
        store, size = self._store, captured.size
        if captured.rank:
            return
        values = store.write_values(folder, captured.shared)
        until = time.monotonic() + WAIT_S
        while store.unwritten(folder, size):
            if time.monotonic() > until:
                raise CheckpointError("somebody is dead")
            time.sleep(0.001)
        written = [store.written(folder, one, size) for one in range(size)]
        shards, documents = [one for one, _ in written], [one for _, one in written]
        store.commit(folder, captured.specs, shards, documents, values, generation=captured.generation)
        self.newest = captured.step, time.monotonic()

    def endings(self) -> list[SaveEnded]:
        told, self._endings = self._endings, []
        return told

    def broken(self) -> None:
        """Nothing is under way, but it is counted."""
        self.breaks += 1

    def drop(self, timeout_s: float) -> None:
        """Nothing is under way."""

    def wait(self, timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        """There is nothing to end."""
