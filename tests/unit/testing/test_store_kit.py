"""The kit of checkpoint stores: our own storages pass it, and each check catches what it is there for."""

from __future__ import annotations

import io
import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import fsspec
import pytest

from horovod_ft.checkpoint.local import LocalStorage
from horovod_ft.checkpoint.store import CheckpointStore
from horovod_ft.testing import check_store
from horovod_ft.testing.store_kit import STORE_CHECKS


@pytest.fixture
def memory() -> Iterator[str]:
    yield "memory://kit"
    fsspec.filesystem("memory").store.clear()


def test_a_folder_passes(tmp_path: Path) -> None:
    check_store(lambda: CheckpointStore(tempfile.mkdtemp(dir=tmp_path)))


def test_a_folder_that_is_yet_to_be_made_passes(tmp_path: Path) -> None:
    numbers = itertools.count()
    check_store(lambda: CheckpointStore(tmp_path / str(next(numbers))))


def test_a_file_system_of_fsspec_passes(memory: str) -> None:
    numbers = itertools.count()
    check_store(lambda: CheckpointStore(f"{memory}/{next(numbers)}"))


# --- broken ones ---------------------------------------------------------------------------------------------------


class SharedPlace(LocalStorage):
    """Is not empty at the beginning."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        super().create("leftover")


class LosesTheEnd(LocalStorage):
    def write(self, folder: str, file: str, chunks: Iterable[bytes | memoryview]) -> None:
        super().write(folder, file, itertools.islice(chunks, 2) if file.startswith("shard") else chunks)


class LosesConcurrentFiles(LocalStorage):
    """Keeps one shard a folder, as if the workers wrote over each other's."""

    def sizes(self, folder: str) -> dict[str, int]:
        found = super().sizes(folder)
        shards = sorted(name for name in found if name.startswith("shard"))
        return {name: size for name, size in found.items() if name not in shards[1:]}


class AlwaysHasAManifest(LocalStorage):
    def sizes(self, folder: str) -> dict[str, int]:
        return {"manifest.json": 1, **super().sizes(folder)}


