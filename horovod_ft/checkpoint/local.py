"""Checkpoints in a local folder, or in one that all hosts share. Follows no link below it.

A file is written under a temporary name, brought to the disk, and renamed; then the folder that has its new name is
brought to the disk. Folders are opened first and names looked up in them, so that nobody can put a link in between.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from horovod_ft.checkpoint.layout import TEMPORARY
from horovod_ft.checkpoint.storage import checked

FILE_MODE = 0o600
FOLDER_MODE = 0o700
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
#: What a file system answers that cannot bring a folder to the disk on request, such as one over a network.
_CANNOT = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)


class LocalStorage:
    """See ``storage.Storage``.

    Args:
        root: the folder that holds the checkpoints. It is made if need be, but not what is above it: a folder that
            should have been mounted there is better missed than replaced.
    """

    cached = True

    def __init__(self, root: Path) -> None:
        self._root = root
        self.url = str(root)

    def create(self, folder: str) -> None:
        self._make_root()
        with self._open_root() as root:
            os.mkdir(checked(folder), FOLDER_MODE, dir_fd=root)
            _sync_folder(root)

    def folders(self) -> list[str]:
        try:
            with os.scandir(self._root) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir())
        except FileNotFoundError:
            return []

    def sizes(self, folder: str) -> dict[str, int]:
        return {name: found.st_size for name, found in self._stats(folder).items() if stat.S_ISREG(found.st_mode)}

    def modified(self, folder: str) -> float | None:
        try:
            with self._open_folder(folder) as opened:
                mine = os.fstat(opened).st_mtime
        except FileNotFoundError:
            return None
        return max([mine, *(found.st_mtime for found in self._stats(folder).values())])

    def write(self, folder: str, file: str, chunks: Iterable[bytes | memoryview]) -> None:
        name, temporary = checked(file), file + TEMPORARY
        with contextlib.suppress(FileExistsError):
            self.create(folder)
        with self._open_folder(folder) as opened:
            try:
                _write_durably(temporary, opened, chunks)
                os.rename(temporary, name, src_dir_fd=opened, dst_dir_fd=opened)
                _sync_folder(opened)
            except BaseException:
                for left in (temporary, name):
                    with contextlib.suppress(OSError):
                        os.unlink(left, dir_fd=opened)
                raise

    def open(self, folder: str, file: str) -> BinaryIO:
        with self._open_folder(folder) as opened:
            # Not blocking, so that a pipe of that name cannot hold up the reader.
            fd = os.open(checked(file), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=opened)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "it is no regular file", file)
        return os.fdopen(fd, "rb")

    def delete(self, folder: str, first: str) -> None:
        with self._open_folder(folder) as opened:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(checked(first), dir_fd=opened)
            _sync_folder(opened)
        shutil.rmtree(self._root / checked(folder))  # which follows no links either
        with self._open_root() as root:
            _sync_folder(root)

    def _make_root(self) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._root, FOLDER_MODE)
            with _opened(os.open(self._root.parent, _FOLDER)) as above:
                _sync_folder(above)

    def _open_root(self) -> contextlib.AbstractContextManager[int]:
        return _opened(os.open(self._root, _FOLDER))

    @contextmanager
    def _open_folder(self, folder: str) -> Iterator[int]:
        with self._open_root() as root, _opened(os.open(checked(folder), _FOLDER | os.O_NOFOLLOW, dir_fd=root)) as fd:
            yield fd

    def _stats(self, folder: str) -> dict[str, os.stat_result]:
        """Of all that is in a folder, links themselves and not what they lead to."""
        found: dict[str, os.stat_result] = {}
        try:
            with self._open_folder(folder) as opened:
                for name in os.listdir(opened):
                    with contextlib.suppress(FileNotFoundError):  # renamed meanwhile, by a worker that is writing
                        found[name] = os.stat(name, dir_fd=opened, follow_symlinks=False)
        except FileNotFoundError:
            return {}
        return found


@contextmanager
def _opened(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


def _sync_folder(fd: int) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise


def _write_durably(name: str, folder: int, chunks: Iterable[bytes | memoryview]) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)  # left there by a try that was killed; it may have another mode, or be a link
    with _opened(os.open(name, _NEW, FILE_MODE, dir_fd=folder)) as fd:
        for chunk in chunks:
            rest = memoryview(chunk)
            while rest:
                rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
