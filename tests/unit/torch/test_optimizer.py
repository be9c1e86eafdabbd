"""``DistributedOptimizer``: to torch it is the optimizer that it was; to wrong arguments it has clear answers."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

import horovod_ft.torch as hvd
from horovod_ft.errors import ConfigurationError, UsageError
from tests.unit.torch.tools import (
    SHIPPED,
    Peers,
    backward,
    batch,
    copy_of,
    distributed,
    gradients,
    make,
    model_for,
    network,
    same,
    train,
)

TRAINABLE = [name for name in SHIPPED if name != "LBFGS"]


# --- it stays what it was --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRAINABLE)
def test_trains_bitwise_like_the_plain_optimizer(name: str) -> None:
    ours, plain = model_for(name), model_for(name)
    optimizer, reference = distributed(ours, make(name, ours.parameters())), make(name, plain.parameters())
    train(ours, optimizer, range(3))
    train(plain, reference, range(3))
    assert same(copy_of(ours), copy_of(plain))
    assert same(optimizer.state_dict(), reference.state_dict())


@pytest.mark.parametrize("name", TRAINABLE)
def test_is_an_instance_of_its_own_class_and_of_torchs(name: str) -> None:
    model = model_for(name)
    optimizer = distributed(model, make(name, model.parameters()))
    assert isinstance(optimizer, getattr(torch.optim, name))
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert type(optimizer).__name__ == name


@pytest.mark.parametrize("name", TRAINABLE)
def test_state_of_the_plain_optimizer_can_be_loaded(name: str) -> None:
    plain, ours = model_for(name), model_for(name, seed=1)
    reference, optimizer = make(name, plain.parameters()), distributed(ours, make(name, ours.parameters()))
    train(plain, reference, range(2))
    ours.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    train(plain, reference, range(2, 4))
    train(ours, optimizer, range(2, 4))
    assert same(copy_of(ours), copy_of(plain))


@pytest.mark.parametrize("name", TRAINABLE)
def test_the_plain_optimizer_can_load_its_state(name: str) -> None:
    plain, ours = model_for(name), model_for(name, seed=1)
    reference, optimizer = make(name, plain.parameters()), distributed(ours, make(name, ours.parameters()))
    train(ours, optimizer, range(2))
    plain.load_state_dict(ours.state_dict())
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(plain, reference, range(2, 4))
    train(ours, optimizer, range(2, 4))
    assert same(copy_of(ours), copy_of(plain))


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_every_implementation_of_an_optimizer_works(options: dict[str, bool]) -> None:
    ours, plain = network(), network()
    optimizer = distributed(ours, make("Adam", ours.parameters(), **options))
    train(ours, optimizer, range(3))
    train(plain, make("Adam", plain.parameters(), **options), range(3))
    assert same(copy_of(ours), copy_of(plain))


def test_the_same_object_is_returned() -> None:
    model = network()
    plain = make("SGD", model.parameters())
    assert distributed(model, plain) is plain


def test_defaults_and_options_are_kept() -> None:
    model = network()
    optimizer = distributed(model, make("SGD", model.parameters(), lr=0.25))
    assert optimizer.defaults["lr"] == 0.25
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert repr(optimizer).startswith("SGD (")


def test_a_users_own_optimizer_class_works() -> None:
    class Signed(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.5})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(parameter.grad.sign(), alpha=group["lr"])

    model, plain = network(), network()
    train(model, distributed(model, Signed(model.parameters())), range(2))
    train(plain, Signed(plain.parameters()), range(2))
    assert same(copy_of(model), copy_of(plain))


def test_a_positional_default_for_names_needs_no_names() -> None:
    model = network()
    optimizer = hvd.DistributedOptimizer(make("SGD", model.parameters()))
    train(model, optimizer, range(2))
    assert optimizer.state


def test_parameters_named_in_torch_itself_are_accepted() -> None:
    model = network()
    optimizer = distributed(model, torch.optim.SGD(model.named_parameters(), lr=0.1))
    train(model, optimizer, range(1))
    assert optimizer.param_groups[0]["param_names"] == ["0.weight", "2.weight"]


def test_it_cannot_be_pickled_or_copied() -> None:
    optimizer = distributed(network())
    with pytest.raises(TypeError, match="use its state_dict"):
        pickle.dumps(optimizer)
    with pytest.raises(TypeError, match="use its state_dict"):
        copy.deepcopy(optimizer)


def test_the_model_can_still_be_copied_and_pickled() -> None:
    model = network()
    distributed(model)
    backward(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same(copy_of(twin), copy_of(model))
        backward(twin)  # no hook came along: nothing is reduced


# --- hooks, closures, gradients --------------------------------------------------------------------------------------


def test_step_hooks_of_the_instance_run_once_a_step_and_see_reduced_gradients(peers: Peers) -> None:
    model = network()
    optimizer = distributed(model)
    seen: list[tuple[str, float]] = []
    weight = model[0].weight
    peers.others["0.weight"] = torch.full_like(weight, 10.0)
    optimizer.register_step_pre_hook(lambda *_: seen.append(("before", float(weight.grad.sum()))))
    optimizer.register_step_post_hook(lambda *_: seen.append(("after", float(weight.grad.sum()))))
    backward(model)
    local = float(weight.grad.sum())
    optimizer.step()
    assert [when for when, _ in seen] == ["before", "after"]
    assert seen[0][1] == pytest.approx(local / 2 + 5.0 * weight.numel(), rel=1e-5)


def test_hooks_registered_before_the_wrapping_are_kept() -> None:
    model = network()
    plain = make("SGD", model.parameters())
    calls: list[str] = []
    plain.register_step_post_hook(lambda *_: calls.append("after"))
    train(model, distributed(model, plain), range(2))
    assert calls == ["after", "after"]


def test_global_step_hooks_run_once_a_step() -> None:
    model = network()
    optimizer = distributed(model)
    calls: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("before")),
        register_optimizer_step_post_hook(lambda *_: calls.append("after")),
    ]
    try:
        train(model, optimizer, range(2))
    finally:
        for handle in handles:
            handle.remove()
    assert calls == ["before", "after"] * 2


def test_hooks_still_run_once_after_loading_a_state() -> None:
    model = network()
    optimizer = distributed(model)
    optimizer.load_state_dict(optimizer.state_dict())
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    train(model, optimizer, range(1))
    assert calls == ["before"]


def test_hooks_of_state_dicts_run() -> None:
    optimizer = distributed(network())
    calls: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda *_: calls.append("save"))
    optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("load"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["save", "load"]


def test_a_closure_is_evaluated_once_and_its_loss_returned() -> None:
    ours, plain = network(), network()
    calls = []

    def closure_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            calls.append(model)
            optimizer.zero_grad()
            x, y = batch(0)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return closure

    optimizer, reference = distributed(ours), make("SGD", plain.parameters())
    loss = optimizer.step(closure_of(ours, optimizer))
    assert calls == [ours]
    assert torch.equal(loss, reference.step(closure_of(plain, reference)))  # type: ignore[arg-type]
    assert same(copy_of(ours), copy_of(plain))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_clears_as_in_torch(set_to_none: bool) -> None:
    model = network()
    optimizer = distributed(model)
    train(model, optimizer, range(1))
    optimizer.zero_grad(set_to_none=set_to_none)
    assert gradients(model).keys() == (set() if set_to_none else {"0.weight", "2.weight"})
    assert not any(gradient.any() for gradient in gradients(model).values())


def test_zero_grad_in_the_middle_of_a_reduction_is_refused() -> None:
    model = network()
    optimizer = distributed(model)
    backward(model)
    with pytest.raises(AssertionError, match="would discard gradients"):
        optimizer.zero_grad()
    optimizer.step()


def test_a_second_backward_before_the_step_is_refused() -> None:
    model = network()
    optimizer = distributed(model)
    backward(model)
    with pytest.raises(AssertionError, match="more than backward_passes_per_step=1 times"):
        backward(model)
    optimizer.step()


def test_parameters_added_later_are_trained_and_reduced(peers: Peers) -> None:
    model, extra = network(), nn.Linear(3, 3, bias=False)
    optimizer = distributed(model)
    optimizer.add_param_group({"params": extra.parameters(), "lr": 0.5})
    assert optimizer.param_groups[1]["lr"] == 0.5
    both = nn.Sequential(model, extra)
    backward(both)
    optimizer.step()
    assert set(peers.calls) == {"0.weight", "2.weight", "group1.0"}


def test_a_bad_param_group_is_refused_as_in_torch() -> None:
    model = network()
    optimizer = distributed(model)
    with pytest.raises(ValueError, match="some parameters appear in more than one"):
        optimizer.add_param_group({"params": list(model.parameters())})
    train(model, optimizer, range(1))


def test_clipping_between_synchronize_and_step_works_as_in_horovods_documentation() -> None:
    ours, plain = network(), network()
    optimizer, reference = distributed(ours), make("SGD", plain.parameters())
    for step in range(3):
        optimizer.zero_grad()
        backward(ours, step)
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(ours.parameters(), 0.01)
        with optimizer.skip_synchronize():
            optimizer.step()
        reference.zero_grad()
        backward(plain, step)
        nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        reference.step()
    assert same(copy_of(ours), copy_of(plain))


def test_a_step_after_synchronize_does_not_reduce_again(peers: Peers) -> None:
    model = network()
    optimizer = distributed(model)
    backward(model)
    optimizer.synchronize()
    optimizer.step()
    assert sorted(peers.calls) == ["0.weight", "2.weight"]


def test_synchronizing_twice_reduces_once(peers: Peers) -> None:
    model = network()
    optimizer = distributed(model)
    backward(model)
    optimizer.synchronize()
    reduced = gradients(model)
    optimizer.synchronize()
    assert same(gradients(model), reduced)
    assert sorted(peers.calls) == ["0.weight", "2.weight"]


def test_looking_at_the_param_groups_after_backward_completes_the_reduction(peers: Peers) -> None:
    model = network()
    optimizer = distributed(model)
    peers.others["0.weight"] = torch.full_like(model[0].weight, 4.0)
    backward(model)
    local = gradients(model)["0.weight"]
    seen = optimizer.param_groups[0]["params"][0].grad
    assert torch.allclose(seen, local / 2 + 2.0)


def test_loading_a_state_forgets_gradients_in_flight() -> None:
    model = network()
    optimizer = distributed(model)
    saved = copy.deepcopy(optimizer.state_dict())
    backward(model)
    optimizer.load_state_dict(saved)
    assert not gradients(model)
    backward(model)
    optimizer.step()


def test_loading_a_state_forgets_gradients_that_are_being_summed_up() -> None:
    model = network()
    optimizer = distributed(model, backward_passes_per_step=2)
    backward(model)
    optimizer.load_state_dict(optimizer.state_dict())
    assert not optimizer.ft_reducer.accumulating()
    assert not gradients(model)


# --- schedulers, scalers, averages -----------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=4),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=6),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
}


def test_every_scheduler_that_torch_ships_is_tried() -> None:
    shipped = {
        name
        for name, value in vars(lr_scheduler).items()
        if isinstance(value, type) and issubclass(value, lr_scheduler.LRScheduler) and not name.startswith("_")
    }
    assert shipped - {"LRScheduler"} == set(SCHEDULERS)


def rates(scheduler: Any, optimizer: torch.optim.Optimizer, model: nn.Module) -> list[float]:
    seen = []
    for step in range(5):
        train(model, optimizer, [step])
        scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
        seen.append(optimizer.param_groups[0]["lr"])
    return seen


@pytest.mark.parametrize("made", ["before", "after"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_work_without_a_warning(name: str, made: str) -> None:
    plain = network()
    reference = make("SGD", plain.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the plain optimizer gets is torch's business
        expected = rates(SCHEDULERS[name](reference), reference, plain)
    model = network()
    optimizer = make("SGD", model.parameters())
    if made == "before":
        scheduler = SCHEDULERS[name](optimizer)
        distributed(model, optimizer)
    else:
        scheduler = SCHEDULERS[name](distributed(model, optimizer))
    assert rates(scheduler, optimizer, model) == expected
    assert same(copy_of(model), copy_of(plain))


def test_a_scheduler_before_the_first_step_still_warns() -> None:
    scheduler = lr_scheduler.StepLR(distributed(network()), 1)
    with pytest.warns(UserWarning, match=r"lr_scheduler.step\(\)` before `optimizer.step"):
        scheduler.step()


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_scaler_trains_as_with_the_plain_optimizer(fused: bool) -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        for step in range(4):
            optimizer.zero_grad()
            x, y = batch(step)
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        return float(scaler.get_scale())

    ours, plain = network(), network()
    options = {"fused": fused, "foreach": False}
    scale = run(ours, distributed(ours, make("Adam", ours.parameters(), **options)))
    assert scale == run(plain, make("Adam", plain.parameters(), **options)) == 32.0
    assert same(copy_of(ours), copy_of(plain))


@pytest.mark.parametrize("fused", [False, True])
def test_an_infinite_gradient_of_another_worker_makes_the_scaler_skip_the_step_here(peers: Peers, fused: bool) -> None:
    model = network()
    optimizer = distributed(model, make("Adam", model.parameters(), fused=fused))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = copy_of(model)
    peers.others["2.weight"] = torch.full_like(model[2].weight, float("inf"))
    x, y = batch(0)
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert same(copy_of(model), before)
    assert scaler.get_scale() == 4.0
    peers.others.clear()
    train(model, optimizer, range(1))
    assert not same(copy_of(model), before)


def test_averaged_models_follow() -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any, float]:
        averaged = AveragedModel(model)
        moving = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        rates = SWALR(optimizer, swa_lr=0.05)
        for step in range(3):
            train(model, optimizer, [step])
            averaged.update_parameters(model)
            moving.update_parameters(model)
            rates.step()
        update_bn([batch(0)[0]], averaged)
        return copy_of(averaged), copy_of(moving), optimizer.param_groups[0]["lr"]

    ours, plain = network(), network()
    assert same(run(ours, distributed(ours)), run(plain, make("SGD", plain.parameters())))


# --- passes ----------------------------------------------------------------------------------------------------------


def test_the_number_of_passes_can_be_changed_between_steps() -> None:
    model = network()
    optimizer = distributed(model)
    optimizer.set_backward_passes_per_step(2)
    assert optimizer.backward_passes_per_step == 2
    backward(model)
    backward(model)
    optimizer.step()


def test_the_number_of_passes_cannot_be_changed_within_a_step() -> None:
    model = network()
    optimizer = distributed(model)
    backward(model)
    with pytest.raises(UsageError, match="change it before"):
        optimizer.set_backward_passes_per_step(2)
    optimizer.step()


# --- wrong arguments -------------------------------------------------------------------------------------------------


def parameters() -> list[nn.Parameter]:
    return list(network().parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"op": hvd.Adasum}, "op=hvd.Adasum"),
        ({"op": hvd.Max}, "op must be hvd.Average or hvd.Sum"),
        ({"op": "mean"}, "op must be hvd.Average or hvd.Sum"),
        ({"process_set": hvd.ProcessSet([0])}, "process_set"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "with op=hvd.Average only"),
        ({"gradient_predivide_factor": 0.0}, "it must be positive"),
        ({"backward_passes_per_step": 0}, "it must be at least 1"),
        ({"named_parameters": []}, "lacks 2 of the optimizer's parameters"),
        ({"named_parameters": [("a", p) for p in parameters()]}, "more than one parameter has the name 'a'"),
        ({"named_parameters": parameters()}, r"must be pairs \(name, parameter\)"),
        ({"groups": -1}, "groups is -1"),
        ({"groups": "all"}, "groups must be a number, or a list of lists of parameters"),
        ({"groups": [["a"]]}, "groups must be a number, or a list of lists of parameters"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_argument_is_refused(options: dict[str, Any], message: str) -> None:
    optimizer = make("SGD", network().parameters())
    with pytest.raises(ConfigurationError, match=message):
        hvd.DistributedOptimizer(optimizer, **options)
    assert type(optimizer) is torch.optim.SGD


def test_wrapping_twice_is_refused() -> None:
    optimizer = distributed(network())
    with pytest.raises(ConfigurationError, match="applied to it twice"):
        hvd.DistributedOptimizer(optimizer)


def test_lbfgs_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="LBFGS computes gradients several times"):
        hvd.DistributedOptimizer(torch.optim.LBFGS(network().parameters()))


def test_something_else_than_an_optimizer_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"needs a torch.optim.Optimizer, not Sequential"):
        hvd.DistributedOptimizer(network())


def test_passes_below_one_are_refused_later_too() -> None:
    with pytest.raises(ConfigurationError, match="it must be at least 1"):
        distributed(network()).set_backward_passes_per_step(0)


def test_a_parameter_in_two_groups_is_refused() -> None:
    model = network()
    weight = model[0].weight
    with pytest.raises(ConfigurationError, match="one group only"):
        distributed(model, groups=[[weight], [weight]])


def test_the_old_name_of_groups_is_understood_with_a_warning(peers: Peers) -> None:
    model = network()
    with pytest.warns(DeprecationWarning, match="renamed to groups"):
        optimizer = distributed(model, num_groups=1)
    train(model, optimizer, range(1))
    assert peers.calls == ["0.weight and 1 more"]