class RemembersSizes(LocalStorage):
    """Sizes as they were at first, as from a cache that nobody clears."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.seen: dict[tuple[str, str], int] = {}

    def sizes(self, folder: str) -> dict[str, int]:
        return {name: self.seen.setdefault((folder, name), size) for name, size in super().sizes(folder).items()}


class RemembersContent(LocalStorage):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.seen: dict[tuple[str, str], bytes] = {}

    def open(self, folder: str, file: str) -> BinaryIO:
        if (folder, file) not in self.seen:
            with super().open(folder, file) as opened:
                self.seen[folder, file] = opened.read()
        return io.BytesIO(self.seen[folder, file])


class Appends(LocalStorage):
    def write(self, folder: str, file: str, chunks: Iterable[bytes | memoryview]) -> None:
        before = b""
        if not file.startswith("shard") and folder in self.folders() and file in self.sizes(folder):
            with self.open(folder, file) as opened:
                before = opened.read()
        super().write(folder, file, [before, *chunks])


class LeavesTemporaryFiles(LocalStorage):
    def write(self, folder: str, file: str, chunks: Iterable[bytes | memoryview]) -> None:
        super().write(folder, file, chunks)
        super().write(folder, f"{file}.old", [b""])


class KeepsHalf(LocalStorage):
    def write(self, folder: str, file: str, chunks: Iterable[bytes | memoryview]) -> None:
        done: list[bytes | memoryview] = []
        try:
            done.extend(chunk for chunk in chunks if done.append(chunk))  # type: ignore[func-returns-value]
        except OSError:
            super().write(folder, file, done)
            raise
        super().write(folder, file, done)


class SwallowsErrors(LocalStorage):
    def write(self, folder: str, file: str, chunks: Iterable[bytes | memoryview]) -> None:
        def lenient() -> Iterator[bytes | memoryview]:
            try:
                yield from chunks
            except OSError:
                return

        super().write(folder, file, lenient())


class MakesAgain(LocalStorage):
    def create(self, folder: str) -> None:
        if folder not in self.folders():
            super().create(folder)


class OpensNothing(LocalStorage):
    def open(self, folder: str, file: str) -> BinaryIO:
        try:
            return super().open(folder, file)
        except FileNotFoundError:
            return io.BytesIO()


class MissesFolders(LocalStorage):
    def sizes(self, folder: str) -> dict[str, int]:
        return super().sizes(folder) if folder in self.folders() else {"a": 1}


class BelievesNames(LocalStorage):
    def open(self, folder: str, file: str) -> BinaryIO:
        try:
            return super().open(folder, file)
        except FileNotFoundError:
            raise
        except OSError:
            return io.BytesIO()


class KeepsWhatIsDeleted(LocalStorage):
    def delete(self, folder: str, first: str) -> None:
        pass


class DeletesTheManifestOnly(LocalStorage):
    def delete(self, folder: str, first: str) -> None:
        (self._root / folder / first).unlink(missing_ok=True)


class DeletesAll(LocalStorage):
    def delete(self, folder: str, first: str) -> None:
        for other in self.folders():
            super().delete(other, first)


class Milliseconds(LocalStorage):
    def modified(self, folder: str) -> float | None:
        return 12.5


class GoesBack(LocalStorage):
    at = 2e9

    def modified(self, folder: str) -> float | None:
        self.at -= 1
        return self.at


BROKEN: dict[str, list[tuple[type[LocalStorage], str]]] = {
    "an empty store": [(SharedPlace, r"lists \['leftover'\]: make_store\(\) has to return an empty one")],
    "what is written is read": [
        (LosesTheEnd, "it raised"), (LosesConcurrentFiles, r"it raised .*shard-00002-of-00003\.safetensors is missing"),
    ],
    "without a manifest it is no checkpoint": [(AlwaysHasAManifest, "one without a manifest is told as damaged")],
    "damage is found": [(RemembersSizes, "cut short, and nobody"), (RemembersContent, "was altered, and nobody")],
    "a file is replaced as a whole": [
        (Appends, "not what was written last"), (LeavesTemporaryFiles, "its folder holds"),
    ],
    "a failed write leaves nothing": [(KeepsHalf, "half way, and left"), (SwallowsErrors, "raised no OSError")],
    "a folder is made once": [(MakesAgain, r"create\(\) has to raise FileExistsError")],
    "a file that is not there": [
        (OpensNothing, r"open\(\) has to raise FileNotFoundError"), (MissesFolders, "is not there is {'a': 1}"),
    ],
    "names do not leave the store": [(BelievesNames, r"open\(\) in folder '\.\.' was not refused")],
    "delete": [
        (KeepsWhatIsDeleted, "the newest valid one is 2"), (DeletesTheManifestOnly, "was deleted there are"),
        (DeletesAll, "the newest valid one is None"),
    ],
    "modified": [(Milliseconds, "in seconds since the epoch"), (GoesBack, "and after another write at")],
}  # fmt: skip


def stores(kind: type[LocalStorage], folder: Path) -> Callable[[], CheckpointStore]:
    numbers = itertools.count()
    return lambda: CheckpointStore("unused", storage=kind(folder / str(next(numbers))))


def test_every_check_has_something_that_it_catches() -> None:
    assert BROKEN.keys() == STORE_CHECKS.keys()


@pytest.mark.parametrize(
    ("name", "kind", "told"), [(name, *broken) for name, several in BROKEN.items() for broken in several]
)
def test_a_broken_storage_is_caught_by_its_check(
    tmp_path: Path, name: str, kind: type[LocalStorage], told: str
) -> None:
    with pytest.raises(AssertionError, match=f"^{name}: .*{told}"):
        check_store(stores(kind, tmp_path))
