"""The commands on a checkpoint store: what they print, how they end, what they leave alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from horovod_ft.checkpoint.store import CheckpointStore
from tests.unit.checkpoint.made import half, save
from tests.unit.cli.conftest import Call
from tests.unit.cli.test_report import row

SHARD = "shard-00001-of-00002.safetensors"


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "run", wall=lambda: 86400.0 * 365)


def flip(store: CheckpointStore, step: int) -> None:
    path = Path(store.url) / f"step-{step:010d}-a" / SHARD
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def steps(store: CheckpointStore) -> list[int]:
    return [one.step for one in store.candidates()]


# --- ls ------------------------------------------------------------------------------------------------------------


def test_a_list_has_the_newest_first_with_what_it_is(call: Call, store: CheckpointStore) -> None:
    save(store, 7)
    half(store, 8)
    (Path(store.url) / "tensorboard").mkdir()
    told = call("checkpoints", "ls", store.url)
    assert told.code == 0
    names = [line.split()[0] for line in told.out.splitlines() if line.startswith(("  step-", "  tensorboard"))]
    assert names == ["step-0000000008-a", "step-0000000007-a", "tensorboard"]
    assert row(told.out, "step-0000000008-a ") == "step-0000000008-a half written"
    assert row(told.out, "step-0000000007-a ").startswith("step-0000000007-a 197")
    assert row(told.out, "step-0000000007-a ").endswith("B valid")
    assert row(told.out, "step-0000000008-a:") == "step-0000000008-a: it has no manifest: it was never finished"
    assert row(told.out, "tensorboard:") == "tensorboard: it is not named as a checkpoint of horovod_ft"


@pytest.mark.parametrize("command", [["ls"], ["verify"], ["show", "--tensors"]])
def test_tables_fit_into_eighty_columns(
    call: Call, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    save(store, 7, "0123456789abcdef")
    told = call("checkpoints", *command, store.url)
    table = [line for line in told.out.splitlines() if line.startswith(" ")]
    assert max(map(len, table)) <= 80
    assert "…" not in told.out
    assert "0123456789abcdef" in told.out


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_a_store_that_holds_nothing(call: Call, tmp_path: Path, command: str) -> None:
    told = call("checkpoints", command, str(tmp_path))
    assert f"{tmp_path} holds no checkpoint" in told.out
    assert told.code == (1 if command == "verify" else 0)


@pytest.mark.parametrize("command", ["ls", "verify", "show"])
def test_a_url_that_cannot_be_used_is_one_line(call: Call, command: str) -> None:
    told = call("checkpoints", command, "nowhere://x")
    assert (told.code, told.out) == (2, "")
    assert told.err.startswith("horovod-ft: checkpoints cannot be stored at 'nowhere://x'")


def test_a_file_is_no_store(call: Call, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    told = call("checkpoints", "ls", str(tmp_path / "file"))
    assert told.code == 2
    assert "a folder is needed there" in told.err


# --- verify --------------------------------------------------------------------------------------------------------


def test_a_sound_store(call: Call, store: CheckpointStore) -> None:
    save(store, 7)
    half(store, 8)
    told = call("checkpoints", "verify", store.url)
    assert told.code == 0
    assert "Sound (sizes only: --full reads every byte). A restore would use step-0000000007-a." in told.out


def test_altered_bytes_are_found_with_full_only(call: Call, store: CheckpointStore) -> None:
    save(store, 7)
    save(store, 8)
    flip(store, 8)
    assert call("checkpoints", "verify", store.url).code == 0
    told = call("checkpoints", "verify", "--full", store.url)
    assert told.code == 1
    assert "Not sound: step-0000000008-a. A restore would use step-0000000007-a." in told.out
    assert row(told.out, "step-0000000008-a ").endswith("damaged")
    assert f"step-0000000008-a: {SHARD} has been altered" in told.out


def test_a_store_of_which_nothing_can_be_restored(call: Call, store: CheckpointStore) -> None:
    half(store, 8)
    told = call("checkpoints", "verify", "--full", store.url)
    assert told.code == 1
    assert "No checkpoint can be restored." in told.out


# --- show ----------------------------------------------------------------------------------------------------------


def test_the_newest_valid_one_is_shown(call: Call, store: CheckpointStore) -> None:
    save(store, 7)
    half(store, 8)
    told = call("checkpoints", "show", store.url)
    assert told.code == 0
    assert row(told.out, "step ") == "step 7"
    assert row(told.out, "saved").endswith("by 2 workers of generation 4")
    assert "torch 2.0" in row(told.out, "with")
    assert row(told.out, "tensors") == "tensors 4, 71 B"
    assert row(told.out, SHARD).split()[-1].startswith("xxh3_128:")
    assert row(told.out, "worker-00002-of-00002.json").split()[-1].startswith("xxh3_128:")
    assert "net.weight" not in told.out


def test_tensors_are_shown_on_demand(call: Call, store: CheckpointStore) -> None:
    save(store, 7)
    told = call("checkpoints", "show", "--tensors", store.url)
    assert row(told.out, "net.weight") == "net.weight F32 [5, 3] 60 B"
    assert row(told.out, "net.steps") == "net.steps I64 [] 8 B"


def test_one_of_a_step_is_shown_even_if_it_is_damaged(call: Call, store: CheckpointStore) -> None:
    save(store, 7)
    save(store, 8)
    (Path(store.url) / "step-0000000007-a" / SHARD).unlink()
    assert row(call("checkpoints", "show", store.url, "7").out, "step ") == "step 7"


def test_a_step_that_is_not_there(call: Call, store: CheckpointStore) -> None:
    half(store, 8)
    told = call("checkpoints", "show", store.url, "9")
    assert (told.code, told.err) == (2, f"horovod-ft: {store.url} holds no checkpoint of step 9\n")
    assert "step-0000000008-a: it has no manifest" in call("checkpoints", "show", store.url, "8").err


def test_nothing_to_show_lists_what_is_there(call: Call, store: CheckpointStore) -> None:
    half(store, 8)
    told = call("checkpoints", "show", store.url)
    assert told.code == 2
    assert "step-0000000008-a: it has no manifest" in told.err


def test_pickled_values_are_told(call: Call, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, allow_pickle=True)
    folder = store.begin(1, "a")
    record = store.write_values(folder, {"odd": {1}})
    shard = store.write_shard(folder, 0, 1, [])
    store.commit(folder, [], [shard], [store.write_worker(folder, 0, 1, shard, {"own": {2}})], record)
    told = row(call("checkpoints", "show", store.url).out, "values")
    assert told.endswith("with pickles of state.odd, state.own")


# --- prune ---------------------------------------------------------------------------------------------------------


def test_prune_says_what_it_has_done(call: Call, store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        save(store, step)
    half(store, 4)
    told = call("checkpoints", "prune", store.url, "--keep-last", "2")
    assert told.code == 0
    lines = [line.split(maxsplit=2) for line in told.out.splitlines()]
    assert lines[:3] == [["kept", "step-0000000003-a"], ["kept", "step-0000000002-a"], ["deleted", "step-0000000001-a"]]
    assert lines[3][:2] == ["left", "alone"]
    assert "step-0000000004-a (half written: it was last written" in told.out
    assert steps(store) == [4, 3, 2]


def test_a_dry_run_deletes_nothing(call: Call, store: CheckpointStore) -> None:
    for step in (1, 2):
        save(store, step)
    half(store, 3)
    told = call("checkpoints", "prune", store.url, "--keep-last", "1", "--grace", "0", "--dry-run")
    assert row(told.out, "would delete  step-0000000001-a")
    assert row(told.out, "would delete  step-0000000003-a (abandoned)")
    assert steps(store) == [3, 2, 1]


def test_multiples_stay_and_abandoned_attempts_go(call: Call, store: CheckpointStore) -> None:
    for step in (10, 15, 20, 25):
        save(store, step)
    half(store, 30)
    call("checkpoints", "prune", store.url, "--keep-last", "1", "--keep-every", "10", "--grace", "0")
    assert steps(store) == [25, 20, 10]


def test_the_last_that_can_be_restored_stays_unless_only_a_quick_look_is_wanted(
    call: Call, store: CheckpointStore
) -> None:
    for step in (1, 2):
        save(store, step)
    flip(store, 2)
    told = call("checkpoints", "prune", store.url, "--keep-last", "1")
    assert "step-0000000002-a (damaged: " in told.out
    assert steps(store) == [2, 1]
    call("checkpoints", "prune", store.url, "--keep-last", "1", "--quick")
    assert steps(store) == [2]


def test_an_empty_store_needs_no_pruning(call: Call, tmp_path: Path) -> None:
    assert call("checkpoints", "prune", str(tmp_path), "--keep-last", "1").out == "There is nothing to prune.\n"


@pytest.mark.parametrize("arguments", [[], ["--keep-last", "0"], ["--keep-last", "1", "--keep-every", "0"]])
def test_a_rule_that_keeps_nothing_is_wrong_usage(call: Call, store: CheckpointStore, arguments: list[str]) -> None:
    save(store, 1)
    assert call("checkpoints", "prune", store.url, *arguments).code == 2
    assert steps(store) == [1]


@pytest.mark.parametrize("command", ["ls", "verify", "show", "prune"])
def test_each_command_has_help(call: Call, command: str) -> None:
    told = call("checkpoints", command, "--help")
    assert told.code == 0
    assert f"Usage: horovod-ft checkpoints {command}" in told.out
