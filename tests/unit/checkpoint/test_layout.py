"""Names in a store: what they say, and which can be joined to a path."""

from __future__ import annotations

from random import Random

import pytest

from horovod_ft.checkpoint.layout import (
    MANIFEST,
    TEMPORARY,
    VALUES,
    Place,
    folder_name,
    is_plain,
    new_attempt,
    parse_folder,
    parse_shard,
    parse_worker,
    shard_name,
    worker_name,
)
from horovod_ft.errors import UsageError


def test_a_folder_is_named_by_step_and_attempt() -> None:
    assert folder_name(1234, "9f3c") == "step-0000001234-9f3c"
    assert parse_folder("step-0000001234-9f3c") == Place(1234, "9f3c")


def test_folders_sort_by_step() -> None:
    assert folder_name(999, "z") < folder_name(1000, "a")


def test_a_step_of_more_digits_is_read_back() -> None:
    assert parse_folder(folder_name(10**12, "a")) == Place(10**12, "a")


@pytest.mark.parametrize(("step", "attempt"), [(-1, "a"), (1, ""), (1, "A"), (1, "a/b"), (1, ".."), (1, "a" * 33)])
def test_what_names_no_folder_is_refused(step: int, attempt: str) -> None:
    with pytest.raises(UsageError, match="name no checkpoint"):
        folder_name(step, attempt)


@pytest.mark.parametrize(
    "name",
    ["step-1-a", "step-0000000001", "step-0000000001-a\n", "tensorboard",
     "step-000000000\N{ARABIC-INDIC DIGIT ONE}-a"],
)  # fmt: skip
def test_other_names_are_no_checkpoint(name: str) -> None:
    assert parse_folder(name) is None


def test_attempts_differ_and_can_be_drawn_again() -> None:
    random = Random(1)
    first, second = new_attempt(random), new_attempt(random)
    assert first != second
    assert new_attempt(Random(1)) == first
    assert parse_folder(folder_name(5, first)) == Place(5, first)


def test_a_shard_is_named_from_one() -> None:
    assert shard_name(1, 4) == "shard-00002-of-00004.safetensors"
    assert parse_shard("shard-00002-of-00004.safetensors") == (1, 4)


def test_there_is_no_shard_of_a_worker_that_does_not_exist() -> None:
    with pytest.raises(UsageError, match="no worker 4 of 4"):
        shard_name(4, 4)


@pytest.mark.parametrize(
    "name",
    ["shard-00000-of-00004.safetensors", "shard-00005-of-00004.safetensors", "shard-000001-of-00004.safetensors",
     "../shard-00001-of-00004.safetensors", "shard-00001-of-00004.safetensors.tmp"],
)  # fmt: skip
def test_other_names_are_no_shard(name: str) -> None:
    assert parse_shard(name) is None


def test_a_worker_has_a_file_beside_its_shard() -> None:
    assert worker_name(1, 4) == "worker-00002-of-00004.json"
    assert parse_worker("worker-00002-of-00004.json") == (1, 4)


def test_there_is_no_file_of_a_worker_that_does_not_exist() -> None:
    with pytest.raises(UsageError, match="no worker -1 of 4"):
        worker_name(-1, 4)


@pytest.mark.parametrize(
    "name",
    ["worker-00000-of-00004.json", "worker-00005-of-00004.json", "worker-00001-of-00004.safetensors",
     "../worker-00001-of-00004.json", "worker-00001-of-00004.json.tmp", "shard-00001-of-00004.json"],
)  # fmt: skip
def test_other_names_are_no_file_of_a_worker(name: str) -> None:
    assert parse_worker(name) is None


@pytest.mark.parametrize("name", [MANIFEST, VALUES, MANIFEST + TEMPORARY, shard_name(0, 1), worker_name(0, 1)])
def test_our_own_names_can_be_joined_to_a_path(name: str) -> None:
    assert is_plain(name)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "/etc/passwd", "a/b", "a\\b", ".hidden", "a\0b", "a\n", "~root", "*", "a:b", "x" * 201],
)
def test_what_could_lead_elsewhere_cannot(name: str) -> None:
    assert not is_plain(name)
