"""Checkpoints wherever fsspec can write: object stores, HDFS, SSH, memory. Not for local folders: see ``local``.

An object store puts a file in place in one go when it is closed, so there are no temporary names here. On a file system
where that is not so, a manifest that was cut off is found by its checksum.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any, BinaryIO, cast

import fsspec

from horovod_ft.checkpoint.storage import checked
from horovod_ft.errors import ConfigurationError


class FsspecStorage:
    """See ``storage.Storage``. Who may read what is up to the object store: there are no modes of files.

    Args:
        url: with a scheme, such as ``s3://bucket/run``; what the file system needs besides comes from its own settings.

    Raises:
        ConfigurationError: the scheme is unknown, or the package for it is not installed.
    """

    cached = False

    def __init__(self, url: str) -> None:
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ConfigurationError(f"checkpoints cannot be stored at {url!r}: {error}") from error
        self.url = url.rstrip("/")

    def create(self, folder: str) -> None:
        with _os_errors():
            if self._fs.exists(self._path(folder)):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), folder)
            self._fs.makedirs(self._path(folder), exist_ok=True)

    def folders(self) -> list[str]:
        return sorted(name for name, entry in self._entries(self._root).items() if entry["type"] == "directory")

    def sizes(self, folder: str) -> dict[str, int]:
        entries = self._entries(self._path(folder))
        return {name: int(entry["size"]) for name, entry in entries.items() if entry["type"] == "file"}

    def modified(self, folder: str) -> float | None:
        with _os_errors():
            try:
                moments = [self._fs.modified(self._path(folder, file)) for file in self.sizes(folder)]
            except NotImplementedError:
                return None
        return max(map(_seconds, moments), default=None)

    def write(self, folder: str, file: str, chunks: Iterable[bytes | memoryview]) -> None:
        path = self._path(folder, file)
        with _os_errors():
            try:
                self._fs.makedirs(self._path(folder), exist_ok=True)
                with self._fs.open(path, "wb") as opened:
                    for chunk in chunks:
                        opened.write(chunk)
            except BaseException:
                with contextlib.suppress(Exception):  # leaving the block has closed it, which puts a part in place
                    self._fs.rm_file(path)
                raise

    def open(self, folder: str, file: str) -> BinaryIO:
        with _os_errors():
            return cast("BinaryIO", _Reader(self._fs.open(self._path(folder, file), "rb")))

    def delete(self, folder: str, first: str) -> None:
        with _os_errors():
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._path(folder, first))
            self._fs.invalidate_cache()
            with contextlib.suppress(FileNotFoundError):  # object stores have no empty folders
                self._fs.rm(self._path(folder), recursive=True)

    def _path(self, *names: str) -> str:
        return "/".join([self._root.rstrip("/"), *(checked(name) for name in names)])

    def _entries(self, path: str) -> dict[str, Any]:
        """What is in a folder, by its last name; nothing if there is no such folder."""
        with _os_errors():
            self._fs.invalidate_cache()  # others write there
            try:
                found = self._fs.ls(path, detail=True)
            except FileNotFoundError:
                return {}
        return {entry["name"].rstrip("/").rsplit("/", 1)[-1]: entry for entry in found}


class _Reader:
    """A file of fsspec whose errors are OSErrors."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def read(self, count: int = -1) -> bytes:
        with _os_errors():
            return bytes(self._file.read(count))

    def readinto(self, target: memoryview) -> int:
        with _os_errors():
            return int(self._file.readinto(target))


def _seconds(moment: datetime) -> float:
    """Since the epoch. File systems that do not name a zone mean UTC."""
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()


@contextmanager
def _os_errors() -> Iterator[None]:
    """File systems of fsspec raise whatever their libraries do."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
