"""A PyTorch training through a durable checkpoint: it goes on, bitwise, in this process or another, in any group."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

import horovod_ft.torch as hvd
from horovod_ft.checkpoint import CheckpointStore, values
from horovod_ft.checkpoint.manifest import Manifest
from horovod_ft.checkpoint.partition import Piece, plan
from horovod_ft.errors import MismatchError, UnsupportedStateError
from horovod_ft.torch.arena import HostMemory
from horovod_ft.torch.durable import runs
from horovod_ft.torch.elastic import ElasticDataLoader, ElasticSampler, LearningRateRule, TorchState, _OtherState
from horovod_ft.torch.parts import RandomState
from tests.unit.torch.test_replica import Odd
from tests.unit.torch.tools import backward, copy_of, distributed, make, network, same, train

KINDS = ["SGD", "Adam", "AdamW", "RMSprop", "ASGD", "Adafactor"]


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 3))


class Training:
    """Batch normalization, dropout, a scheduler, a scaler, a loader, tracked values; three batches an epoch."""

    def __init__(self, kind: str = "SGD", *, seed: int = 1, **more: Any) -> None:
        torch.manual_seed(7)
        data = TensorDataset(torch.randn(12, 4), torch.randint(0, 3, (12,)))
        torch.manual_seed(seed)
        self.model = perceptron()
        options = {"amsgrad": True} if kind == "AdamW" else {}
        self.optimizer = distributed(self.model, make(kind, self.model.parameters(), **options))
        self.state: Any = TorchState(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=lr_scheduler.MultiStepLR(self.optimizer, [2, 4]),
            scaler=torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2),
            loader=ElasticDataLoader(data, global_batch_size=4, shuffle=True),
            history=[],
            best={"loss": 9.0, "at": (0, None)},
            **more,
        )

    def body(self, x: Tensor, y: Tensor) -> None:
        state = self.state
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        state.scaler.scale(loss).backward()
        state.scaler.step(self.optimizer)
        state.scaler.update()
        state.scheduler.step()
        state.history.append(loss.item())
        state.best["at"] = (state.loader.cursor.epoch, state.steps)

    def train(self, steps: int) -> list[Any]:
        """So many steps more; returns all there is then."""
        end = self.state.steps + steps

        @hvd.elastic.run
        def loop(state: Any) -> None:
            for _ in state.loader.epochs(100):
                for x, y in state.loader:
                    with state.step():
                        self.body(x, y)
                    if state.steps == end:
                        return

        loop(self.state)
        return self.result()

    def result(self) -> list[Any]:
        state = self.state
        return [
            copy_of(self.model), copy.deepcopy(self.optimizer.state_dict()), state.scheduler.state_dict(),
            state.scaler.state_dict(), list(state.history), copy.deepcopy(state.best), state.steps,
            tuple(state.loader.cursor.committed), torch.get_rng_state(),
        ]  # fmt: skip


@pytest.fixture(autouse=True)
def _streams_return() -> Iterator[None]:
    part = RandomState()
    part.begin()
    yield
    part.rollback()


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path)


def save(store: CheckpointStore, state: Any, size: int = 1) -> Manifest:
    """As a group of ``size`` workers that are all alike."""
    durable, folder = state.ft_durable(), store.begin(state.steps, "a")
    specs, shards, documents = durable.tensors(), [], []
    for rank, pieces in enumerate(plan(specs, size)):
        parts, filled = durable.capture(pieces)
        filled()
        shards.append(store.write_shard(folder, rank, size, parts))
        documents.append(store.write_worker(folder, rank, size, shards[-1], durable.local()))
    values = store.write_values(folder, durable.shared())
    return store.commit(folder, specs, shards, documents, values, versions=durable.versions)


def restore(store: CheckpointStore, manifest: Manifest, state: Any, *, newcomer: bool = False) -> None:
    """As an engine does, in a worker that restores alone."""
    shared, durable = store.read_values(manifest), state.ft_durable()
    store.read(manifest, durable.open(shared))
    durable.restored(shared, None if newcomer else store.read_worker(manifest, 0))
    state._committer.went_back(manifest.step)


@pytest.mark.parametrize("fresh", [False, True], ids=["again", "fresh"])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_from_a_checkpoint_as_it_did_the_first_time(
    store: CheckpointStore, kind: str, size: int, fresh: bool
) -> None:
    training = Training(kind)
    training.train(5)
    manifest = save(store, training.state, size)
    first = training.train(4)
    if fresh:
        training = Training(kind, seed=2)
    restore(store, manifest, training.state)
    assert same(training.train(4), first)


def test_a_checkpoint_from_before_the_first_step_takes_the_optimizers_state_away(store: CheckpointStore) -> None:
    training = Training("Adam")
    manifest, before = save(store, training.state), training.result()
    training.train(2)
    restore(store, manifest, training.state)
    assert same(training.result(), before)
    assert not training.optimizer.state


def test_what_was_restored_is_what_is_saved_next(store: CheckpointStore) -> None:
    training = Training()
    training.train(2)
    durable = training.state.ft_durable()
    manifest, before = save(store, training.state), (durable.tensors(), durable.shared(), durable.local())
    training.train(3)
    restore(store, manifest, training.state)
    assert repr((durable.tensors(), durable.shared(), durable.local())) == repr(before)


def test_without_random_streams_and_buffers_of_its_own_a_worker_keeps_what_it_has(store: CheckpointStore) -> None:
    training = Training()
    manifest = save(store, training.state)
    training.train(2)
    buffers, random = [buffer.clone() for buffer in training.model.buffers()], torch.get_rng_state()
    restore(store, manifest, training.state, newcomer=True)
    assert same(list(training.model.buffers()), buffers)
    assert torch.equal(torch.get_rng_state(), random)
    assert training.state.steps == 0


def test_random_streams_and_buffers_return(store: CheckpointStore) -> None:
    training = Training()
    training.train(1)
    manifest = save(store, training.state)
    draw, before = torch.rand(3), copy_of(training.model)
    training.train(2)
    restore(store, manifest, training.state)
    assert torch.equal(torch.rand(3), draw)
    assert same(copy_of(training.model), before)


def test_everything_that_can_be_tracked_returns(store: CheckpointStore) -> None:
    def made(seed: int) -> tuple[Any, Any]:
        model = network(seed)
        first, second = (
            distributed(half, make(kind, half.parameters()))
            for kind, half in (("SGD", model[0]), ("Adam", model[2]))
        )
        tracked = {
            "first": first,
            "second": second,
            "sampler": ElasticSampler(TensorDataset(torch.arange(9))),
            "rule": LearningRateRule(workers=seed + 1),
            "mean": torch.full((2,), float(seed), dtype=torch.bfloat16),
            "guard": hvd.elastic.ReplicaGuard(every=3),
            "nothing": None,
        }
        return model, TorchState(model=model, **tracked)

    (model, state), (other, target) = made(0), made(1)
    for step in range(2):
        model.zero_grad()
        backward(model, step)
        state.first.step()
        state.second.step()
    state.sampler.set_epoch(2)
    state.sampler.record_batch(0, 3)
    restore(store, save(store, state, 3), target)
    assert same(copy_of(other), copy_of(model))
    for name in ("first", "second"):
        assert same(getattr(target, name).state_dict(), getattr(state, name).state_dict())
    assert target.sampler.state_dict() == {"epoch": 2, "processed_num": 3}
    assert target.rule.workers == 1
    assert same(target.mean, state.mean)


def test_optimizer_state_of_any_kind_returns(store: CheckpointStore) -> None:
    states = []
    for seed in range(2):
        model = network(seed)
        states.append(TorchState(model=model, optimizer=Odd(model.parameters())))
    source, target = states
    train(source.model, source.optimizer, range(3))
    restore(store, save(store, source, 2), target)
    assert same(target.optimizer.state_dict(), source.optimizer.state_dict())


def test_a_script_that_commits_itself_can_restore_what_came_from_a_checkpoint(store: CheckpointStore) -> None:
    model = network()
    optimizer = distributed(model)
    state: Any = TorchState(model=model, optimizer=optimizer, batch=3)
    train(model, optimizer, range(1))
    state.save()
    manifest, before = save(store, state), copy_of(model)
    train(model, optimizer, range(2))
    state.batch = 5
    state.save()
    restore(store, manifest, state)
    state.batch = 9
    train(model, optimizer, range(1))
    state.restore()
    assert state.batch == 3
    assert same(copy_of(model), before)


def test_a_model_that_takes_the_place_of_another_is_saved_and_restored(store: CheckpointStore) -> None:
    state: Any = TorchState(model=perceptron())
    state.model = perceptron()
    manifest, before = save(store, state), copy_of(state.model)
    state.model = perceptron()
    restore(store, manifest, state)
    assert same(copy_of(state.model), before)


def reading(length: int, seed: int) -> Any:
    """A state that reads so many samples."""
    loader: Any = ElasticDataLoader(TensorDataset(torch.zeros(length, 1)), global_batch_size=4, shuffle=True, seed=seed)
    return TorchState(model=perceptron(), loader=loader)


# --- tensors ---------------------------------------------------------------------------------------------------------


def holding(*tensors: Tensor) -> Any:
    """A state whose model holds these."""
    parameters = (nn.Parameter(tensor, requires_grad=False) for tensor in tensors)
    return TorchState(model=nn.ParameterList(parameters))


def test_tensors_are_named_by_the_attribute_that_holds_them() -> None:
    model = nn.Linear(2, 3)
    optimizer = distributed(model)
    state = TorchState(model=model, optimizer=optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert [(spec.name, spec.dtype, spec.shape) for spec in state.ft_durable().tensors()] == [
        ("model.weight", "F32", (3, 2)),
        ("model.bias", "F32", (3,)),
        ("optimizer.state.0.momentum_buffer", "F32", (3, 2)),
        ("optimizer.state.1.momentum_buffer", "F32", (3,)),
    ]


def test_two_tensors_of_one_name_are_refused() -> None:
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight] = {1: torch.zeros(1), "1": torch.zeros(1)}
    state = TorchState(model=model, optimizer=optimizer)
    with pytest.raises(UnsupportedStateError, match=r"two tensors have the name 'optimizer\.state\.0\.1'"):
        state.ft_durable().tensors()


@pytest.mark.parametrize(
    ("tensor", "described"),
    [
        (torch.eye(2).to_sparse(), "sparse_coo"),
        (torch.empty(2, device="meta"), "on the meta device"),
        (torch.tensor([1j]).conj(), "conjugated"),
        (torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "of dtype 'torch.float4_e2m1fn_x2'"),
    ],
    ids=["sparse", "meta", "conjugated", "float4"],
)
def test_a_tensor_that_a_checkpoint_cannot_hold_is_named(tensor: Tensor, described: str) -> None:
    with pytest.raises(UnsupportedStateError, match=rf"'model\.0' is {described}"):
        holding(tensor).ft_durable().tensors()


WHOLE = torch.arange(2 * 3 * 4 * 5, dtype=torch.int16).reshape(2, 3, 4, 5)
KINDS_OF_MEMORY = {
    "contiguous": WHOLE,
    "channels-last": WHOLE.to(memory_format=torch.channels_last),
    "transposed": WHOLE.reshape(6, 20).t(),
    "permuted": WHOLE.permute(3, 1, 0, 2),
    "with-gaps": WHOLE[:, :, ::2, 1::3],
    "one-row-each": WHOLE[:, :1, :1].transpose(1, 3),
    "vector-with-gaps": WHOLE.reshape(-1)[::7],
    "complex": torch.view_as_complex(torch.randn(4, 3, 2)).t(),
    "complex128": torch.view_as_complex(torch.randn(4, 3, 2, dtype=torch.float64)).t(),
}


@pytest.mark.parametrize("kind", KINDS_OF_MEMORY)
def test_any_run_of_bytes_of_a_tensor_is_found_in_row_major_order(kind: str) -> None:
    tensor = KINDS_OF_MEMORY[kind]
    whole, step = tensor.contiguous().reshape(-1).view(torch.uint8), tensor.element_size()
    for start, stop in itertools.combinations(range(0, len(whole) + 1, step), 2):
        views = list(runs(tensor, start, stop))
        assert b"".join(view.contiguous().numpy().tobytes() for view in views) == whole[start:stop].numpy().tobytes()
        assert len(views) <= 2 * tensor.dim() + 1


@pytest.mark.parametrize("size", range(1, 6))
def test_tensors_of_every_kind_of_memory_are_restored_where_they_are(store: CheckpointStore, size: int) -> None:
    state = holding(*KINDS_OF_MEMORY.values())
    before = copy_of(state.model)
    manifest = save(store, state, size)
    strides = [parameter.stride() for parameter in state.model]
    for parameter in state.model:
        parameter.data.zero_()
    restore(store, manifest, state)
    assert same(copy_of(state.model), before)
    assert [parameter.stride() for parameter in state.model] == strides


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 3])
def test_tensors_of_every_dtype_are_restored(store: CheckpointStore, size: int) -> None:
    raw = [torch.arange(96, dtype=torch.uint8) % (2 if dtype is torch.bool else 251) for dtype in DTYPES]
    tensors = [data.view(dtype).reshape(2, -1) for data, dtype in zip(raw, DTYPES, strict=True)]
    state = holding(*tensors, torch.tensor(1.5), torch.empty(0, 3))
    manifest = save(store, state, size)
    kept = [data.clone() for data in raw]
    for data in raw:
        data.zero_()
    restore(store, manifest, state)
    assert same(raw, kept)


def test_a_complex_number_of_double_precision_goes_as_two_numbers() -> None:
    (spec,) = holding(torch.zeros(3, dtype=torch.complex128)).ft_durable().tensors()
    assert (spec.dtype, spec.shape) == ("F64", (3, 2))


# --- capturing -------------------------------------------------------------------------------------------------------


def test_only_the_bytes_that_are_asked_for_are_captured() -> None:
    durable = holding(torch.arange(8, dtype=torch.uint8)).ft_durable()
    parts, filled = durable.capture([Piece("model.0", 2, 5)])
    filled()
    assert [(part.spec.shape, bytes(part.data)) for part in parts] == [((8,), bytes([2, 3, 4]))]


def test_what_was_captured_does_not_change_with_the_training() -> None:
    state = holding(torch.ones(3, dtype=torch.uint8))
    parts, _ = state.ft_durable().capture([Piece("model.0", 0, 3)])
    state.model[0].zero_()
    assert bytes(parts[0].data) == bytes([1, 1, 1])


def test_the_memory_of_a_capture_is_kept_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training("Adam")
    training.train(1)
    durable = training.state.ft_durable()
    pieces = plan(durable.tensors(), 2)[0]

    def places() -> list[int]:
        parts, _ = durable.capture(pieces)
        return [torch.frombuffer(part.data, dtype=torch.uint8).data_ptr() for part in parts]

    first = places()
    training.train(1)
    monkeypatch.delattr(torch, "zeros")
    assert places() == first


def test_an_empty_share_is_captured() -> None:
    parts, filled = holding(torch.ones(1)).ft_durable().capture([])
    filled()
    assert parts == []


def test_whatever_comes_next_waits_for_the_capture_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update, or a script that writes to a parameter."""
    durable, settled = Training().state.ft_durable(), []

    def settle(memory: HostMemory) -> None:
        settled.append(memory)

    monkeypatch.setattr(HostMemory, "settle", settle)
    durable.capture(plan(durable.tensors(), 1)[0])
    assert settled == [durable._memory]


