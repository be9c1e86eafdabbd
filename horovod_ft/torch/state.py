"""``TorchState``: everything of a PyTorch training that has to survive, in one object.

It is Horovod's ``TorchState`` for scripts that commit themselves, and offers ``state.step()`` to those that let every
step be a transaction.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from horovod.common.elastic import State

from horovod_ft.agreement import Gradients, Reach, who_has_it
from horovod_ft.committer import Committer, Frontier, Part
from horovod_ft.data import Deal, Range
from horovod_ft.errors import ConfigurationError, UsageError
from horovod_ft.guard import ReplicaGuard
from horovod_ft.membership.base import Group
from horovod_ft.parts import BasePart
from horovod_ft.policy import Forward
from horovod_ft.recovery import Engine, StepContext
from horovod_ft.shares import Shares
from horovod_ft.snapshot import ARENAS, Copies
from horovod_ft.torch.arena import TorchArena
from horovod_ft.torch.completion import Completion
from horovod_ft.torch.durable import TorchDurable
from horovod_ft.torch.faults import install_faults
from horovod_ft.torch.loader import ElasticDataLoader
from horovod_ft.torch.optimizer import Distributed
from horovod_ft.torch.parts import (
    BUFFERS,
    RANDOM,
    Buffers,
    RandomState,
    Snapshot,
    kind_of,
    parts_of,
    seed_newcomer,
)
from horovod_ft.torch.reducer import GradientReducer
from horovod_ft.torch.replica import TensorBlock, TorchReplica
from horovod_ft.torch.runtime import current
from horovod_ft.torch.sampler import ElasticSampler
from horovod_ft.torch.scaling import LearningRateRule
from horovod_ft.trainee import Finished
from horovod_ft.transfer import transfer


class TorchState(State):  # type: ignore[misc]
    """The state of a PyTorch training.

    Every keyword argument becomes an attribute. Models and optimizers, a loader, schedulers, gradient scalers, samplers
    and anything else with ``state_dict`` and ``load_state_dict`` are looked after by kind; other values are tracked as
    they are and should be small, since ``state.step()`` remembers them in each step.

    Args:
        model: a module; more of them under other names.
        optimizer: made by ``hvd.DistributedOptimizer``; more of them under other names.
        loader: an ``ElasticDataLoader``.

    A ``LearningRateRule`` among them lets the learning rates of all optimizers follow the number of workers, a
    ``ReplicaGuard`` compares the workers' replicas from time to time.

    Raises:
        UsageError: before ``hvd.init()``.
        ConfigurationError: a name is taken, there is more than one loader, or a rule for learning rates together with a
            constant global batch.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, loader: Any = None, **kwargs: Any) -> None:
        runtime = current()
        tracked = {"model": model, "optimizer": optimizer, "loader": loader, **kwargs}
        tracked = {name: value for name, value in tracked.items() if value is not None or name in kwargs}
        ours = {"engine", *dir(type(self))}
        taken = sorted(name for name in tracked if name in ours or name.startswith("_"))
        if taken:
            raise ConfigurationError(f"TorchState uses the names {taken} itself; call yours something else")
        super().__init__(bcast_object=None, get_rank=lambda: runtime.group().rank)
        for name, value in tracked.items():
            object.__setattr__(self, name, value)
        self._names = {name: kind_of(value) for name, value in tracked.items()}
        self._waiting: Any = None
        self._keep = False
        self._updated_elements = 0
        self._replica = TorchReplica(lambda: self._named(torch.nn.Module), lambda: self._named(torch.optim.Optimizer))
        self._only_loader()
        self._only_rule()
        self._snapshot = Snapshot(self._replica.replicated_tensors, self._replica.structure, self._replica.prepare)
        self._snapshot.enabled = self._loader is None
        self._copies: Copies | None = None
        parts = self._parts()
        self._committer = Committer(list(parts.values()))
        self._durable = TorchDurable(self._replica, self._committer, parts, self._names)
        self.engine = Engine(
            runtime.membership, self, self._committer, runtime.bus, runtime.injector, runtime.ledger,
            attempt=runtime.settings.attempt, timeout_s=runtime.settings.timeout_s,
        )  # fmt: skip
        for value in tracked.values():
            self._look_after(value)
        if len(self._distributed()) > 1:  # whose parameters may have the same names, and whose gradients may overlap
            for name, distributed in self._named(Distributed).items():
                distributed.ft_reducer.prefix = f"{name}."
        install_faults(runtime.injector, self._committer, self._named(torch.nn.Module).values(), self._distributed())
        for part in self._committer.parts:
            part.begin()

    # --- what a training loop uses ---------------------------------------------------------------------------------

    def step(self) -> StepContext:
        """One training step as a transaction: ``with state.step(): ...``.

        A clean exit commits: step counter, data cursor, buffers, random generators, schedulers and tracked values move
        together. If the group breaks inside, the recovery policy decides, and after a replay the loop goes on: the
        loader deals the same global batch out again. The exit blocks for a moment only, unless there is something to
        recover or workers join.

        Raises:
            UsageError: outside ``elastic.run``, or inside another step.
            RecoveryError: on exit, if the failure cannot be recovered.
        """
        return self.engine.step()

    @property
    def steps(self) -> int:
        """Committed steps (or explicit commits) since the job began; equal on all workers at a step's end."""
        return self._committer.frontier.step

    def commit(self) -> None:
        """Remember everything, parameters and optimizer state included, and look for workers that come or go.

        For scripts that do not use ``step``. After a failure the training function is entered again with the state of
        the last commit. Blocks for one small collective.
        """
        if not self.engine.stepping:
            self._snapshot.enabled = True
        self.engine.commit_explicitly()

    def check_host_updates(self) -> None:
        """Look for workers that come or go, as ``commit`` does, without remembering anything."""
        self.engine.check_for_changes()

    def save(self) -> None:
        """Remember everything, as ``commit`` does, without looking for workers that come or go. Never blocks.

        With ``step``, between two steps, and a ``StateCommitter`` that keeps copies: take one. All workers have to do
        that at the same steps. Best before the loader yields the next batch: random numbers that a dataset draws for it
        are in the copy already, and are drawn again after going back.

        Raises:
            UsageError: inside a step, or one whose gradients are accumulated over several batches; or with ``step`` and
                without such a StateCommitter.
        """
        if self.engine.stepping:
            if self.engine.inside_step or self.accumulating():
                where = "inside state.step()" if self.engine.inside_step else "while gradients are accumulated"
                raise UsageError(f"state.save() was used {where}: what is half done cannot be gone back to")
            self._full_copies("save").take(self._committer.frontier.step)
            return
        self._snapshot.enabled = True
        self._committer.save()
        if self._copies is not None:  # the first step may be still to come
            self._copies.take(self._committer.frontier.step)

    def restore(self) -> None:
        """Go back to the last ``commit`` or ``save``. Never blocks.

        With ``step``, inside ``elastic.run``: take all workers back to the newest copy, of a ``StateCommitter`` or a
        durable checkpoint, whether one of them calls this or several, and enter the training function again, from the
        top. Does not return then. Blocks for the time of a recovery. The steps since the copy are computed again; so
        will be what led here, if nothing but the state decides it: after ten times without getting further, training
        ends. It leaves the training function by an exception on all workers, each in its own place: a ``finally`` or
        ``except BaseException`` around the loop must not call collectives.

        Raises:
            UsageError: with ``step``, and without any of these or outside ``elastic.run``.
            RecoveryError: no worker has a copy, or the workers' copies differ.
        """
        if self.engine.stepping:
            if not self.engine.durable:
                self._full_copies("restore")
            self.engine.go_back()
        for part in self._committer.parts:
            part.rollback()
        self._follow(current().group())

    def keep_copies(self, every: int | None) -> Copies:
        """What ``StateCommitter`` is made with; see there."""
        if self._copies is not None:
            raise ConfigurationError("this state has a StateCommitter that keeps copies already")
        arenas = [TorchArena(self._replica) for _ in range(ARENAS)]
        self._copies = Copies(arenas, self._committer.parts, every)
        return self._copies

    def _full_copies(self, called: str) -> Copies:
        if self._copies is None:
            raise UsageError(
                f"state.{called}() in a training that goes by state.step() needs full copies of the state, of which "
                "there are none: make a StateCommitter(state, every=k, keep='copy') after the state, or use "
                "elastic.run(checkpoint=...)"
            )
        return self._copies

    def sync(self) -> None:
        """Take over everything from worker 0. Blocks; all workers call it."""
        runtime = current()
        group = runtime.group()
        others = range(1, group.size)
        everything = who_has_it(self._committer.frontier, group, (0,), start=True, newcomers=others)
        transfer(runtime.membership.comm, everything, group.rank, self, self._committer)
        if not self.engine.stepping:
            self._committer.open = False
            self._committer.begin()

    def __setattr__(self, name: str, value: Any) -> None:
        names: dict[str, str] | None = self.__dict__.get("_names")
        if names is not None and name in names and kind_of(value) != names[name]:
            raise ConfigurationError(
                f"state.{name} is tracked as {names[name]} and cannot become a {type(value).__name__}; make a new "
                "TorchState for it"
            )
        super().__setattr__(name, value)
        if names is not None and name in names:
            if self._copies is not None and names[name] != "value":
                self._copies.forget_after(-1)  # they are of something else
            self._look_after(value)

    # --- what the engine uses (recovery.Trainee) -------------------------------------------------------------------

    def schema(self) -> list[str]:
        return self._replica.schema()

    def structure(self) -> Any:
        return self._replica.structure()

    def prepare(self, structure: Any) -> None:
        self._replica.prepare(structure)

    def blocks(self) -> list[TensorBlock]:
        return self._replica.blocks()

    def joined(self, generation: int, rank: int) -> None:
        seed_newcomer(generation, rank)

    def drain(self) -> tuple[int, int]:
        counts = [optimizer.ft_reducer.drain() for optimizer in self._distributed()]
        return sum(done for done, _ in counts), sum(asked for _, asked in counts)

    def keep_gradients(self, keep: bool) -> None:
        self._keep = keep
        for optimizer in self._distributed():
            optimizer.ft_reducer.keep = keep

    def gradients(self) -> Gradients | str:
        if self._waiting is None:
            return "was not waiting for the gradients of an update"
        done: list[bool] = []
        lossy: list[bool] = []
        elements: list[int] = []
        for name, optimizer in self._in_update().items():
            if optimizer is not self._waiting and not optimizer.ft_reducer.whole():
                return f"had a part of the gradients of state.{name} only"
            its_done, its_lossy, its_elements = optimizer.ft_reducer.frontier()
            done += its_done
            lossy += its_lossy
            elements += its_elements
        update = f"number {self._committer.asked + 1} of the step, of {' and '.join(self._in_update())}"
        return Gradients(update, tuple(done), tuple(lossy), tuple(elements), self._weight())

    def _in_update(self) -> dict[str, Any]:
        """The optimizer whose update failed, and those whose gradients are being reduced with its."""
        return {
            name: optimizer
            for name, optimizer in self._named(Distributed).items()
            if optimizer is self._waiting or optimizer.ft_reducer.in_update()
        }

    def _weight(self) -> float:
        """Of this worker's share in the open step, on average over its batches."""
        deals = [] if self._loader is None else self._loader.cursor.open
        return sum(deal.weight for deal in deals) / len(deals) if deals else 1.0

    def finish(self, reach: Reach, decision: Forward) -> Finished:
        runtime = current()
        lossy: list[tuple[str, int]] = []
        in_update = self._in_update().values()
        at = 0
        for optimizer in in_update:
            reducer = optimizer.ft_reducer
            reducer.weight = self._present_weight()
            here = slice(at, at + len(reducer.buckets))
            at = here.stop
            completion = Completion(reducer, runtime.group(), runtime.binding, runtime.binding.wait)
            shares = self._shares(reach, decision, reducer)
            slots = completion.run(reach.holders[here], reach.lossy[here], decision, shares)
            lossy += [(reducer.prefix + slot.name, slot.parameter.numel()) for slot in slots]
        for optimizer in self._distributed():  # nothing can fail any more
            reducer = optimizer.ft_reducer
            if optimizer in in_update:
                reducer.take_all()
            reducer.recovered()
            # More updates of this step may follow, with the same shares.
            reducer.set_weight(self._present_weight() * self._shares(reach, decision, reducer).factor())
        return Finished(
            gradients=len(reach.holders),
            elements=sum(reach.elements),
            lossy=tuple(name for name, _ in lossy),
            lossy_elements=sum(elements for _, elements in lossy),
        )

    @staticmethod
    def _shares(reach: Reach, decision: Forward, reducer: GradientReducer) -> Shares:
        return Shares(reach.weights, reach.largest, reach.shared_by.size, decision.rescale, reducer.average)

    def _present_weight(self) -> float:
        """Of the batch that was taken last, in the group that it was dealt to."""
        deals = [] if self._loader is None else self._loader.cursor.open
        return deals[-1].weight if deals else 1.0

    def update_elements(self) -> int:
        return self._updated_elements

    def reduction_s(self) -> float:
        return float(sum(optimizer.ft_reducer.waited_s for optimizer in self._distributed()))

    def dealt_to(self, ranks: Iterable[int]) -> list[int]:
        return [] if self._loader is None else self._loader.cursor.dealt_to(ranks)

    def ft_copies(self) -> Copies | None:
        return self._copies

    def ft_durable(self) -> TorchDurable:
        return self._durable

    def ft_guard(self) -> ReplicaGuard | None:
        return next(iter(self._named(ReplicaGuard).values()), None)

    def digest(self) -> int:
        return self._replica.digest()

    def finite(self) -> bool:
        return self._replica.finite()

    def refuse(self, error: BaseException) -> None:
        for optimizer in self._distributed():
            optimizer.ft_reducer.refuse(error)

    def discard(self) -> None:
        for optimizer in self._distributed():
            optimizer.ft_reducer.discard()

    def accumulating(self) -> bool:
        return any(optimizer.ft_reducer.accumulating() for optimizer in self._distributed())

    def open_ranges(self) -> tuple[Range, ...]:
        return () if self._loader is None else self._loader.cursor.open_ranges()

    def repeat(self, ranges: tuple[Range, ...]) -> None:
        if self._loader is not None:
            self._loader.cursor.repeat(ranges)

    def regrouped(self, group: Group) -> None:
        self._redeal()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def settled(self, group: Group) -> None:
        self._redeal()
        self._follow(group)

    def reentering(self) -> None:
        if self._loader is not None:
            self._loader.resume()

    def stepping(self) -> None:
        self._snapshot.drop()
        plain = [
            name for name, value in self._named(torch.optim.Optimizer).items() if not isinstance(value, Distributed)
        ]
        if plain and current().group().size > 1:
            warnings.warn(
                f"state.{plain[0]} is not made by hvd.DistributedOptimizer: its gradients are not averaged, and the "
                "workers will drift apart unless the script does that itself",
                stacklevel=4,
            )

    # --- what the optimizer and the loader tell --------------------------------------------------------------------

    def before_update(self) -> None:
        if not self.engine.stepping and not self._snapshot.enabled:  # the first update of a script that commits itself
            self._snapshot.enabled = True
            self._snapshot.begin()
        if self._copies is not None:
            self._copies.settle()
        self.engine.injector.at("optimizer", self._committer.frontier.step + 1)

    def admit_update(self) -> bool:
        return self.engine.admit_update()

    def update_applied(self, optimizer: Any) -> None:
        self._updated_elements = optimizer.ft_reducer.elements
        self.engine.update_applied()

    def reduction_failed(self, optimizer: Any, error: BaseException) -> bool:
        self._waiting = optimizer
        try:
            return self.engine.broken_update(error)
        finally:
            self._waiting = None

    def taking(self) -> None:
        self.engine.begin()
        self.engine.injector.at("data", self._committer.frontier.step + 1)

    def taken(self, deal: Deal) -> None:
        current().ledger.dealt(self._committer.frontier.step + 1, deal)
        for optimizer in self._distributed():
            optimizer.ft_reducer.set_weight(deal.weight)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _follow(self, group: Group) -> None:
        """Let learning rates follow the size of the group, if there is a rule for it."""
        for rule in self._named(LearningRateRule).values():
            optimizers = self._named(torch.optim.Optimizer).values()
            factor = rule.follow(group.size, optimizers, self._named(torch.optim.lr_scheduler.LRScheduler).values())
            if factor is not None:
                current().bus.emit("learning_rate", factor=factor, workers=group.size)

    def _only_rule(self) -> None:
        rules = self._named(LearningRateRule)
        if len(rules) > 1:
            raise ConfigurationError(f"TorchState tracks one LearningRateRule, not {sorted(rules)}")
        if rules and self._loader is not None and self._loader.cursor.batch.total is not None:
            raise ConfigurationError(
                f"state.{next(iter(rules))} has no meaning with global_batch_size: an update does not depend on the "
                "number of workers, so the learning rate need not follow it. Leave the rule out, or use batch_size"
            )

    def _redeal(self) -> None:
        for sampler in self._named(ElasticSampler).values():
            sampler.reset()

    @property
    def _loader(self) -> ElasticDataLoader[Any] | None:
        return next(iter(self._named(ElasticDataLoader).values()), None)

    def _look_after(self, value: Any) -> None:
        """Let what is tracked, and may be a replacement, tell this state what it does."""
        if isinstance(value, Distributed):
            value.ft_gate = self
            value.ft_reducer.on_failure = self.engine.note
            value.ft_reducer.stopped = current().binding.stopped
            value.ft_reducer.keep = self._keep
        elif isinstance(value, ElasticDataLoader):
            value.watcher = self
            current().ledger.describe(length=value.cursor.order.length, drop_last=value.cursor.drop_last)

    def _values(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in self._names]

    def _named(self, kind: type[Any]) -> dict[str, Any]:
        return {name: value for name, value in self._values() if isinstance(value, kind)}

    def _distributed(self) -> list[Any]:
        return [value for _, value in self._values() if isinstance(value, Distributed)]

    def _only_loader(self) -> None:
        loaders = self._named(ElasticDataLoader)
        if len(loaders) > 1:
            raise ConfigurationError(
                f"TorchState tracks one ElasticDataLoader, not {sorted(loaders)}: the one that training goes by. "
                "Others, for validation say, need not be tracked"
            )

    def _parts(self) -> dict[str, Part]:
        """All light state, in order: this worker's own, then by the name of the attribute that it looks after."""
        return {
            RANDOM: RandomState(),
            "_weights": _EvenWeights(self),
            BUFFERS: Buffers(lambda: self._named(torch.nn.Module)),
            "_snapshot": self._snapshot,
            **parts_of(self, self._names),
        }


class _EvenWeights(BasePart):
    """Without a tracked loader all workers count the same; a step that was carried forward may have changed that."""

    def __init__(self, state: TorchState) -> None:
        self._state = state

    def begin(self) -> None:
        if self._state._loader is None:
            for optimizer in self._state._distributed():
                optimizer.ft_reducer.set_weight(1.0)


__all__ = ["Frontier", "TorchState"]
