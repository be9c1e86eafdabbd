"""``TensorFlowState``: everything of a TensorFlow training that has to survive, in one object.

It is what ``FaultToleranceCallback`` keeps for ``model.fit``. In a training loop of one's own the update has to be the
last thing in a step that needs the group: of an update that is applied already a replay knows nothing there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from horovod.common.elastic import State

from horovod_ft.agreement import Gradients, Reach
from horovod_ft.committer import Committer, Part
from horovod_ft.data import Deal, Range
from horovod_ft.errors import ConfigurationError
from horovod_ft.guard import ReplicaGuard
from horovod_ft.keras import tape
from horovod_ft.keras.durable import TensorFlowDurable
from horovod_ft.keras.metric_sums import MetricSums
from horovod_ft.keras.optimizer import distributed_in
from horovod_ft.keras.parts import (
    LOCAL,
    METRICS,
    RANDOM,
    RATES,
    Known,
    RandomState,
    Variables,
    generators_of,
    kind_of,
    parts_of,
    rates_of,
    seed_newcomer,
)
from horovod_ft.keras.probes import corrupt
from horovod_ft.keras.replica import TensorFlowReplica, VariableBlock
from horovod_ft.keras.runtime import current
from horovod_ft.keras.update import Update
from horovod_ft.membership.base import Group
from horovod_ft.policy import Forward
from horovod_ft.recovery import Engine, StepContext
from horovod_ft.trainee import Finished


class TensorFlowState(State):  # type: ignore[misc]
    """The state of a TensorFlow training.

    Every keyword argument becomes an attribute. Models, optimizers and a dataset are looked after by kind; other values
    are tracked as they are and should be small, since each step remembers them.

    Args:
        model: a built model of Keras; more of them under other names.
        optimizer: built, made by ``hvd.DistributedOptimizer``, or a plain one that gets the gradients of a
            ``hvd.DistributedGradientTape``; default: that of the compiled model.
        dataset: an ``ElasticDataset``.

    A ``ReplicaGuard`` among them compares the workers' replicas from time to time.

    Raises:
        UsageError: before ``hvd.init()``.
        ConfigurationError: a name is taken, a model or an optimizer is not built, or there is more than one dataset.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, dataset: Any = None, **kwargs: Any) -> None:
        runtime = current()
        if optimizer is None:
            optimizer = getattr(model, "optimizer", None)
        tracked = {"model": model, "optimizer": optimizer, "dataset": dataset, **kwargs}
        tracked = {name: value for name, value in tracked.items() if value is not None or name in kwargs}
        taken = sorted(name for name in tracked if name in {"engine", *dir(type(self))} or name.startswith("_"))
        if taken:
            raise ConfigurationError(f"TensorFlowState uses the names {taken} itself; call yours something else")
        super().__init__(bcast_object=None, get_rank=lambda: runtime.group().rank)
        for name, value in tracked.items():
            object.__setattr__(self, name, value)
        self._names = {name: kind_of(value) for name, value in tracked.items()}
        self._check()
        self._replica = TensorFlowReplica(lambda: self._of("model"), lambda: self._of("optimizer"))
        self.ft_metrics = MetricSums(self._metrics_variables)
        self.ft_update = Update(lambda: self._of("optimizer").values())
        self._local = Known(self._replica.local, self._made)
        self._metrics = Known(self._metrics_variables, self._made)
        self._metrics_part = Variables(self._metrics, replicated=True)
        parts = self._parts()
        self._committer = Committer(list(parts.values()))
        self._durable = TensorFlowDurable(self._replica, self._committer, parts)
        self.engine = Engine(
            runtime.membership, self, self._committer, runtime.bus, runtime.injector, runtime.ledger,
            attempt=runtime.settings.attempt, timeout_s=runtime.settings.timeout_s,
        )  # fmt: skip
        self.ft_update.engine = self.engine
        if runtime.injector.waiting:
            weights = [one for model in self._of("model").values() for one in model.trainable_variables]
            runtime.injector.corrupt = lambda kind: corrupt(weights, kind)
        self._look_after_dataset()
        for part in self._committer.parts:
            part.begin()

    # --- what a training loop uses ---------------------------------------------------------------------------------

    def step(self) -> StepContext:
        """One training step as a transaction: ``with state.step(): ...``.

        A clean exit commits: step counter, data cursor, running statistics, random generators, metrics and tracked
        values move together. If the group breaks inside, the recovery policy decides, and after a replay the loop goes
        on: the dataset deals the same global batch out again. What breaks inside of a ``tf.function`` of yours enters
        the training function again instead, at the same batch. The exit blocks for a moment only, unless there is
        something to recover or workers join.

        Raises:
            UsageError: outside of training, or inside another step.
            RecoveryError: on exit, if the failure cannot be recovered.
        """
        return self.engine.step()

    @property
    def steps(self) -> int:
        """Committed steps since the job began; equal on all workers at a step's end."""
        return self._committer.frontier.step

    # --- what the engine uses (trainee.Trainee) --------------------------------------------------------------------

    def schema(self) -> list[str]:
        return self._replica.schema()

    def structure(self) -> None:
        return None  # all variables are there once model and optimizer are built

    def prepare(self, structure: None) -> None:
        """Nothing to make room for."""

    def blocks(self) -> list[VariableBlock]:
        return self._replica.blocks()

    def joined(self, generation: int, rank: int) -> None:
        generators = [one for model in self._of("model").values() for one in generators_of(model)]
        seed_newcomer(generators, generation, rank)

    def drain(self) -> tuple[int, int]:
        return self.ft_update.drain()

    def keep_gradients(self, keep: bool) -> None:
        self.ft_update.keep_gradients(keep)

    def gradients(self) -> Gradients | str:
        return self.ft_update.gradients(self._committer.asked + 1, self._weight())

    def _weight(self) -> float:
        """Of this worker's share in the open step, on average over its batches."""
        deals = self._deals()
        return sum(deal.weight for deal in deals) / len(deals) if deals else 1.0

    def _deals(self) -> list[Deal]:
        return [] if self._dataset is None else list(self._dataset.cursor.open)

    def finish(self, reach: Reach, decision: Forward) -> Finished:
        return self.ft_update.finish(reach, decision, current().binding, current().group())

    def update_elements(self) -> int:
        return self.ft_update.elements

    def reduction_s(self) -> float:
        return self.ft_update.waited_s

    def dealt_to(self, ranks: Iterable[int]) -> list[int]:
        return [] if self._dataset is None else self._dataset.cursor.dealt_to(ranks)

    def ft_copies(self) -> None:
        return None

    def ft_durable(self) -> TensorFlowDurable:
        return self._durable

    def ft_guard(self) -> ReplicaGuard | None:
        return next(iter(self._of("guard").values()), None)

    def digest(self) -> int:
        return self._replica.digest()

    def finite(self) -> bool:
        return self._replica.finite()

    def refuse(self, error: BaseException) -> None:
        self.ft_update.refused = error

    def discard(self) -> None:
        self.ft_update.discard()

    def accumulating(self) -> bool:
        return self.ft_update.accumulating()

    def open_ranges(self) -> tuple[Range, ...]:
        return () if self._dataset is None else self._dataset.cursor.open_ranges()

    def repeat(self, ranges: tuple[Range, ...]) -> None:
        if self._dataset is not None:
            self._dataset.cursor.repeat(ranges)

    def regrouped(self, group: Group) -> None:
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def settled(self, group: Group) -> None:
        """Nothing follows the size of the group."""

    def reentering(self) -> None:
        if self._dataset is not None:
            self._dataset.resume()

    def stepping(self) -> None:
        """Nothing is remembered but light state anyway."""

    # --- what the dataset tells ------------------------------------------------------------------------------------

    def taking(self) -> None:
        self.engine.begin()
        self.engine.injector.at("data", self.steps + 1)

    def taken(self, deal: Deal) -> None:
        current().ledger.dealt(self.steps + 1, deal)
        self.ft_metrics.set_counts(not deal.idle)
        self.ft_weigh(deal.weight)

    def ft_weigh(self, weight: float) -> None:
        """Let this worker's gradients count by this from now on; 1.0 outside of training."""
        tape.set_weight(weight)
        for optimizer in self._of("optimizer").values():
            distributed = distributed_in(optimizer)
            if distributed is not None:
                distributed.ft_reduction.reducer.set_weight(weight)

    # --- what ``fit`` needs ------------------------------------------------------------------------------------------

    def ft_metrics_values(self) -> list[Any]:
        """The present values of the metrics' variables. A validation may have made some."""
        self._metrics.forget()
        return self._metrics_part.export()

    def ft_set_metrics(self, values: list[Any]) -> None:
        """Let the metrics' variables have these values."""
        self._metrics_part.adopt(values)

    # --- inside ----------------------------------------------------------------------------------------------------

    @property
    def _dataset(self) -> Any:
        return next(iter(self._of("dataset").values()), None)

    def _of(self, kind: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name, its_kind in self._names.items() if its_kind == kind}

    def _metrics_variables(self) -> list[Any]:
        return [variable for model in self._of("model").values() for variable in model.metrics_variables]

    def _check(self) -> None:
        if len(self._of("dataset")) > 1:
            raise ConfigurationError(
                f"TensorFlowState tracks one ElasticDataset, not {sorted(self._of('dataset'))}: the one that training "
                "goes by. Others, for validation say, need not be tracked"
            )
        for kind in ("model", "optimizer"):
            for name, value in self._of(kind).items():
                if not value.built:
                    raise ConfigurationError(
                        f"state.{name} is not built, so its variables are not known: build it first, by "
                        + ("model.build(shape)" if kind == "model" else "optimizer.build(model.trainable_variables)")
                    )

    def _look_after_dataset(self) -> None:
        dataset = self._dataset
        if dataset is not None:
            dataset.watcher = self
            cursor = dataset.cursor
            current().ledger.describe(length=cursor.order.length, drop_last=cursor.drop_last)

    def _made(self) -> int:
        """How many graphs of steps there are; 0 if steps may make variables without one."""
        stages = self.ft_update.stages
        return 0 if stages is None else stages.made

    def _rates(self) -> list[Any]:
        return [rate for optimizer in self._of("optimizer").values() for rate in rates_of(optimizer)]

    def _parts(self) -> dict[str, Part]:
        """All light state, in order: this worker's own, then by the name of the attribute that it looks after."""
        return {
            RANDOM: RandomState(),
            LOCAL: Variables(self._local, replicated=False),
            METRICS: self._metrics_part,
            RATES: Variables(self._rates, replicated=True),
            **parts_of(self, self._names),
        }