# --- values ----------------------------------------------------------------------------------------------------------


def test_values_are_found_under_the_names_of_the_attributes() -> None:
    training = Training()
    training.train(2)
    shared = training.state.ft_durable().shared()
    assert shared.keys() == {"schema", "optimizer", "scheduler", "scaler", "loader", "history", "best"}
    assert shared["loader"] == (0, 8)
    assert shared["best"] == {"loss": 9.0, "at": (0, 1)}
    assert shared["scheduler"]["last_epoch"] == 2
    assert shared["optimizer"]["options"][0]["momentum"] == 0.9


def test_what_is_shared_is_as_of_the_last_commit() -> None:
    training = Training()
    training.train(2)
    training.state.history.append("later")
    training.state.scheduler.last_epoch = 7
    shared = training.state.ft_durable().shared()
    assert "later" not in shared["history"]
    assert shared["scheduler"]["last_epoch"] == 2


def test_before_the_first_commit_it_is_the_present() -> None:
    training = Training()
    training.state.history.append(1)
    assert training.state.ft_durable().shared()["history"] == [1]


def test_a_value_that_cannot_be_saved_is_named_as_the_script_names_it() -> None:
    state = TorchState(history=[0, {"at": object()}])
    with pytest.raises(UnsupportedStateError, match=r"^state\.history\[1\]\['at'\]: an object cannot be saved"):
        values.dump(state.ft_durable().shared())


