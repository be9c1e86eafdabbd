"""The moments of a step at which a fault plan can strike, as hooks. Without a plan nothing is installed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from horovod_ft.committer import Committer
from horovod_ft.faults.inject import Injector
from horovod_ft.faults.plan import STRIKES
from horovod_ft.torch.reducer import GradientReducer

#: Bits below the exponent.
MANTISSA = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23, torch.float64: 52}


def install_faults(
    injector: Injector, committer: Committer, models: Iterable[torch.nn.Module], optimizers: Sequence[Any]
) -> None:
    """Install the hooks for the faults that are meant for this worker.

    ``forward`` strikes after the first layer, ``backward`` when the first gradient is ready, ``allreduce`` when
    ``after`` gradients have been reduced and the others have not been handed over.
    """
    if not injector.waiting:
        return
    models = list(models)
    parameters = [parameter for model in models for parameter in model.parameters()]
    injector.corrupt = lambda kind: corrupt(max(parameters, key=torch.numel), kind)
    for model in models:
        leaf = next((module for module in model.modules() if not list(module.children())), model)
        leaf.register_forward_hook(lambda *_: injector.at("forward", committer.frontier.step + 1))
    for optimizer in optimizers:
        optimizer.ft_reducer.probe = _Probe(injector, committer, optimizer.ft_reducer)


@torch.no_grad()
def corrupt(parameter: torch.Tensor, kind: str) -> None:
    """Change one number in the middle of a parameter: flip the lowest bit of its exponent, or make it NaN."""
    middle = parameter.reshape(-1)[parameter.numel() // 2]
    if kind == "nan":
        middle.fill_(float("nan"))
    else:
        words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[parameter.element_size()]
        middle.view(words).bitwise_xor_(1 << MANTISSA[parameter.dtype])


class _Probe:
    """Called with the number of gradients handed over so far, before each one and after the last."""

    def __init__(self, injector: Injector, committer: Committer, reducer: GradientReducer) -> None:
        self._injector = injector
        self._committer = committer
        self._reducer = reducer

    def __call__(self, handed_over: int) -> None:
        step = self._committer.frontier.step + 1
        self._injector.at("backward", step)
        lost = self._injector.pending("allreduce", step, kinds=("lose",))
        if lost is not None:
            self._reducer.lose_after = lost.after
            self._injector.fire(lost)
        fault = self._injector.pending("allreduce", step, kinds=STRIKES, reduced=handed_over)
        if fault is not None:
            self._reducer.wait_for(fault.after)
            self._injector.fire(fault)
