"""Of the workers of a fit, the one of rank 0 writes the files of ``ModelCheckpoint``, whole or not at all."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import horovod.tensorflow
import keras
import numpy as np
import pytest

import horovod_ft.keras as hvd
from horovod_ft import runtime
from horovod_ft.errors import ConfigurationError
from horovod_ft.keras import one_writer
from horovod_ft.membership.base import Group

#: How TensorFlow's arrays are read when Keras writes them is not ours.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

X = np.random.default_rng(7).normal(size=(8, 3)).astype(np.float32)
Y = X[:, :1]


@pytest.fixture(autouse=True)
def _runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime of its own for each test, on the Horovod that this folder shares."""
    monkeypatch.setattr(horovod.tensorflow, "init", lambda *_, **__: None)
    monkeypatch.setattr(runtime._Process, "runtime", None)
    hvd.init()


class Rank:
    """This worker's rank in a group of three, as far as files are concerned."""

    def __init__(self) -> None:
        self.rank = 0

    def group(self) -> Group:
        return Group(self.rank, 3)


@pytest.fixture
def me(monkeypatch: pytest.MonkeyPatch) -> Rank:
    rank = Rank()
    monkeypatch.setattr(one_writer, "current", lambda: SimpleNamespace(group=rank.group))
    return rank


def compiled() -> Any:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse", jit_compile=False)
    return model


def fit(model: Any, *callbacks: Any, epochs: int = 2) -> None:
    guard = hvd.elastic.FaultToleranceCallback()
    model.fit(X, Y, batch_size=4, epochs=epochs, verbose=0, callbacks=[guard, *callbacks])


def at_epoch(epoch: int, act: Any) -> Any:
    return keras.callbacks.LambdaCallback(on_epoch_begin=lambda now, logs: act() if now == epoch else None)


def raising() -> None:
    raise KeyError("of the user's own")


def same_weights(one: Any, other: Any) -> bool:
    pairs = zip(one.get_weights(), other.get_weights(), strict=True)
    return all(np.array_equal(first, second) for first, second in pairs)


# --- who writes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.keras", "model.h5", "new/folder/{epoch}.keras"])
def test_rank_zero_writes_a_model_that_can_be_loaded(me: Rank, tmp_path: Path, name: str) -> None:
    model = compiled()
    fit(model, keras.callbacks.ModelCheckpoint(tmp_path / name))
    path = tmp_path / name.format(epoch=2)
    assert same_weights(keras.saving.load_model(path, compile=False), model)
    assert {one.name for one in path.parent.iterdir()} <= {path.name, "1.keras"}


def test_rank_zero_writes_weights_that_can_be_loaded(me: Rank, tmp_path: Path) -> None:
    model, other = compiled(), compiled()
    fit(model, keras.callbacks.ModelCheckpoint(tmp_path / "of.weights.h5", save_weights_only=True))
    other.load_weights(tmp_path / "of.weights.h5")
    assert same_weights(other, model)
    assert [one.name for one in tmp_path.iterdir()] == ["of.weights.h5"]


@pytest.mark.parametrize(("name", "weights"), [("model.keras", False), ("of.weights.h5", True)])
def test_another_rank_writes_nothing_and_knows_the_best_all_the_same(
    me: Rank, tmp_path: Path, name: str, weights: bool
) -> None:
    me.rank = 1
    checkpoint = keras.callbacks.ModelCheckpoint(
        tmp_path / name, monitor="loss", save_best_only=True, save_weights_only=weights
    )
    fit(compiled(), checkpoint)
    assert list(tmp_path.iterdir()) == []
    assert checkpoint.best is not None


def test_who_comes_to_be_rank_zero_goes_on_writing(me: Rank, tmp_path: Path) -> None:
    me.rank = 1
    fit(
        compiled(),
        keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras"),
        at_epoch(1, lambda: setattr(me, "rank", 0)),
        epochs=3,
    )
    assert sorted(one.name for one in tmp_path.iterdir()) == ["2.keras", "3.keras"]