def test_local_is_what_each_worker_has_of_its_own() -> None:
    local = Training().state.ft_durable().local()
    assert local.keys() == {"random", "buffers"}
    assert [key for key, _ in itertools.islice(local["buffers"].items(), 3)] == [
        ("model.1", "running_mean"), ("model.1", "running_var"), ("model.1", "num_batches_tracked"),
    ]  # fmt: skip


def test_local_is_of_the_last_commit_when_training_ends_within_an_accumulation() -> None:
    training = Training()
    training.train(2)
    durable, committer = training.state.ft_durable(), training.state._committer
    before = repr(durable.local())
    committer.begin()
    training.model(torch.ones(4, 4))  # statistics and dropout
    assert repr(durable.local()) == before
    committer.commit()
    assert repr(durable.local()) != before


def test_a_state_of_another_class_cannot_be_checkpointed() -> None:
    assert _OtherState(None).ft_durable() is None  # type: ignore[func-returns-value]  # mypy knows it, too


def test_versions() -> None:
    versions = TorchState(epoch=0).ft_durable().versions
    assert versions.keys() == {"torch", "horovod"}
    assert all(type(version) is str for version in versions.values())


# --- what does not fit -----------------------------------------------------------------------------------------------


def small(model: nn.Module | None = None, optimizer: Callable[[Any], Any] = torch.optim.SGD, **more: Any) -> Any:
    model = perceptron() if model is None else model
    return TorchState(model=model, optimizer=optimizer(model.parameters()), **more)


