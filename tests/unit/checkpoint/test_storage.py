"""Storages beyond what the conformance kit asks: which one a URL means, modes, links, the order on the disk."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from horovod_ft.checkpoint.local import LocalStorage
from horovod_ft.checkpoint.remote import FsspecStorage
from horovod_ft.checkpoint.storage import explained, storage_for
from horovod_ft.errors import ConfigurationError, StorageError

FOLDER = "step-0000000001-a"


# --- URLs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["{}", "file://{}", "local://{}"])
def test_a_path_and_a_file_url_are_a_folder(tmp_path: Path, url: str) -> None:
    storage = storage_for(url.format(tmp_path))
    assert isinstance(storage, LocalStorage)
    assert storage.url == str(tmp_path)


def test_a_path_stays_where_it_is_when_the_process_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert storage_for("run").url == str(tmp_path / "run")


def test_another_scheme_is_a_file_system_of_fsspec() -> None:
    storage = storage_for("memory://some/run/")
    assert isinstance(storage, FsspecStorage)
    assert storage.url == "memory://some/run"


def test_an_unknown_scheme_is_told() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot be stored at 'nowhere://x': .*nowhere"):
        storage_for("nowhere://x")


@pytest.mark.parametrize("url", ["", "file://"])
def test_no_place_at_all_is_told(url: str) -> None:
    with pytest.raises(ConfigurationError, match="names no place for checkpoints"):
        storage_for(url)


# --- a folder ------------------------------------------------------------------------------------------------------


@pytest.fixture
def local(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "run")


@pytest.fixture
def permissive() -> Iterator[None]:
    """A umask that takes nothing away."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("permissive")
def test_nobody_else_can_read_what_is_written(local: LocalStorage, tmp_path: Path) -> None:
    local.write(FOLDER, "a.json", [b"x"])
    assert mode(tmp_path / "run" / FOLDER / "a.json") == 0o600
    assert mode(tmp_path / "run" / FOLDER) == mode(tmp_path / "run") == 0o700


def test_a_temporary_file_that_was_left_there_gives_its_mode_to_nobody(local: LocalStorage, tmp_path: Path) -> None:
    local.create(FOLDER)
    left = tmp_path / "run" / FOLDER / "a.json.tmp"
    left.write_bytes(b"longer than what comes")
    left.chmod(0o666)
    local.write(FOLDER, "a.json", [b"x"])
    assert mode(tmp_path / "run" / FOLDER / "a.json") == 0o600
    assert (tmp_path / "run" / FOLDER / "a.json").read_bytes() == b"x"


def test_a_link_in_the_place_of_a_temporary_file_is_not_followed(local: LocalStorage, tmp_path: Path) -> None:
    local.create(FOLDER)
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    (tmp_path / "run" / FOLDER / "a.json.tmp").symlink_to(outside)
    local.write(FOLDER, "a.json", [b"x"])
    assert outside.read_bytes() == b"precious"
    assert (tmp_path / "run" / FOLDER / "a.json").read_bytes() == b"x"


def test_a_link_in_the_place_of_the_file_is_replaced(local: LocalStorage, tmp_path: Path) -> None:
    local.create(FOLDER)
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    (tmp_path / "run" / FOLDER / "a.json").symlink_to(outside)
    local.write(FOLDER, "a.json", [b"x"])
    assert outside.read_bytes() == b"precious"
    assert not (tmp_path / "run" / FOLDER / "a.json").is_symlink()


def test_the_store_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    LocalStorage(tmp_path / "run").write(FOLDER, "a.json", [b"x"])
    assert (tmp_path / "disk" / FOLDER / "a.json").exists()


def test_a_pipe_in_the_place_of_a_file_does_not_hold_up_a_reader(local: LocalStorage, tmp_path: Path) -> None:
    local.create(FOLDER)
    os.mkfifo(tmp_path / "run" / FOLDER / "a.json")
    with pytest.raises(OSError, match="no regular file"):
        local.open(FOLDER, "a.json")
    assert local.sizes(FOLDER) == {}