class AtBothEnds(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    def on_train_begin(self, logs: Any = None) -> None:
        self.model.save(self.filepath)

    def on_train_end(self, logs: Any = None) -> None:
        self.model.save(self.filepath)


def test_a_class_made_from_it_writes_at_the_borders_of_training_on_one_worker_too(me: Rank, tmp_path: Path) -> None:
    me.rank = 1
    fit(compiled(), AtBothEnds(tmp_path / "model.keras"))
    assert list(tmp_path.iterdir()) == []


def test_its_folder_is_there_before_the_workers_could_make_it_at_once(me: Rank, tmp_path: Path) -> None:
    seen: list[bool] = []
    look = at_epoch(0, lambda: seen.append((tmp_path / "new").is_dir()))
    fit(compiled(), keras.callbacks.ModelCheckpoint(tmp_path / "new" / "of-{epoch}" / "model.keras"), look)
    assert seen == [True]


# --- how it is written -----------------------------------------------------------------------------------------------


class Saved:
    """A model that notes where it was saved, and leaves some bytes there."""

    def __init__(self, *, error: Exception | None = None) -> None:
        self.error = error
        self.asked: list[str] = []
        self.stop_training = False

    def __call__(self, x: int) -> int:
        return x + 1

    def save(self, filepath: Any, overwrite: bool = True, **options: Any) -> None:
        self.asked.append(str(filepath))
        if "://" in str(filepath):
            return
        Path(filepath).write_text("new")
        if self.error is not None:
            raise self.error

    save_weights = save


@pytest.mark.parametrize("name", ["model.keras", "model.h5", "of.weights.h5"])
def test_a_file_is_whole_before_it_has_its_name(me: Rank, tmp_path: Path, name: str) -> None:
    model, path = Saved(), tmp_path / name
    one_writer.StandIn(model).save(path, overwrite=True)
    (asked,) = map(Path, model.asked)
    assert asked != path
    assert asked.parent == path.parent
    assert asked.suffixes[1:] == path.suffixes  # Keras looks at them
    assert path.read_text() == "new"


@pytest.mark.parametrize("save", ["save", "save_weights"])
def test_saving_that_fails_leaves_the_last_file_and_nothing_else(me: Rank, tmp_path: Path, save: str) -> None:
    path = tmp_path / "of.weights.h5"
    path.write_text("old")
    with pytest.raises(OSError, match="disk full"):
        getattr(one_writer.StandIn(Saved(error=OSError("disk full"))), save)(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_saving_that_fails_at_once_says_why(me: Rank, tmp_path: Path) -> None:
    model = compiled()
    model.save = lambda *_, **__: raising()
    with pytest.raises(KeyError, match="of the user's own"):
        fit(model, keras.callbacks.ModelCheckpoint(tmp_path / "model.keras"))
    assert list(tmp_path.iterdir()) == []


def test_a_link_goes_on_pointing_to_the_file(me: Rank, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "model.keras").symlink_to(tmp_path / "store" / "model.keras")
    one_writer.StandIn(Saved()).save(tmp_path / "model.keras")
    assert (tmp_path / "model.keras").is_symlink()
    assert (tmp_path / "store" / "model.keras").read_text() == "new"


@pytest.mark.parametrize(
    ("path", "options"),
    [("gs://bucket/model.keras", {}), ("of.weights.h5", {"max_shard_size": 1.0}), ("folder", {"zipped": False})],
)
def test_what_is_no_single_file_here_is_written_directly(
    me: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, options: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = Saved()
    one_writer.StandIn(model).save(path, **options)
    assert model.asked == [path]


# --- what stands in for the model ------------------------------------------------------------------------------------


def test_all_else_is_the_models() -> None:
    model = Saved()
    stand_in = one_writer.StandIn(model)
    assert isinstance(stand_in, Saved)
    assert stand_in.asked is model.asked
    assert stand_in(2) == 3
    stand_in.stop_training = True
    assert model.stop_training
    del stand_in.stop_training
    assert not hasattr(model, "stop_training")


def test_while_training_runs_the_callback_has_a_model() -> None:
    checkpoint, seen = keras.callbacks.ModelCheckpoint("model.keras", save_freq=1000), []
    fit(compiled(), checkpoint, at_epoch(1, lambda: seen.append(isinstance(checkpoint.model, keras.Model))))
    assert seen == [True]


def test_after_training_the_model_is_back() -> None:
    model, checkpoint = compiled(), keras.callbacks.ModelCheckpoint("model.keras", save_freq=1000)
    fit(model, checkpoint)
    assert checkpoint.model is model


def test_after_an_error_the_model_is_back_when_another_training_begins() -> None:
    model, checkpoint = compiled(), keras.callbacks.ModelCheckpoint("model.keras", save_freq=1000)
    with pytest.raises(KeyError):
        fit(model, checkpoint, at_epoch(1, raising))
    fit(compiled())
    assert checkpoint.model is model


def test_after_an_error_a_training_of_another_model_has_that_one(me: Rank, tmp_path: Path) -> None:
    checkpoint, other = keras.callbacks.ModelCheckpoint(tmp_path / "model.keras"), compiled()
    with pytest.raises(KeyError):
        fit(compiled(), checkpoint, at_epoch(1, raising))
    fit(other, checkpoint)
    assert checkpoint.model is other
    assert same_weights(keras.saving.load_model(tmp_path / "model.keras", compile=False), other)


@pytest.mark.parametrize("when", ["on_train_begin", "on_train_end"])
def test_after_an_error_at_the_borders_of_training_the_model_is_back(when: str) -> None:
    model, checkpoint = compiled(), keras.callbacks.ModelCheckpoint("model.keras", save_freq=1000)
    with pytest.raises(KeyError):
        fit(model, checkpoint, keras.callbacks.LambdaCallback(**{when: lambda logs: raising()}))
    assert checkpoint.model is model


# --- what is refused -------------------------------------------------------------------------------------------------


def test_backup_and_restore_beside_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"FaultToleranceCallback\(checkpoint=\.\.\.\)"):
        fit(compiled(), keras.callbacks.BackupAndRestore(tmp_path / "backup"))
    assert list(tmp_path.iterdir()) == []
