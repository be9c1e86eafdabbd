"""The manifest: what it says, and what is believed of it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from horovod_ft.checkpoint.checksum import checksum
from horovod_ft.checkpoint.manifest import FORMAT, VERSION, Manifest, ValuesRecord, decode, encode
from horovod_ft.checkpoint.partition import Piece
from horovod_ft.checkpoint.shard import ShardRecord
from horovod_ft.checkpoint.tensors import TensorSpec
from horovod_ft.errors import (
    CheckpointError,
    DamagedCheckpointError,
    ForeignCheckpointError,
    NewerCheckpointError,
    UnsupportedStateError,
)

SUM = checksum(b"")
FIRST = ShardRecord("shard-00001-of-00002.safetensors", 108, SUM, (Piece("w", 0, 8),))
SECOND = ShardRecord("shard-00002-of-00002.safetensors", 108, SUM, (Piece("w", 8, 16),))
ONE = ValuesRecord("worker-00001-of-00002.json", 30, SUM)
TWO = ValuesRecord("worker-00002-of-00002.json", 30, SUM, ("state.odd",))
MANIFEST = Manifest(
    12, "a1", 3, 1000.5, {"python": "3.11"}, (TensorSpec("w", "F32", (4,)),), (FIRST, SECOND),
    (ONE, TWO), ValuesRecord("values.json", 2, SUM),
)  # fmt: skip
FOLDER = "step-0000000012-a1"


def altered(**fields: Any) -> Manifest:
    return msgspec.structs.replace(MANIFEST, **fields)


def with_shard(**fields: Any) -> Manifest:
    return altered(shards=(msgspec.structs.replace(FIRST, **fields), SECOND))


def with_worker(**fields: Any) -> Manifest:
    return altered(workers=(msgspec.structs.replace(ONE, **fields), TWO))


def unchecked(manifest: Manifest) -> bytes:
    """As ``encode``, for manifests that it would refuse."""
    return enveloped(msgspec.json.encode(manifest))


def enveloped(body: bytes, **fields: Any) -> bytes:
    seal = checksum(f"{VERSION} ".encode() + body)
    envelope = {"format": FORMAT, "version": VERSION, "checksum": seal, **fields}
    return json.dumps(envelope)[:-1].encode() + b', "manifest": ' + body + b"}"


def test_what_was_encoded_is_decoded() -> None:
    assert decode(encode(MANIFEST), FOLDER) == MANIFEST


def test_it_is_json_that_others_can_read() -> None:
    text = json.loads(encode(MANIFEST))
    assert (text["format"], text["version"]) == ("horovod_ft checkpoint", 1)
    assert text["manifest"]["shards"][1]["pieces"] == [["w", 8, 16]]


def test_it_knows_its_folder_its_files_and_their_bytes() -> None:
    assert (MANIFEST.folder, MANIFEST.size, MANIFEST.nbytes) == (FOLDER, 2, 278)
    assert MANIFEST.files == {
        FIRST.file: (108, SUM), SECOND.file: (108, SUM), ONE.file: (30, SUM), TWO.file: (30, SUM),
        "values.json": (2, SUM),
    }  # fmt: skip


def test_it_knows_what_is_pickled_in_any_of_its_documents() -> None:
    assert MANIFEST.pickled == ("state.odd",)


def test_a_step_of_zero_may_be_saved() -> None:
    first = altered(step=0)
    assert decode(encode(first), "step-0000000000-a1") == first


# --- damage --------------------------------------------------------------------------------------------------------


def is_damaged(data: bytes) -> bool:
    try:
        decode(data, FOLDER)
    except DamagedCheckpointError:
        return True
    return False


def test_any_flipped_bit_is_found() -> None:
    good = encode(MANIFEST)
    missed = []
    for place in range(8 * len(good)):
        bad = bytearray(good)
        bad[place // 8] ^= 1 << place % 8
        if not is_damaged(bytes(bad)):
            missed.append(place)
    assert not missed


def test_a_manifest_that_is_cut_short_is_found() -> None:
    good = encode(MANIFEST)
    for length in range(len(good)):
        with pytest.raises(DamagedCheckpointError, match="cut short"):
            decode(good[:length], FOLDER)


def test_an_altered_body_is_told_as_that() -> None:
    with pytest.raises(DamagedCheckpointError, match="has been altered"):
        decode(encode(MANIFEST).replace(b'"step":12', b'"step":13'), FOLDER)


def test_a_newer_format_is_told_with_both_versions_whatever_its_body_is() -> None:
    with pytest.raises(NewerCheckpointError, match="has version 7, and this horovod_ft reads versions up to 1"):
        decode(enveloped(b'{"all": "new"}', version=7), FOLDER)


@pytest.mark.parametrize("data", [b"{}", b'{"step": 12}', b"[]", b'{"format": "other", "version": 1, "manifest": 0}'])
def test_a_manifest_of_something_else_is_foreign(data: bytes) -> None:
    with pytest.raises(ForeignCheckpointError, match="its manifest is"):
        decode(data, FOLDER)


def test_a_manifest_in_the_folder_of_another_is_told() -> None:
    with pytest.raises(DamagedCheckpointError, match="is that of step-0000000012-a1"):
        decode(encode(MANIFEST), "step-0000000013-a1")


def test_a_body_that_lacks_a_field_is_told() -> None:
    with pytest.raises(DamagedCheckpointError, match=r"cannot be read: .*missing required field"):
        decode(enveloped(b'{"step": 12}'), FOLDER)


# --- what is not believed, whoever made the checksum ---------------------------------------------------------------

WRONG = {
    "names that leave the folder": (with_shard(file="../shard-00001-of-00002.safetensors"), "not the name of shard 1"),
    "absolute names": (with_shard(file="/etc/passwd"), "not the name of shard 1 of 2"),
    "the name of another shard": (with_shard(file=SECOND.file), "not the name of shard 1 of 2"),
    "another name of the values": (altered(values=ValuesRecord("../v", 2, SUM)), "not the name of the values"),
    "a worker's file that leaves the folder": (with_worker(file="../w"), "'../w' is not the name of worker 1 of 2"),
    "the file of another worker": (with_worker(file=TWO.file), "is not the name of worker 1 of 2"),
    "no checksum of a worker's file": (with_worker(checksum="none"), "'none' is no checksum of worker-00001"),
    "a worker's file that is missing": (altered(workers=(ONE,)), "1 files of workers for 2 shards"),
    "an attempt that leads elsewhere": (altered(attempt="../a"), "name no folder"),
    "a negative step": (altered(step=-1), "name no folder"),
    "no checksum": (with_shard(checksum="none"), "'none' is no checksum of shard-00001"),
    "a shard that is too short": (with_shard(nbytes=9), "has 9 bytes, and its pieces 8"),
    "a piece that is missing": (with_shard(pieces=()), "after byte 0 of 'w' comes a piece from 8"),
    "no shards": (altered(shards=(), workers=()), "have 0 of its 16 bytes"),
    "a piece of nothing": (with_shard(pieces=(Piece("v", 0, 8),)), "which is no tensor of it"),
}


@pytest.mark.parametrize(("manifest", "told"), WRONG.values(), ids=WRONG)
def test_a_wrong_manifest_is_neither_read_nor_written(manifest: Manifest, told: str) -> None:
    with pytest.raises(DamagedCheckpointError, match=told):
        decode(unchecked(manifest), FOLDER)
    with pytest.raises(CheckpointError, match=rf"^cannot save step {manifest.step}: .*{told}"):
        encode(manifest)


@pytest.mark.parametrize("spec", [TensorSpec("w", "F99", (4,)), TensorSpec("w", "F32", (-1, -4))])
def test_tensors_that_cannot_be_are_not_believed(spec: TensorSpec) -> None:
    with pytest.raises(DamagedCheckpointError, match="cannot be read: tensor 'w'"):
        decode(unchecked(altered(tensors=(spec,))), FOLDER)


def test_two_tensors_of_one_name_are_not_believed() -> None:
    twice = altered(tensors=MANIFEST.tensors * 2)
    with pytest.raises(DamagedCheckpointError, match="two tensors have the name 'w'"):
        decode(unchecked(twice), FOLDER)
    with pytest.raises(UnsupportedStateError, match="two tensors have the name 'w'"):
        encode(twice)
