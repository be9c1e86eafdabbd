"""Learning rates that follow the number of workers, for training with a constant batch for each worker.

With ``global_batch_size`` an update does not depend on the number of workers, and nothing has to follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from horovod_ft.errors import ConfigurationError

Factor = Callable[[int, int], float]

#: Learning rates of a param group, as torch's optimizers and schedulers keep them there.
IN_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr")
#: Lists of learning rates that schedulers keep themselves.
IN_SCHEDULERS = ("base_lrs", "max_lrs", "_last_lr")

RULES: dict[str, Factor] = {
    "linear": lambda old, new: new / old,
    "sqrt": lambda old, new: math.sqrt(new / old),
}


class LearningRateRule:
    """Multiply all learning rates when the number of workers changes. Give it to the state: ``lr_rule=...``.

    Applied once a change of the group, on all workers alike, to the tracked optimizers and to the base values of the
    tracked schedulers. It belongs to the light state: what a failed step or ``restore()`` takes back is applied anew
    for the group as it is then.

    Args:
        rule: ``"linear"`` (Goyal et al. 2017, arXiv 1706.02677), ``"sqrt"`` (Krizhevsky 2014, arXiv 1404.5997), or a
            callable ``(workers before, workers now) -> factor``, the same on all workers.
        workers: how many workers the learning rate in the script is meant for; default: as many as the job starts with.

    Raises:
        ConfigurationError: there is no such rule.
    """

    def __init__(self, rule: str | Factor = "linear", *, workers: int | None = None) -> None:
        if not callable(rule) and rule not in RULES:
            raise ConfigurationError(
                f"the learning rate rule {rule!r} is unknown: give 'linear', 'sqrt' or a callable (before, now)"
            )
        if workers is not None and workers < 1:
            raise ConfigurationError(f"workers is {workers}; it must be at least 1")
        self._factor: Factor = rule if callable(rule) else RULES[rule]
        self._workers = workers

    @property
    def workers(self) -> int | None:
        """How many workers the present learning rates are for; None before the job has started."""
        return self._workers

    def follow(
        self, workers: int, optimizers: Iterable[torch.optim.Optimizer], schedulers: Iterable[Any]
    ) -> float | None:
        """The group has this size now. Returns the factor that was applied, None if nothing had to change.

        Raises:
            ConfigurationError: the rule gave something that is no positive number.
        """
        before, self._workers = self._workers, workers
        if before is None or before == workers:
            return None
        factor = self._factor(before, workers)
        if not (isinstance(factor, int | float) and math.isfinite(factor) and factor > 0):
            raise ConfigurationError(
                f"the learning rate rule gave {factor!r} for {before} -> {workers} workers, which is no positive number"
            )
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for name in IN_GROUPS:
                    if name in group:
                        group[name] = group[name] * factor
        for scheduler in _all(schedulers):
            for name in IN_SCHEDULERS:
                if hasattr(scheduler, name):
                    setattr(scheduler, name, [rate * factor for rate in getattr(scheduler, name)])
        return factor

    def state_dict(self) -> dict[str, Any]:
        return {"workers": self._workers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._workers = state["workers"]


def _all(schedulers: Iterable[Any]) -> Iterator[Any]:
    """Schedulers, and those that they are made of."""
    for scheduler in schedulers:
        yield scheduler
        yield from _all(getattr(scheduler, "_schedulers", ()))