def groups_of_one(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [parameter]} for parameter in parameters])


class Buffered(nn.Module):
    """One buffer that ``state_dict`` holds, one that it does not, and one that the first forward pass makes."""

    kept: Tensor
    passing: Tensor
    lazy: Tensor | None

    def __init__(self, length: int, passing: int = 2) -> None:
        super().__init__()
        self.register_buffer("kept", torch.arange(length, dtype=torch.float32))
        self.register_buffer("passing", torch.ones(passing), persistent=False)
        self.register_buffer("lazy", None)


def another_name() -> Any:
    model = perceptron()
    return TorchState(model=model, sgd=torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize(
    ("there", "here", "told"),
    [
        (lambda: small(epoch=1), small, "state.epoch is only in the checkpoint"),
        (small, lambda: small(epoch=1), "state.epoch is not in the checkpoint"),
        (
            lambda: small(rule=1),
            lambda: small(rule=LearningRateRule()),
            "state.rule is value in the checkpoint, stateful here",
        ),
        (small, another_name, "state.optimizer is only in the checkpoint"),
        (
            small,
            lambda: small(optimizer=torch.optim.Adam),
            "optimizer: group 0 is SGD with 6 parameters in the checkpoint, Adam with 6 parameters here",
        ),
        (small, lambda: small(optimizer=groups_of_one), "optimizer: group 3 is not in the checkpoint"),
        (small, lambda: small(network()), "model.1 is BatchNorm1d in the checkpoint, Tanh here"),
        (small, lambda: small(nn.Linear(2, 2)), "model.1 is only in the checkpoint"),
        (
            lambda: TorchState(model=Buffered(3)), lambda: TorchState(model=Buffered(1)),
            "model.kept is float32 of shape (3,) in the checkpoint, float32 of shape (1,) here",
        ),
        (
            lambda: reading(8, seed=1), lambda: reading(8, seed=2),
            "state.loader is loader of 8 samples, shuffled with seed 1 in the checkpoint, loader of 8 samples, "
            "shuffled with seed 2 here",
        ),
        (
            lambda: reading(8, seed=1), lambda: reading(9, seed=1),
            "state.loader is loader of 8 samples, shuffled with seed 1 in the checkpoint, loader of 9 samples, "
            "shuffled with seed 1 here",
        ),
    ],
    ids=["fewer", "more", "other", "renamed", "optimizer", "groups", "no-buffers", "no-module", "buffer",
         "seed", "length"],
)
def test_a_state_that_does_not_fit_is_refused_and_unchanged(
    there: Callable[[], Any], here: Callable[[], Any], told: str
) -> None:
    state = here()
    before = copy_of(state.model)
    with pytest.raises(MismatchError, match="of another training than this one") as caught:
        state.ft_durable().open(there().ft_durable().shared())
    assert told in str(caught.value)
    assert same(copy_of(state.model), before)


def test_buffers_that_a_module_makes_as_it_goes_may_differ(store: CheckpointStore) -> None:
    source, target = TorchState(model=Buffered(3, passing=5)), TorchState(model=Buffered(3))
    source.model.lazy = torch.ones(2)
    restore(store, save(store, source), target)
    assert target.model.passing.shape == (5,)
    assert torch.equal(target.model.lazy, torch.ones(2))


def test_a_module_without_buffers_may_come_and_go(store: CheckpointStore) -> None:
    source = TorchState(model=nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    target = TorchState(model=nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ReLU()))
    restore(store, save(store, source), target)
    assert same(copy_of(target.model), copy_of(source.model))


def test_values_of_something_else_are_refused() -> None:
    with pytest.raises(MismatchError, match="not saved from a TorchState"):
        TorchState(epoch=0).ft_durable().open({"weights": 1})


def test_a_model_of_another_shape_is_refused_before_anything_is_changed(store: CheckpointStore) -> None:
    source, target = Training("Adam"), Training("Adam")
    source.train(2)
    wide = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 5))
    target.model[3] = wide[3]
    optimizer = make("Adam", target.model.parameters())
    state: Any = TorchState(model=target.model, optimizer=optimizer)
    for parameter in state.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = copy.deepcopy((copy_of(state.model), optimizer.state_dict()))
    manifest = save(store, TorchState(model=source.model, optimizer=source.optimizer), 2)
    with pytest.raises(MismatchError, match=r"'model\.3\.weight': shape \(3, 6\) in the checkpoint, \(5, 6\) here"):
        restore(store, manifest, state)
    assert same((copy_of(state.model), optimizer.state_dict()), before)


def test_what_a_script_that_commits_itself_ends_with_is_of_one_moment(tmp_path: Path) -> None:
    """Without a loader nobody can say whether anything came after the last commit."""
    model = network()
    state: Any = TorchState(model=model, optimizer=distributed(model), batch=0)

    @hvd.elastic.run(checkpoint=hvd.elastic.Checkpoints(tmp_path, every=100))
    def loop(state: Any) -> None:
        while state.batch < 5:
            train(model, state.optimizer, [state.batch])
            state.batch += 1
            if state.batch % 2 == 0:
                state.commit()

    loop(state)
    store = CheckpointStore(tmp_path)
    assert store.read_values(store.newest_valid())["batch"] == 5