def test_a_file_is_on_the_disk_before_it_has_its_name_and_then_its_folder(
    local: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.create(FOLDER)
    done: list[str] = []
    fsync, rename = os.fsync, os.rename

    def record_fsync(fd: int) -> None:
        done.append("fsync " + Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        fsync(fd)

    def record_rename(source: str, target: str, **where: Any) -> None:
        done.append(f"rename {source} {target}")
        rename(source, target, **where)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    local.write(FOLDER, "a.json", [b"x"])
    assert done == ["fsync a.json.tmp", "rename a.json.tmp a.json", f"fsync {FOLDER}"]


def test_a_file_system_that_cannot_bring_folders_to_the_disk_will_do(
    local: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def refuse(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", refuse)
    local.write(FOLDER, "a.json", [b"x"])
    assert local.sizes(FOLDER) == {"a.json": 1}


def test_what_is_not_there_has_no_files_and_no_age(local: LocalStorage) -> None:
    assert local.sizes(FOLDER) == {}
    assert local.modified(FOLDER) is None


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_whatever_call_fails_no_file_is_left(
    local: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    local.create(FOLDER)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        with pytest.raises(OSError, match="No space left"):
            local.write(FOLDER, "a.json", [b"x"])
    assert list((tmp_path / "run" / FOLDER).iterdir()) == []


def test_short_writes_are_continued(local: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda fd, data: write(fd, data[:2]))
        local.write(FOLDER, "a.json", [b"abcde", memoryview(b"fg")])
    with local.open(FOLDER, "a.json") as file:
        assert file.read() == b"abcdefg"


def test_the_manifest_is_gone_before_anything_else_is_deleted(
    local: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("manifest.json", "values.json"):
        local.write(FOLDER, name, [b"x"])

    on_the_disk: list[dict[str, int]] = []

    def killed(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", lambda fd: on_the_disk.append(local.sizes(FOLDER)))
    monkeypatch.setattr("shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        local.delete(FOLDER, "manifest.json")
    assert on_the_disk == [{"values.json": 1}]


def test_deleting_follows_no_links(local: LocalStorage, tmp_path: Path) -> None:
    local.create(FOLDER)
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    (tmp_path / "run" / FOLDER / "away").symlink_to(tmp_path / "precious")
    local.delete(FOLDER, "manifest.json")
    assert (tmp_path / "precious" / "file").exists()
    assert local.folders() == []


def test_descriptors_are_not_left_open(local: LocalStorage) -> None:
    before = len(os.listdir("/proc/self/fd"))
    local.write(FOLDER, "a.json", [b"x"])
    local.open(FOLDER, "a.json").close()
    local.sizes(FOLDER)
    local.modified(FOLDER)
    with pytest.raises(FileNotFoundError):
        local.open(FOLDER, "b.json")
    local.delete(FOLDER, "a.json")
    assert len(os.listdir("/proc/self/fd")) == before


# --- fsspec --------------------------------------------------------------------------------------------------------


@pytest.fixture
def remote(request: pytest.FixtureRequest) -> Iterator[FsspecStorage]:
    url = f"memory://{request.node.name}"
    yield FsspecStorage(url)
    fsspec.filesystem("memory").store.clear()


def test_errors_of_other_kinds_become_os_errors(remote: FsspecStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ValueError("no such bucket")

    monkeypatch.setattr(remote._fs, "ls", fail)
    with pytest.raises(OSError, match="ValueError: no such bucket"):
        remote.folders()


def test_what_others_have_written_is_seen_although_listings_are_cached(
    remote: FsspecStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    ls = remote._fs.ls

    def listed(path: str, detail: bool) -> Any:
        asked.append("listed")
        return ls(path, detail=detail)

    monkeypatch.setattr(remote._fs, "invalidate_cache", lambda *path: asked.append("invalidated"))
    monkeypatch.setattr(remote._fs, "ls", listed)
    remote.folders()
    assert asked == ["invalidated", "listed"]


def test_the_manifest_is_gone_first_there_as_well(remote: FsspecStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("manifest.json", "values.json"):
        remote.write(FOLDER, name, [b"x"])

    def killed(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(remote._fs, "rm", killed)
    with pytest.raises(KeyboardInterrupt):
        remote.delete(FOLDER, "manifest.json")
    assert remote.sizes(FOLDER) == {"values.json": 1}


def test_a_file_system_without_times_does_not_know_when(remote: FsspecStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str) -> None:
        raise NotImplementedError

    remote.write(FOLDER, "a.json", [b"x"])
    monkeypatch.setattr(remote._fs, "modified", fail)
    assert remote.modified(FOLDER) is None


# --- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.ENOSPC, "Free space, for example with"), (errno.EDQUOT, "Free space, for example with"),
        (errno.EROFS, "Mount it writable"), (errno.EACCES, "Let this user write there"),
        (errno.ENOENT, "Make the folder above it"), (errno.EIO, "See that the storage can be reached"),
    ],
)  # fmt: skip
def test_an_error_says_what_where_why_and_what_to_do(code: int, remedy: str) -> None:
    with pytest.raises(StorageError) as error, explained("write", "/run", FOLDER, "a.json"):
        raise OSError(code, os.strerror(code))
    assert str(error.value).startswith(f"cannot write /run/{FOLDER}/a.json: {os.strerror(code)}. {remedy}")
    assert isinstance(error.value.__cause__, OSError)


def test_an_error_without_a_number_is_told_all_the_same() -> None:
    with pytest.raises(StorageError, match=r"cannot read x: no such bucket\. See that"), explained("read", "x"):
        raise OSError("no such bucket")


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_folder_that_may_not_be_written_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="Let this user write there"), explained("write", str(tmp_path)):
        LocalStorage(tmp_path).write(FOLDER, "a.json", [b"x"])
    tmp_path.chmod(0o700)
