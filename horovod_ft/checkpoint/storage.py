"""Where checkpoints lie: the protocol of a storage, which one a URL means, and what to do about its errors.

Knows nothing of what is in the files. What every storage has to keep to is checked by ``testing.check_store``.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from horovod_ft.checkpoint import layout
from horovod_ft.errors import ConfigurationError, StorageError


class Storage(Protocol):
    """Files in folders of one level.

    Every error is an OSError. Names are checked with ``checked`` before they become part of a path. Several processes,
    on several hosts, write different files into one folder at the same time. All methods block.

    Attributes:
        url: where it is, for messages.
        cached: what one process has read is in the memory of its host for all others there.
    """

    url: str
    cached: bool

    def create(self, folder: str) -> None:
        """Make a folder, and what holds all folders if need be.

        Raises:
            FileExistsError: there is one with that name.
        """

    def folders(self) -> list[str]:
        """Names of all folders, whoever made them; none if nothing has been written yet."""

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of the regular files in a folder, by name; none if there is no such folder. What others have written is
        seen.
        """

    def modified(self, folder: str) -> float | None:
        """When anything in a folder was last written, in seconds since the epoch; None if that cannot be known."""

    def write(self, folder: str, file: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Write a file, in place of one with that name. The folder is made if need be.

        On return the file survives a crash of the machine. A write that fails leaves no file with that name, as far as
        the storage can see to that, and an error of ``chunks`` is raised as it is or as an OSError.
        """

    def open(self, folder: str, file: str) -> BinaryIO:
        """Open a file for reading, at its beginning. Links are not followed."""

    def delete(self, folder: str, first: str) -> None:
        """Delete a folder with all in it. The file ``first`` is gone for good before anything else is touched."""


def checked(name: str) -> str:
    """A name that may be joined to a path.

    Raises:
        OSError: it could lead out of the folder.
    """
    if not layout.is_plain(name):
        raise OSError(errno.EINVAL, "the name is not a plain one, and could lead out of the folder", name)
    return name


def storage_for(url: str | os.PathLike[str]) -> Storage:
    """The storage that a URL means: a folder for a path without a scheme and for ``file://``, else one of fsspec.

    Raises:
        ConfigurationError: it is empty, or fsspec cannot use it.
    """
    # Looked for only when they are needed: fsspec's file systems load much.
    from horovod_ft.checkpoint.local import LocalStorage  # noqa: PLC0415
    from horovod_ft.checkpoint.remote import FsspecStorage  # noqa: PLC0415

    text = os.fspath(url)
    scheme, separator, rest = text.partition("://")
    place = rest if separator and scheme in ("file", "local") else text
    if not place:
        raise ConfigurationError(f"{text!r} names no place for checkpoints: give a folder, or a URL such as s3://bucket/run")
    if separator and scheme not in ("file", "local"):
        return FsspecStorage(text)
    return LocalStorage(Path(place).expanduser().absolute())


# --- errors --------------------------------------------------------------------------------------------------------

_FULL = "Free space, for example with `horovod-ft checkpoints prune`, or use another folder"
_DENIED = "Let this user write there, or use another folder"
_REMEDIES = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EROFS: "Mount it writable, or use another folder",
    errno.EACCES: _DENIED,
    errno.EPERM: _DENIED,
    errno.ENOENT: "Make the folder above it, or mount what should be there",
    errno.ELOOP: "It is a link, and links are not followed: put the files themselves there",
    errno.ENOTDIR: "It is a file or a link, which is not followed: a folder is needed there",
    errno.EEXIST: "Give each attempt an id of its own",
    errno.ESTALE: "The server of this folder has replaced it: mount it again",
}


@contextmanager
def explained(doing: str, *where: str) -> Iterator[None]:
    """Turn an OSError into one that says what, where, why, and what to do.

    Raises:
        StorageError: in its place.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        remedy = _REMEDIES.get(error.errno or 0, "See that the storage can be reached, and try again")
        raise StorageError(f"cannot {doing} {'/'.join(where)}: {reason}. {remedy}") from error
