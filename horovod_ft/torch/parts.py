"""The pieces of light state of a PyTorch training: what a step changes besides parameters and optimizer state.

Each is a ``committer.Part``. ``begin`` runs in every step, so what can be copied into kept storage is.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from horovod_ft.committer import Part
from horovod_ft.guard import ReplicaGuard
from horovod_ft.parts import Attributes, BasePart, CursorPart, Remembered, copied
from horovod_ft.torch.loader import ElasticDataLoader

#: A buffer: path of the module that owns it, beginning with the attribute that holds the model, and its name there.
BufferKey = tuple[str, str]
#: Names of parts that look after no attribute: tracked attributes do not begin like this.
RANDOM, BUFFERS, VALUES = "_random", "_buffers", "_values"


class RandomState(Remembered):
    """Random generators of Python, numpy and torch, on the host and on devices in use. Each worker has its own."""

    def export(self) -> tuple[Any, ...]:
        in_use = torch.cuda.is_initialized()
        devices = torch.cuda.get_rng_state_all() if in_use else []
        return random.getstate(), np.random.get_state(), torch.get_rng_state(), devices

    def adopt(self, value: tuple[Any, ...]) -> None:
        python, numpy, cpu, devices = value
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if devices:
            torch.cuda.set_rng_state_all(devices[: torch.cuda.device_count()])  # a checkpoint may be of another host


def seed_newcomer(generation: int, rank: int) -> None:
    """Give a process that joins a running job random streams that no other worker has."""
    seeds = np.random.SeedSequence((torch.initial_seed(), generation, rank)).generate_state(3)
    random.seed(int(seeds[0]))
    np.random.seed(int(seeds[1]))
    torch.manual_seed(int(seeds[2]))


class Buffers(BasePart):
    """Buffers of the models, such as running statistics of BatchNorm. Each worker has its own."""

    def __init__(self, models: Callable[[], Mapping[str, torch.nn.Module]]) -> None:
        self._models = models
        self._known: dict[str, torch.nn.Module] = {}
        # A module's dict of buffers is kept, not its buffers: a module may replace them in its forward.
        self._owners: dict[str, dict[str, torch.Tensor | None]] = {}
        self._modules: dict[str, torch.nn.Module] = {}
        self._keys: list[BufferKey] = []
        self._saved: list[torch.Tensor] = []

    def modules(self) -> dict[str, str]:
        """Class of each module, by path, whether it has buffers or not."""
        self._live()
        return {path: type(module).__name__ for path, module in self._modules.items()}

    def owners(self) -> list[str]:
        """Paths of the modules that have buffers at present."""
        return list(dict.fromkeys(path for path, _ in self._live()))

    def lasting(self) -> dict[str, torch.Tensor]:
        """Those that ``state_dict`` holds, by path: a module that is loaded has to find them as they are now."""
        return {
            f"{path}.{name}": buffer
            for (path, name), buffer in self._live().items()
            if name not in self._modules[path]._non_persistent_buffers_set
        }

    def _live(self) -> dict[BufferKey, torch.Tensor]:
        models = self._models()
        if models.keys() != self._known.keys() or any(self._known[name] is not model for name, model in models.items()):
            self._known = dict(models)
            modules = {
                f"{owner}.{path}".rstrip("."): module
                for owner, model in models.items()
                for path, module in model.named_modules()
            }
            self._owners = {path: module._buffers for path, module in modules.items()}
            self._modules = modules
        return {
            (path, name): buffer
            for path, buffers in self._owners.items()
            for name, buffer in buffers.items()
            if buffer is not None
        }

    @torch.no_grad()
    def begin(self) -> None:
        live = self._live()
        self._keys = list(live)
        tensors = list(live.values())
        if kinds_of(tensors) != kinds_of(self._saved):
            self._saved = [buffer.clone() for buffer in tensors]
        elif tensors:
            torch._foreach_copy_(self._saved, tensors)

    def rollback(self) -> None:
        self.adopt(dict(zip(self._keys, self._saved, strict=True)))

    @torch.no_grad()
    def remembered(self) -> dict[BufferKey, torch.Tensor]:
        return {key: saved.clone() for key, saved in zip(self._keys, self._saved, strict=True)}

    @torch.no_grad()
    def export(self) -> dict[BufferKey, torch.Tensor]:
        return {key: buffer.clone() for key, buffer in self._live().items()}

    @torch.no_grad()
    def adopt(self, value: dict[BufferKey, torch.Tensor]) -> None:
        for path, buffers in self._owners.items():
            for name in buffers:
                if (path, name) not in value:
                    buffers[name] = None  # it came later
        for (path, name), saved in value.items():
            live = self._owners[path].get(name)
            if live is not None and (live.shape, live.dtype) == (saved.shape, saved.dtype):
                live.copy_(saved)
            else:
                self._owners[path][name] = saved.to(saved.device if live is None else live.device, copy=True)


def kinds_of(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Size, torch.dtype, torch.device]]:
    """What two lists of tensors have in common if one can be copied into the other."""
    return [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]


class Options(BasePart):
    """The options of an optimizer's param groups: learning rates and the like."""

    replicated = True

    def __init__(self, optimizer: Callable[[], torch.optim.Optimizer]) -> None:
        self._optimizer = optimizer
        self._saved: list[dict[str, Any]] = []

    def export(self) -> list[dict[str, Any]]:
        return [
            {name: copied(value) for name, value in group.items() if name != "params"}
            for group in self._optimizer().param_groups
        ]

    def adopt(self, value: list[dict[str, Any]]) -> None:
        for group, options in zip(self._optimizer().param_groups, value, strict=True):
            group.update({name: _beside(group.get(name), copied(option)) for name, option in options.items()})

    def begin(self) -> None:
        self._saved = self.export()

    def rollback(self) -> None:
        self.adopt(self._saved)


