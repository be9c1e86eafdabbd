"""Completing an update whose reductions broke: every worker ends with the same bits, and they are the right ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.torch
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import horovod_ft.torch as hvd
from horovod_ft.membership.base import Group
from horovod_ft.policy import Forward
from horovod_ft.shares import Shares
from horovod_ft.torch.completion import Completion
from tests.unit.torch.tools import Peers, backward, distributed, full, gradients, network, same

# --- the arithmetic --------------------------------------------------------------------------------------------------

WEIGHTS = st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.25, 3.0]), min_size=1, max_size=5).filter(any)


def reduced(shares: Shares, values: Sequence[float]) -> float:
    """What the workers' gradients become when all of them are reduced."""
    total = sum(shares.factor() * weight * value for weight, value in zip(shares.weights, values, strict=True))
    return total / len(values) if shares.average else total


@given(weights=WEIGHTS, average=st.booleans())
def test_rescaled_it_is_the_mean_over_the_samples_that_are_left(weights: list[float], average: bool) -> None:
    shares = Shares(tuple(weights), weights.index(max(weights)), 8, rescale=True, average=average)
    values = [float(rank + 2) for rank in range(len(weights))]
    mean = sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)
    assert reduced(shares, values) == pytest.approx(mean if average else 8 * mean)
    alone = shares.factor_alone() * weights[shares.largest] * values[shares.largest]
    assert alone == pytest.approx(values[shares.largest] * (1 if average else 8))


@given(weights=WEIGHTS, average=st.booleans())
def test_not_rescaled_those_who_are_gone_count_as_zero(weights: list[float], average: bool) -> None:
    shares = Shares(tuple(weights), weights.index(max(weights)), 8, rescale=False, average=average)
    values = [float(rank + 2) for rank in range(len(weights))]
    total = sum(weight * value for weight, value in zip(weights, values, strict=True))
    assert reduced(shares, values) == pytest.approx(total / 8 if average else total)
    alone = shares.factor_alone() * weights[shares.largest] * values[shares.largest]
    assert alone == pytest.approx(weights[shares.largest] * values[shares.largest] / (8 if average else 1))


# --- the reductions --------------------------------------------------------------------------------------------------


