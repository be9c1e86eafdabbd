"""Learning rates that follow the number of workers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

from horovod_ft.errors import ConfigurationError
from horovod_ft.membership.base import Group
from horovod_ft.torch.elastic import ElasticDataLoader, LearningRateRule, TorchState
from tests.unit.torch.tools import distributed, network


def optimizer(lr: float = 0.4, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(network().parameters(), lr=lr, **options)


def rate(one: torch.optim.Optimizer) -> float:
    return float(one.param_groups[0]["lr"])


@pytest.mark.parametrize(
    ("rule", "factor"), [("linear", 0.75), ("sqrt", math.sqrt(0.75)), (lambda before, now: before - now, 1.0)]
)
def test_the_rule_says_by_how_much(rule: Any, factor: float) -> None:
    one = optimizer()
    followed = LearningRateRule(rule, workers=4)
    assert followed.follow(3, [one], []) == pytest.approx(factor)
    assert rate(one) == pytest.approx(0.4 * factor)
    assert followed.workers == 3


def test_it_is_applied_once_a_change() -> None:
    one, rule = optimizer(), LearningRateRule(workers=4)
    assert [rule.follow(workers, [one], []) for workers in (4, 2, 2, 4)] == [None, 0.5, None, 2.0]
    assert rate(one) == pytest.approx(0.4)


def test_the_rate_in_the_script_is_for_as_many_workers_as_the_job_starts_with() -> None:
    one, rule = optimizer(), LearningRateRule()
    assert rule.workers is None
    assert rule.follow(3, [one], []) is None
    assert rate(one) == 0.4
    rule.follow(6, [one], [])
    assert rate(one) == pytest.approx(0.8)


def test_a_rate_that_is_meant_for_one_worker_is_scaled_at_the_start() -> None:
    one = optimizer()
    LearningRateRule(workers=1).follow(3, [one], [])
    assert rate(one) == pytest.approx(1.2)


def test_a_rate_that_is_a_tensor_keeps_its_kind() -> None:
    one = torch.optim.Adam(network().parameters(), lr=torch.tensor(0.4))
    LearningRateRule(workers=2).follow(1, [one], [])
    lr = one.param_groups[0]["lr"]
    assert isinstance(lr, torch.Tensor)
    assert lr.item() == pytest.approx(0.2)


SCHEDULERS: list[Any] = [
    lambda one: lr_scheduler.LambdaLR(one, lambda step: 0.9**step),
    lambda one: lr_scheduler.StepLR(one, 2, gamma=0.5),
    lambda one: lr_scheduler.ExponentialLR(one, 0.9),
    lambda one: lr_scheduler.CosineAnnealingLR(one, 8),
    lambda one: lr_scheduler.LinearLR(one, 0.1, total_iters=6),
    lambda one: lr_scheduler.OneCycleLR(one, max_lr=0.4, total_steps=10, cycle_momentum=False),
    lambda one: lr_scheduler.CyclicLR(one, 0.1, 0.4, step_size_up=3, cycle_momentum=False),
    lambda one: lr_scheduler.SequentialLR(
        one, [lr_scheduler.ConstantLR(one, 0.5, 2), lr_scheduler.ExponentialLR(one, 0.9)], [2]
    ),
]


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("make", SCHEDULERS)
def test_a_scheduler_goes_on_from_the_new_rate(make: Any) -> None:
    """As one would that had the new rate from the beginning."""
    scaled, plain = optimizer(), optimizer()
    schedulers = [make(scaled), make(plain)]
    rule = LearningRateRule(workers=4)
    for step in range(7):
        for one, scheduler in zip((scaled, plain), schedulers, strict=True):
            one.step()
            scheduler.step()
        if step == 3:
            rule.follow(2, [scaled], schedulers[:1])
        factor = 0.5 if step >= 3 else 1.0
        assert rate(scaled) == pytest.approx(rate(plain) * factor, rel=1e-6)
        assert schedulers[0].get_last_lr()[0] == pytest.approx(rate(scaled))


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf"), None])
def test_a_factor_that_is_no_positive_number_is_the_rules_fault(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="for 4 -> 3 workers, which is no positive number"):
        LearningRateRule(lambda before, now: wrong, workers=4).follow(3, [optimizer()], [])


@pytest.mark.parametrize("arguments", [{"rule": "cubic"}, {"rule": None}, {"workers": 0}])
def test_what_is_no_rule_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"is unknown|at least 1"):
        LearningRateRule(**arguments)


# --- in a training state ---------------------------------------------------------------------------------------------


def state_of(rule: Any) -> Any:
    model = network()
    one = distributed(model, torch.optim.SGD(model.parameters(), lr=0.4))
    return TorchState(model=model, optimizer=one, lr_rule=rule)


def test_it_follows_when_a_group_has_settled() -> None:
    state = state_of(LearningRateRule(workers=4))
    state.settled(Group(0, 2))
    state.settled(Group(0, 2))
    assert rate(state.optimizer) == pytest.approx(0.2)


def test_a_step_that_is_undone_takes_rate_and_rule_back_together() -> None:
    state = state_of(LearningRateRule(workers=4))
    committer = state.engine.committer
    committer.begin()
    state.settled(Group(0, 2))
    committer.rollback()
    assert (rate(state.optimizer), state.lr_rule.workers) == (0.4, 4)
    state.settled(Group(0, 1))
    assert rate(state.optimizer) == pytest.approx(0.1)


def test_going_back_to_a_commit_of_a_larger_group_is_followed_by_the_present_size() -> None:
    state = state_of(LearningRateRule(workers=4))
    state.save()
    state.restore()  # a group of one
    assert rate(state.optimizer) == pytest.approx(0.1)
    assert state.lr_rule.workers == 1


def test_it_has_no_meaning_with_a_constant_global_batch() -> None:
    loader: Any = ElasticDataLoader(TensorDataset(torch.zeros(8, 4)), global_batch_size=4)
    with pytest.raises(ConfigurationError, match="lr_rule has no meaning with global_batch_size"):
        TorchState(loader=loader, lr_rule=LearningRateRule())


def test_there_is_one() -> None:
    with pytest.raises(ConfigurationError, match="tracks one LearningRateRule"):
        TorchState(one=LearningRateRule(), two=LearningRateRule())
