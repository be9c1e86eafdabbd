"""The conformance kit of checkpoint stores and of the storages under them. It knows no implementation.

Whoever writes a ``checkpoint.storage.Storage`` runs ``check_store`` on stores that use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from horovod_ft.checkpoint.checksum import CHUNK
from horovod_ft.checkpoint.inspection import Level, Status
from horovod_ft.checkpoint.manifest import Manifest
from horovod_ft.checkpoint.partition import parts
from horovod_ft.checkpoint.store import CheckpointStore
from horovod_ft.checkpoint.tensors import Tensor, tensor
from horovod_ft.errors import DamagedCheckpointError, NoCheckpointError, StorageError

FOLDER = "step-0000000001-kit"
FILE = "file.bin"


def check_store(make_store: Callable[[], CheckpointStore]) -> None:
    """Check that a store keeps what it is given, finds what was damaged, and leaves nothing half done that looks whole.

    It writes some megabytes to each of about a dozen stores, and leaves them there. It cannot pull the plug: whether
    what was written survives a crash of the machine is not checked.

    Args:
        make_store: called for each check; it has to return a store that holds nothing, at a place of its own. An
            example is ``lambda: CheckpointStore(tempfile.mkdtemp())``; for a storage of your own it is
            ``lambda: CheckpointStore("", storage=MyStorage(...))``.

    Raises:
        AssertionError: begins with the name of the check, one of STORE_CHECKS.
    """
    for name, check in STORE_CHECKS.items():
        try:
            check(make_store())
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
        except Exception as error:
            raise AssertionError(f"{name}: it raised {error!r}") from error


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise AssertionError(otherwise)


# --- what the checks write -----------------------------------------------------------------------------------------


def _state(seed: int) -> list[Tensor]:
    """A tensor longer than what is written at once, a narrow one, a scalar and an empty one."""
    random = np.random.default_rng(seed)
    return [
        tensor("long", "F32", (CHUNK // 4 + 1,), random.random(CHUNK // 4 + 1, np.float32)),
        tensor("narrow", "BOOL", (5,), random.random(5) < 0.5),
        tensor("scalar", "I64", (), np.array(seed)),
        tensor("empty", "BF16", (0, 2), b""),
    ]


def _begin(store: CheckpointStore, step: int, size: int = 2) -> tuple[str, Callable[[], Manifest]]:
    """Everything but the manifest, all shards at the same time; the second value writes that."""
    state, folder = _state(step), store.begin(step, "kit")
    with ThreadPoolExecutor(size) as threads:
        written = threads.map(lambda rank: store.write_shard(folder, rank, size, parts(state, rank, size)), range(size))
        shards = list(written)
    workers = [store.write_worker(folder, rank, size, shard, {"rank": rank}) for rank, shard in enumerate(shards)]
    values = store.write_values(folder, {"step": step})
    return folder, lambda: store.commit(folder, [one.spec for one in state], shards, workers, values)


def _save(store: CheckpointStore, step: int, size: int = 2) -> Manifest:
    return _begin(store, step, size)[1]()


def _restored(store: CheckpointStore, manifest: Manifest) -> bool:
    """Whether what is read is what was written at that step."""
    state = _state(manifest.step)
    room = [tensor(one.spec.name, one.spec.dtype, one.spec.shape, bytearray(one.spec.nbytes)) for one in state]
    store.read(manifest, room)
    own = [store.read_worker(manifest, rank)["rank"] for rank in range(manifest.size)]
    same_values = store.read_values(manifest) == {"step": manifest.step} and own == list(range(manifest.size))
    return same_values and [one.data for one in room] == [one.data for one in state]


def _content(store: CheckpointStore, folder: str, file: str) -> bytes:
    with store.storage.open(folder, file) as opened:
        return opened.read()


def _newest(store: CheckpointStore, level: Level = Level.QUICK) -> int | None:
    try:
        return store.newest_valid(level).step
    except NoCheckpointError:
        return None


# --- the checks ----------------------------------------------------------------------------------------------------


def _check_empty(store: CheckpointStore) -> None:
    found = [candidate.folder for candidate in store.candidates()]
    _require(not found, f"a store that holds nothing lists {found}: make_store() has to return an empty one each time")


def _check_round_trip(store: CheckpointStore) -> None:
    for step, size in ((1, 1), (2, 3)):
        manifest = _save(store, step, size)
        _require(_newest(store) == step, f"after step {step} was saved, the newest valid one is {_newest(store)}")
        _require(_restored(store, manifest), f"what is read is not what {size} workers have written")
        found = store.verify(manifest.folder)
        _require(found.usable, f"what was just written does not verify: {found.problem}")


def _check_half_written(store: CheckpointStore) -> None:
    _save(store, 1)
    folder, commit = _begin(store, 2)
    _require(_newest(store) == 1, f"with a newer one that has no manifest, the newest valid one is {_newest(store)}")
    status = store.verify(folder).status
    _require(status is Status.HALF_WRITTEN, f"one without a manifest is told as {status.value}")
    commit()
    _require(_newest(store) == 2, "with its manifest it is still not found")


def _check_damage(store: CheckpointStore) -> None:
    _save(store, 1)
    manifest = _save(store, 2)
    file = manifest.shards[0].file
    good = _content(store, manifest.folder, file)
    store.storage.write(manifest.folder, file, [good[:-1]])
    _require(_newest(store) == 1, "a shard was cut short, and nobody noticed: does sizes() give the size of each file?")
    store.storage.write(manifest.folder, file, [good[:-1], bytes([good[-1] ^ 1])])
    unnoticed = "a bit of a shard was altered, and nobody noticed: does open() read what is there?"
    _require(_newest(store, Level.FULL) == 1, unnoticed)
    try:
        _restored(store, manifest)
    except DamagedCheckpointError:
        return
    raise AssertionError("a bit of a shard was altered, and it was restored without an error")


def _check_replace(store: CheckpointStore) -> None:
    store.storage.write(FOLDER, FILE, [b"long", b" content"])
    store.storage.write(FOLDER, FILE, [memoryview(b"short")])
    found = _content(store, FOLDER, FILE)
    _require(found == b"short", f"a file that was written again holds {found!r}, not what was written last")
    _require(store.storage.sizes(FOLDER) == {FILE: 5}, f"its folder holds {store.storage.sizes(FOLDER)}")


def _check_failed_write(store: CheckpointStore) -> None:
    def failing() -> Iterator[bytes]:
        yield bytes(CHUNK)
        raise OSError("the disk is full")

    try:
        store.storage.write(FOLDER, FILE, failing())
    except OSError:
        left = store.storage.sizes(FOLDER)
        _require(FILE not in left, f"a write failed half way, and left {left}")
        return
    raise AssertionError("a write failed half way, and write() raised no OSError")


def _check_create(store: CheckpointStore) -> None:
    store.begin(1, "kit")
    store.storage.write(FOLDER, FILE, [b"x"])
    _require(store.storage.folders() == [FOLDER], f"after one folder was made there are {store.storage.folders()}")
    try:
        store.begin(1, "kit")
    except StorageError:
        return
    raise AssertionError("a folder that is there was made again: create() has to raise FileExistsError")


def _check_missing(store: CheckpointStore) -> None:
    found = store.storage.sizes(FOLDER)
    _require(not found, f"sizes() of a folder that is not there is {found}: it has to be empty")
    store.storage.write(FOLDER, FILE, [b"x"])
    try:
        store.storage.open(FOLDER, "other.bin").read()
    except FileNotFoundError:
        return
    raise AssertionError("a file that is not there was opened: open() has to raise FileNotFoundError")


def _check_names(store: CheckpointStore) -> None:
    storage = store.storage
    storage.write(FOLDER, FILE, [b"x"])
    calls: dict[str, Callable[[str], object]] = {
        "write() into folder": lambda name: storage.write(name, FILE, [b"x"]),
        "write() of file": lambda name: storage.write(FOLDER, name, [b"x"]),
        "open() in folder": lambda name: storage.open(name, FILE),
        "open() of file": lambda name: storage.open(FOLDER, name),
        "sizes() of folder": storage.sizes,
    }
    for call, act in calls.items():
        for name in ("..", f"../{FOLDER}", "/horovod_ft-kit", "a/b", ""):
            try:
                act(name)
            except OSError:
                continue
            raise AssertionError(f"{call} {name!r} was not refused: a name from a manifest must not leave the store")


def _check_delete(store: CheckpointStore) -> None:
    _save(store, 1)
    gone = _save(store, 2).folder
    store.delete(gone)
    _require(_newest(store) == 1, f"after the newest was deleted, the newest valid one is {_newest(store)}")
    left = [candidate.folder for candidate in store.candidates()]
    _require(gone not in left and len(left) == 1, f"after {gone} was deleted there are {left}")
    _require(_restored(store, store.newest_valid()), "the one that is left cannot be restored")
    store.begin(2, "kit")


def _check_modified(store: CheckpointStore) -> None:
    store.storage.write(FOLDER, FILE, [b"x"])
    first = store.modified(FOLDER)
    store.storage.write(FOLDER, "later.bin", [b"x"])
    second = store.modified(FOLDER)
    if first is None or second is None:
        return
    _require(second >= first, f"a folder was modified at {first}, and after another write at {second}")
    _require(first > 1e9, f"modified() is {first}: it must be in seconds since the epoch")


STORE_CHECKS: dict[str, Callable[[CheckpointStore], None]] = {
    "an empty store": _check_empty,
    "what is written is read": _check_round_trip,
    "without a manifest it is no checkpoint": _check_half_written,
    "damage is found": _check_damage,
    "a file is replaced as a whole": _check_replace,
    "a failed write leaves nothing": _check_failed_write,
    "a folder is made once": _check_create,
    "a file that is not there": _check_missing,
    "delete": _check_delete,
    "modified": _check_modified,
    "names do not leave the store": _check_names,
}