class Mail:
    """The broadcasts of a group whose other member is made up.

    Attributes:
        sent: name -> what the other one sends; for what this worker sends itself, what it sent.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
        self.rank = rank
        self.sent: dict[str, Any] = {}
        self.broken: set[str] = set()
        monkeypatch.setattr(horovod.torch, "broadcast_async_", self._broadcast)

    def _broadcast(self, memory: Tensor, root: int, name: str) -> str:
        assert memory.dtype == torch.uint8
        if root == self.rank:
            self.sent[name] = memory.clone()
        else:
            memory.copy_(self.sent[name].reshape(-1).view(torch.uint8))
        return name

    def broadcast_object(self, value: Any, root: int, name: str) -> Any:
        if root == self.rank:
            self.sent[name] = value
        return self.sent[name]

    def wait(self, handle: Any, what: str) -> Any:
        if handle in self.broken:
            raise hvd.HorovodInternalError("the group broke again")
        return handle if isinstance(handle, str) else horovod.torch.synchronize(handle)


SHARES = Shares((1.0, 1.0), 0, 3, rescale=True, average=True)
NAMES = ("0.weight", "2.weight")


def broken(peers: Peers, **options: Any) -> tuple[nn.Module, Any]:
    """A model of two parameters in a group of three that broke after ``2.weight`` was reduced."""
    model = network()
    optimizer = distributed(model, **options)
    peers.others = {name: full(parameter, 6.0) for name, parameter in model.named_parameters()}
    peers.broken = {"0.weight"}
    backward(model)
    with pytest.raises(hvd.HorovodInternalError):
        optimizer.ft_reducer.synchronize()
    optimizer.ft_reducer.drain()
    peers.size, peers.broken = 2, set()
    return model, optimizer


def complete(
    optimizer: Any,
    mail: Mail,
    holders: Sequence[int | None],
    decision: Forward,
    shares: Shares = SHARES,
    *,
    lossy: Sequence[bool] = (False, False),
) -> list[str]:
    completion: Any = Completion(optimizer.ft_reducer, Group(mail.rank, 2), mail, mail.wait)  # type: ignore[arg-type]
    lacking = completion.run(holders, lossy, decision, shares)
    optimizer.ft_reducer.take_all()
    return [slot.name for slot in lacking]


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Peers:
    return Peers(monkeypatch, size=3)


def test_the_frontier_says_what_is_here(three: Peers) -> None:
    model, optimizer = broken(three)
    done, _, elements = optimizer.ft_reducer.frontier()
    assert dict(zip(NAMES, done, strict=True)) == {"0.weight": False, "2.weight": True}
    assert elements == [parameter.numel() for parameter in model.parameters()]


def test_what_is_here_is_sent_and_kept(three: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = broken(three)
    local = gradients(model)
    mail = Mail(monkeypatch, rank=0)
    assert complete(optimizer, mail, (None, 0), Forward()) == ["0.weight"]
    full_average = (local["2.weight"] + 6.0) / 3
    torch.testing.assert_close(gradients(model)["2.weight"], full_average)
    sent = mail.sent["horovod_ft.forward.2.weight"].view(torch.float32)
    assert same(sent, gradients(model)["2.weight"].reshape(-1))


def test_what_another_has_is_taken_over(three: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = broken(three)
    mail = Mail(monkeypatch, rank=1)
    for name, parameter in model.named_parameters():
        mail.sent[f"horovod_ft.forward.{name}"] = full(parameter, 5.0)
    assert complete(optimizer, mail, (0, 0), Forward()) == []
    assert all((gradient == 5.0).all() for gradient in gradients(model).values())


def test_what_nobody_has_is_reduced_again(three: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = broken(three)
    local = gradients(model)["0.weight"]
    complete(optimizer, Mail(monkeypatch, rank=0), (None, 0), Forward())
    torch.testing.assert_close(gradients(model)["0.weight"], (local + 6.0) / 2)


def test_the_share_of_the_dead_can_count_as_zero(three: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = broken(three)
    local = gradients(model)["0.weight"]
    shares = Shares((1.0, 1.0), 0, 3, rescale=False, average=True)
    three.others["0.weight"] = 6.0 * torch.ones(()) * shares.factor()
    complete(optimizer, Mail(monkeypatch, rank=0), (None, 0), Forward(rescale=False), shares)
    torch.testing.assert_close(gradients(model)["0.weight"], (local + 6.0) / 3)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_local_gradient_can_stand_for_all(three: Peers, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    model, optimizer = broken(three)
    local = gradients(model)["0.weight"]
    mail = Mail(monkeypatch, rank)
    mail.sent = {f"horovod_ft.forward.{name}": full(value, 5.0) for name, value in model.named_parameters()}
    complete(optimizer, mail, (None, 0), Forward("local"))
    assert same(gradients(model)["0.weight"], local if rank == 0 else full(local, 5.0))


def test_a_gradient_can_be_left_out(three: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = broken(three)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    complete(optimizer, Mail(monkeypatch, rank=0), (None, 0), Forward("skip"))
    assert set(gradients(model)) == {"2.weight"}
    with optimizer.skip_synchronize():
        optimizer.step()
    after = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert same(after["0.weight"], before["0.weight"])
    assert not same(after["2.weight"], before["2.weight"])


@pytest.mark.parametrize("missing", ["reduce_again", "local", "skip"])
def test_a_second_failure_on_the_way_can_be_completed_as_well(
    three: Peers, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    model, optimizer = broken(three)
    local = gradients(model)
    mail = Mail(monkeypatch, rank=0)
    mail.broken = {"horovod_ft.forward.2.weight"}
    with pytest.raises(hvd.HorovodInternalError, match="broke again"):
        complete(optimizer, mail, (None, 0), Forward(missing))
    assert same(gradients(model), local)
    done, *_ = optimizer.ft_reducer.frontier()
    assert done[1]
    mail.broken = set()
    holders = [0 if here else None for here in done]
    complete(optimizer, mail, holders, Forward(missing))
    torch.testing.assert_close(gradients(model)["2.weight"], (local["2.weight"] + 6.0) / 3)
    assert ("0.weight" in gradients(model)) == (missing != "skip")


def test_a_failure_before_anything_was_handed_over_leaves_nothing_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise hvd.HorovodInternalError("Horovod has been shut down")

    model, optimizer, _ = refusing(monkeypatch, recovers=False)
    backward(model)
    with pytest.raises(hvd.HorovodInternalError):
        optimizer.step()
    optimizer.ft_reducer.drain()
    mail = Mail(monkeypatch, rank=1)
    monkeypatch.setattr(horovod.torch, "broadcast_async_", refuse)
    for _ in range(2):
        with pytest.raises(hvd.HorovodInternalError, match="shut down"):
            complete(optimizer, mail, (0, 0), Forward())
        assert optimizer.ft_reducer.frontier()[0] == [False, False]


@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16])
def test_under_every_compression(three: Peers, monkeypatch: pytest.MonkeyPatch, compression: Any) -> None:
    model, optimizer = broken(three, compression=compression)
    local = gradients(model)
    complete(optimizer, Mail(monkeypatch, rank=0), (None, 0), Forward())
    got = gradients(model)
    torch.testing.assert_close(got["0.weight"], (local["0.weight"] + 6.0) / 2, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(got["2.weight"], (local["2.weight"] + 6.0) / 3, atol=2e-3, rtol=2e-3)


def test_bfloat16_is_sent_as_it_is(three: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network().to(torch.bfloat16)
    optimizer = distributed(model)
    backward(model, 0, torch.bfloat16)
    optimizer.ft_reducer.drain()
    mail = Mail(monkeypatch, rank=1)
    mail.sent = {f"horovod_ft.forward.{name}": full(value, 5.0) for name, value in model.named_parameters()}
    complete(optimizer, mail, (0, 0), Forward())
    assert all((gradient == 5.0).all() and gradient.dtype == torch.bfloat16 for gradient in gradients(model).values())


def test_nothing_is_left_of_the_failure_afterwards(three: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = broken(three)
    complete(optimizer, Mail(monkeypatch, rank=0), (None, 0), Forward())
    reducer = optimizer.ft_reducer
    assert not reducer.underway()
    assert reducer.synchronized
    optimizer.step()
    optimizer.zero_grad()
    backward(model, 1)
    optimizer.step()


# --- failures that are kept until the update --------------------------------------------------------------------------


class Gate:
    """Says what becomes of a failure."""

    def __init__(self, recovers: bool) -> None:
        self.recovers = recovers
        self.told: list[BaseException] = []

    def before_update(self) -> None:
        """Nothing to do."""

    def admit_update(self) -> bool:
        return True

    def update_applied(self, optimizer: Any) -> None:
        """Nothing to do."""

    def reduction_failed(self, optimizer: Any, error: BaseException) -> bool:
        self.told.append(error)
        if self.recovers:
            optimizer.ft_reducer.drain()
            optimizer.ft_reducer.resume()
            for bucket in optimizer.ft_reducer.buckets:
                bucket.skipped = True
            optimizer.ft_reducer.take_all()
        return self.recovers


def refusing(monkeypatch: pytest.MonkeyPatch, recovers: bool) -> tuple[nn.Module, Any, Gate]:
    def refuse(*_: Any, **__: Any) -> int:
        raise hvd.HorovodInternalError("Horovod has been shut down")

    monkeypatch.setattr(horovod.torch.mpi_ops, "_allreduce_async", refuse)
    model = network()
    optimizer = distributed(model)
    gate = optimizer.ft_gate = Gate(recovers)
    optimizer.ft_reducer.keep = True
    return model, optimizer, gate


def test_a_failure_that_is_kept_does_not_come_out_of_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, gate = refusing(monkeypatch, recovers=False)
    backward(model)
    assert len(gradients(model)) == 2
    assert not gate.told
    with pytest.raises(hvd.HorovodInternalError, match="shut down"):
        optimizer.step()
    assert len(gate.told) == 1


def test_an_update_goes_on_if_the_failure_was_recovered(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, gate = refusing(monkeypatch, recovers=True)
    backward(model)
    optimizer.step()
    assert len(gate.told) == 1


def test_whoever_reaches_for_gradients_after_a_failure_gets_the_completed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, gate = refusing(monkeypatch, recovers=True)
    backward(model)
    assert optimizer.param_groups
    assert len(gate.told) == 1
    optimizer.step()
    assert len(gate.told) == 1


def test_clearing_gradients_after_a_failure_that_is_kept_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, _ = refusing(monkeypatch, recovers=True)
    backward(model)
    with pytest.raises(AssertionError, match="between loss"):
        optimizer.zero_grad()


def test_a_body_on_its_way_out_gets_the_failure_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, _ = refusing(monkeypatch, recovers=False)
    optimizer.ft_reducer.refuse(hvd.HorovodInternalError("on the way out"))
    with pytest.raises(hvd.HorovodInternalError, match="on the way out"):
        backward(model)
    with pytest.raises(hvd.HorovodInternalError, match="on the way out"):
        optimizer.step()
    optimizer.ft_reducer.discard()
    backward(model)
