"""``DistributedOptimizer`` for PyTorch: Horovod's, with all its arguments, and safe against a failure at any moment.

The optimizer that is passed in is given a class of its own that puts a few methods in front of the user's class. So it
stays what it was: its hooks, ``defaults``, ``state`` and param groups, and an instance of its own class and of
``torch.optim.Optimizer``. Whoever holds a reference to it, such as a scheduler made before, holds the distributed one.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import horovod.torch as hvd
import torch

from horovod_ft.errors import ConfigurationError
from horovod_ft.torch.reducer import GradientReducer

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)
Named = list[tuple[str, torch.nn.Parameter]]


class UpdateGate(Protocol):
    """Who has a say in updates: the training state that tracks the optimizer."""

    def before_update(self) -> None:
        """All gradients are there, no parameter has been touched."""

    def admit_update(self) -> bool:
        """Whether the update may be applied; False when a replay repeats a step whose update is applied already."""

    def update_applied(self, optimizer: Any) -> None: ...

    def reduction_failed(self, optimizer: Any, error: BaseException) -> bool:
        """The group broke while the optimizer waited for its gradients. True if it was recovered and they are there."""


class OpenGate:
    """No training state tracks the optimizer: every update is applied."""

    def before_update(self) -> None:
        """Nothing to do."""

    def admit_update(self) -> bool:
        return True

    def update_applied(self, optimizer: Any) -> None:
        """Nothing to do."""

    def reduction_failed(self, optimizer: Any, error: BaseException) -> bool:
        return False


if TYPE_CHECKING:
    _Base = torch.optim.Optimizer
else:
    _Base = object


class Distributed(_Base):
    """The methods in front of the user's optimizer class. Made by ``DistributedOptimizer``, never by itself."""

    ft_reducer: GradientReducer
    ft_gate: UpdateGate
    ft_synchronize: bool

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the reduced gradients, then apply the update.

        A closure is evaluated once, before the wait, with gradients enabled. Step hooks run around the update and see
        the reduced gradients.

        Returns:
            what the closure returned, else what the optimizer's own ``step`` returned.

        Raises:
            HorovodInternalError: the group broke; parameters and optimizer state are untouched. ``state.step()``
                recovers it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.ft_synchronize:
            self.synchronize()
        self.ft_reducer.check()  # with skip_synchronize too: what is in p.grad after a failure is no average
        self.ft_reducer.synchronized = False
        self._opt_called = True  # what torch's schedulers look at to see that a step came before theirs
        self.ft_gate.before_update()
        if self.ft_gate.admit_update():
            result = super().step()
            self.ft_gate.update_applied(self)
            return result if closure is None else loss
        return loss

    # torch wraps `step` of each class once to run step hooks, and its schedulers wrap it once more on each instance to
    # see that it was called. Ours passes on to a `step` that is wrapped already, and tells the schedulers itself.
    step.hooked = True  # type: ignore[attr-defined]
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def synchronize(self) -> None:
        """Wait for all reduced gradients and put them into ``p.grad``, for clipping and the like before ``step``.

        Calling it twice is harmless: gradients are reduced once a step. Unlike with Horovod, a ``step()`` that follows
        does not reduce again, with or without ``skip_synchronize``.

        Raises:
            HorovodInternalError: the group broke, and the recovery policy does not go forward from here.
        """
        try:
            self.ft_reducer.synchronize()
        except hvd.HorovodInternalError as error:
            if not self.ft_gate.reduction_failed(self, error):
                raise

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, ``step()`` applies ``p.grad`` as it is."""
        self.ft_synchronize = False
        try:
            yield
        finally:
            self.ft_synchronize = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch.

        Raises:
            AssertionError: reductions are in flight: after ``backward`` and before ``step`` or ``synchronize``.
        """
        if self.ft_reducer.in_flight():
            raise AssertionError(
                "optimizer.zero_grad() between loss.backward() and optimizer.step() would discard gradients that are "
                "being reduced; call it before backward() or after step()"
            )
        self.ft_reducer.cleared()
        super().zero_grad(set_to_none=set_to_none)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """As in torch. Reductions in flight are completed first.

        Whoever reaches for gradients through the optimizer after ``backward`` (``GradScaler.unscale_``, say) must see
        the average, not this worker's part: otherwise one worker could skip a step that others apply.
        """
        if self.ft_reducer.in_flight():
            self.synchronize()
        groups: list[dict[str, Any]] = self.__dict__["param_groups"]
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; the new parameters are reduced too. Call it on all workers at the same step."""
        super().add_param_group(param_group)
        index = len(self.param_groups) - 1
        self.ft_reducer.add(
            (f"group{index}.{position}", parameter)
            for position, parameter in enumerate(self.param_groups[index]["params"])
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch. Gradients that are being reduced or summed up are forgotten."""
        if self.ft_reducer.in_flight() or self.ft_reducer.accumulating():
            self.ft_reducer.drain()
            self.ft_reducer.discard()
        super().load_state_dict(state_dict)

    @property
    def backward_passes_per_step(self) -> int:
        return self.ft_reducer.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accumulate over this many backward passes from the next step on."""
        if passes < 1:
            raise ConfigurationError(f"backward_passes_per_step is {passes}; it must be at least 1")
        self.ft_reducer.set_passes(passes)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a distributed optimizer cannot be pickled or copied; use its state_dict()")


@functools.cache
def _distributed_class(base: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    return type(base.__name__, (Distributed, base), {"__module__": base.__module__, "__doc__": base.__doc__})


def DistributedOptimizer(  # noqa: N802  Horovod's name
    optimizer: OptimizerT,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Any = hvd.Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: Any = hvd.global_process_set,
) -> OptimizerT:
    """Make an optimizer reduce its gradients over all workers before each update.

    Gradients are reduced asynchronously from hooks of the backward pass, and out of place: a gradient that was computed
    here survives any failure of the reduction. This costs one copy of the gradients in memory.

    Args:
        optimizer: any optimizer of torch but LBFGS. **The same object is returned**, with another class.
        named_parameters: usually ``model.named_parameters()``; the names must be unique and equal on all workers.
            Default: names by position.
        compression: ``hvd.Compression.none`` or ``fp16``, or a class with ``compress`` and ``decompress``.
        backward_passes_per_step: sum gradients locally over so many backward passes.
        op: ``hvd.Average`` or ``hvd.Sum``.
        gradient_predivide_factor: divide by this before the sum and by ``size / factor`` after it; Average only.
        num_groups: old name of an integer ``groups``.
        groups: number of groups, or list of lists of parameters, that are reduced together.
        sparse_as_dense: reduce sparse gradients as dense ones.
        process_set: the global one; Horovod cannot form others anew after a failure.

    Raises:
        ConfigurationError: an argument is wrong, or has no meaning in an elastic job (Adasum, process sets).
    """
    _check(optimizer, op, gradient_predivide_factor, backward_passes_per_step, process_set)
    if num_groups:
        warnings.warn("num_groups has been renamed to groups, as in Horovod", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if isinstance(groups, int) and groups < 0:
        raise ConfigurationError(f"groups is {groups}; it must be 0 or more, or a list of lists of parameters")
    named = _checked_names(optimizer, named_parameters)
    reducer = GradientReducer(
        named,
        compression=compression,
        passes=backward_passes_per_step,
        op=op,
        predivide=gradient_predivide_factor,
        groups=groups,
        sparse_as_dense=sparse_as_dense,
    )
    optimizer.__dict__.pop("step", None)  # a scheduler made before has put its wrapper there
    optimizer.__dict__.update(ft_reducer=reducer, ft_gate=OpenGate(), ft_synchronize=True)
    same: Any = optimizer
    its_class: Any = type(optimizer)
    same.__class__ = _distributed_class(its_class)
    return optimizer


def _check(optimizer: Any, op: Any, predivide: float, passes: int, process_set: Any) -> None:
    if isinstance(optimizer, Distributed):
        raise ConfigurationError("this optimizer is distributed already: DistributedOptimizer was applied to it twice")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(f"DistributedOptimizer needs a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError(
            "LBFGS computes gradients several times within one step, between which Horovod cannot reduce them; "
            "Horovod's own optimizer cannot do it either. Use another optimizer"
        )
    if op == hvd.Adasum:
        raise ConfigurationError(
            "op=hvd.Adasum updates parameters inside the backward pass, so that a failed step cannot be undone; use "
            "op=hvd.Average"
        )
    if op not in (hvd.Average, hvd.Sum):
        raise ConfigurationError(f"op must be hvd.Average or hvd.Sum, not {op!r}")
    if process_set is not None and process_set != hvd.global_process_set:
        raise ConfigurationError(
            "process_set: Horovod 0.28 cannot form process sets anew after a failure; leave the argument out"
        )
    if predivide != 1.0 and op != hvd.Average:
        raise ConfigurationError("gradient_predivide_factor has a meaning with op=hvd.Average only")
    if predivide <= 0:
        raise ConfigurationError(f"gradient_predivide_factor is {predivide}; it must be positive")
    if passes < 1:
        raise ConfigurationError(f"backward_passes_per_step is {passes}; it must be at least 1")


def _checked_names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> Named:
    """The optimizer's parameters with their names, in the optimizer's order."""
    groups = optimizer.param_groups
    if named_parameters is None:
        return [(f"group{i}.{j}", p) for i, group in enumerate(groups) for j, p in enumerate(group["params"])]
    named = list(named_parameters)
    if not all(isinstance(item, tuple) and len(item) == 2 for item in named):
        raise ConfigurationError(
            "named_parameters must be pairs (name, parameter), as model.named_parameters() gives them"
        )
    repeated = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if repeated:
        raise ConfigurationError(
            f"named_parameters: more than one parameter has the name {', '.join(map(repr, repeated))}. Names must be "
            "unique: they say which gradients of the workers belong together"
        )
    names = {parameter: name for name, parameter in named}
    unnamed = [
        f"parameter {j} of group {i}, shape {tuple(p.shape)}"
        for i, group in enumerate(groups)
        for j, p in enumerate(group["params"])
        if p not in names
    ]
    if unnamed:
        raise ConfigurationError(
            f"named_parameters lacks {len(unnamed)} of the optimizer's parameters: {'; '.join(unnamed[:5])}. Give the "
            "names of all of them, or leave the argument out"
        )
    return [(names[p], p) for group in groups for p in group["params"]]