def _beside(have: Any, value: Any) -> Any:
    """A value on the device of what it takes the place of, if both are tensors."""
    return value.to(have.device) if isinstance(have, torch.Tensor) and isinstance(value, torch.Tensor) else value


class Stateful(BasePart):
    """Anything with ``state_dict`` and ``load_state_dict``: schedulers, samplers, metrics. Equal on all workers."""

    replicated = True

    def __init__(self, value: Callable[[], Any]) -> None:
        self._value = value
        self._saved: Any = None

    def export(self) -> Any:
        return copy.deepcopy(self._value().state_dict())

    def adopt(self, value: Any) -> None:
        self._value().load_state_dict(copy.deepcopy(value))  # it may keep parts of it, and change them later

    def begin(self) -> None:
        self._saved = self.export()

    def rollback(self) -> None:
        self.adopt(self._saved)


class Scaler(Stateful):
    """A ``GradScaler``: its scale, and that no optimizer is between ``unscale_`` and ``update``."""

    def adopt(self, value: Any) -> None:
        scaler = self._value()
        if not scaler.is_enabled() or not value:  # it is off, or was
            return
        if scaler._scale is not None:
            scaler.update(scaler.get_scale())  # a new scale ends the step for all optimizers
        scaler.load_state_dict(value)


class Snapshot(BasePart):
    """A full copy of parameters and optimizer state, for scripts that commit themselves and may go back many steps.

    Storage is kept from commit to commit.
    """

    def __init__(self, tensors: Callable[[], list[torch.Tensor]], structure: Callable[[], Any],
                 prepare: Callable[[Any], None]) -> None:
        self._tensors = tensors
        self._structure = structure
        self._prepare = prepare
        self._saved: list[torch.Tensor] | None = None
        self._saved_structure: Any = None
        self.enabled = True

    def drop(self) -> None:
        """Not needed any more; gives the memory back."""
        self.enabled = False
        self._saved = None

    @torch.no_grad()
    def begin(self) -> None:
        if not self.enabled:
            return
        self._saved_structure = self._structure()
        live = self._tensors()
        kept = self._saved
        if kept is None or kinds_of(kept) != kinds_of(live):
            self._saved = [tensor.detach().clone() for tensor in live]
        elif live:
            torch._foreach_copy_(kept, live)

    @torch.no_grad()
    def rollback(self) -> None:
        if self._saved is not None:
            self._prepare(self._saved_structure)
            if self._saved:
                torch._foreach_copy_(self._tensors(), self._saved)


def kind_of(value: Any) -> str:
    """What a tracked attribute is to a training state."""
    kinds: Sequence[tuple[str, Any]] = (
        ("model", torch.nn.Module),
        ("optimizer", torch.optim.Optimizer),
        ("loader", ElasticDataLoader),
        ("scaler", torch.amp.GradScaler),
        ("guard", ReplicaGuard),
    )
    for kind, type_ in kinds:
        if isinstance(value, type_):
            return kind
    return "stateful" if hasattr(value, "state_dict") and hasattr(value, "load_state_dict") else "value"


def parts_of(owner: Any, kinds: Mapping[str, str]) -> dict[str, Part]:
    """What looks after each tracked attribute, by its name; after plain values, all of them together, ``VALUES``."""
    made = {name: _part_of(kind, _getter(owner, name)) for name, kind in kinds.items()}
    named: dict[str, Part] = {name: part for name, part in made.items() if part is not None}
    return {**named, VALUES: Attributes(owner, [name for name, kind in kinds.items() if kind == "value"])}


def _part_of(kind: str, get: Callable[[], Any]) -> Part | None:
    match kind:
        case "optimizer":
            return Options(get)
        case "scaler":
            return Scaler(get)
        case "stateful":
            return Stateful(get)
        case "loader":
            return CursorPart(lambda: get().cursor)
    return None


def _getter(owner: Any, name: str) -> Callable[[], Any]:
    return lambda: getattr(owner, name)
