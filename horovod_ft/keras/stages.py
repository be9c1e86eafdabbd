"""One training step of a Keras model in three stages: compute locally, reduce over all workers, update.

No variable of the model or the optimizer is touched before every reduction of the step has arrived: a group that breaks
leaves them as they were. What the first stage touches (running statistics, random generators, metrics) is light state.

If the step may be finished by the survivors, each stage is a function of its own, so that the local gradients are there
after the second one has failed. Otherwise the three are compiled as one, and gradients are reduced while the backward
pass goes on. Nothing is recovered here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from horovod_ft.errors import ConfigurationError
from horovod_ft.keras.arrivals import Arrivals
from horovod_ft.keras.failures import failures
from horovod_ft.keras.flight import Flight
from horovod_ft.keras.metric_sums import MetricSums
from horovod_ft.keras.operations import HorovodOperations, Operations
from horovod_ft.keras.optimizer import Reduction, collecting, distributed_in
from horovod_ft.keras.probes import NoProbes, Probes
from horovod_ft.keras.question import NAME, Question
from horovod_ft.keras.reducer import together

Stage = Callable[..., Any]
Given = tuple[Any, ...]
#: Makes the spec of a value, for which a graph is made.
Spec = Callable[[Any], Any]


class Local(NamedTuple):
    """What the first stage makes.

    Attributes:
        gradients: of this worker, weighted, in the form in which they are reduced; only those that are not None.
        deltas: what it has added to metrics.
        before: metrics before the step.
        logs: what the model's ``train_step`` has returned.
    """

    gradients: list[Any]
    deltas: dict[str, Any]
    before: list[Any]
    logs: Any


class Collected(NamedTuple):
    """What ``Reduction.apply`` was called with, while the first stage was made.

    Attributes:
        names: of the gradients that are not None, unique and equal on all workers.
        present: which of all gradients these are.
        length: how many there are in all.
        places: of the variables of all.
        elements: how many numbers the gradients have that are not None.
        update: gets all gradients, reduced, with None where there is none.
    """

    names: tuple[str, ...]
    present: tuple[int, ...]
    length: int
    places: tuple[int, ...]
    elements: int
    update: Callable[[list[Any]], None]


class Stages:
    """The training step of one model.

    Args:
        model: compiled and built, with a distributed optimizer.
        metrics: of the model.
        operations: of the group.
        stopped: says that Horovod has stopped by itself, see ``membership.threads``.
        probes: where faults strike.
        taken_along: gives what this worker asks the others, for the step that begins; see ``question``.

    Attributes:
        arrivals: what has been reduced so far, if the step is ``split``.
        split: each stage is a function of its own.
        local: what the first stage has made, if the step is split; None between two steps.
    """

    def __init__(
        self,
        model: Any,
        metrics: MetricSums,
        operations: Operations | None = None,
        stopped: Callable[[], bool] = lambda: False,
        probes: Probes | None = None,
        taken_along: Callable[[], Question | None] = lambda: None,
    ) -> None:
        self.split = False
        self.arrivals = Arrivals()
        self.local: Local | None = None
        self._model = model
        self._metrics = metrics
        self._operations = operations or HorovodOperations()
        self._stopped = stopped
        self._probes = probes or NoProbes()
        self._taken_along = taken_along
        self._collected: Collected | None = None
        self._functions: dict[Any, Any] = {}
        self._primed: set[Any] = set()

    @property
    def reduction(self) -> Reduction:
        found: Reduction = distributed_in(self._model.optimizer).ft_reduction
        return found

    @property
    def passes(self) -> int:
        """Batches for an update."""
        accumulation = self.reduction.accumulation
        return 1 if accumulation is None else accumulation.passes

    @property
    def names(self) -> tuple[str, ...]:
        """Of the gradients that are reduced, in order. Known after the first step."""
        return () if self._collected is None else self._collected.names

    @property
    def elements(self) -> int:
        """How many numbers an update has. Known after the first step."""
        return 0 if self._collected is None else self._collected.elements

    @property
    def made(self) -> int:
        """How many kinds of arguments there are graphs for; 0 in eager mode.

        As long as this stays the same number, and it is not 0, a step makes no variables.
        """
        return 0 if self._model.run_eagerly else len(self._primed)

    @property
    def traced(self) -> int:
        """How often TensorFlow has made a graph of a step, or of a part of it."""
        return sum(made.experimental_get_tracing_count() for made in self._functions.values())

    # --- running -------------------------------------------------------------------------------------------------

    def compute(self, batch: Any, *, ends: bool, applies: bool) -> Any:
        """A pass over a batch, with all that belongs to it. Blocks until all of it is done.

        Args:
            batch: what the model's ``train_step`` takes.
            ends: the update follows; else gradients are only summed up.
            applies: the update is to be applied; else its gradients are not even reduced.

        Returns:
            logs, over all workers.

        Raises:
            HorovodInternalError: the group broke; no variable of the model or optimizer was touched.
            ConfigurationError: the model's ``train_step`` cannot be taken apart.
        """
        if not (self.split or self._model.run_eagerly):
            return self._run("whole", self._whole, (batch,), _for_any_number, ends=ends, applies=applies)
        self.local = self._stage("collect", self._collect, (batch,), _for_any_number, ends=ends)
        return self.go_on(ends=ends, applies=applies)

    def go_on(self, *, ends: bool, applies: bool) -> Any:
        """Reduce what the first stage has made, and update. Raises as ``compute``."""
        assert self.local is not None
        gradients = self.local.gradients if ends and applies else []
        self.arrivals.begin(gradients, self.local.deltas)
        given = gradients, self.local.deltas
        self._run("reduce", self._reduce_split, given, _exactly, ends=ends, applies=applies)
        if gradients:
            self._probes.arrived(self.arrivals)
        return self.update(ends=ends, applies=applies)

    def update(self, *, ends: bool, applies: bool) -> Any:
        """The last stage alone: everything has arrived. Returns logs."""
        assert self.local is not None
        reduced, sums = self.arrivals.values()
        _, _, before, logs = self.local
        self.local = None
        given = reduced, sums, before, logs
        return self._stage("finish", self._finish, given, _exactly, ends=ends, applies=applies)

    def forget(self) -> None:
        """The step is given up."""
        self.local = None
        if self.reduction.accumulation is not None:
            self.reduction.accumulation.forget()

    def _stage(self, name: str, stage: Stage, given: Given, spec: Spec, **static: bool) -> Any:
        """A stage without collectives."""
        if self._model.run_eagerly:
            return stage(*given, **static)
        return self._function(name, stage, given, spec, **static)(*given)

    def _run(self, name: str, stage: Stage, given: Given, spec: Spec, *, ends: bool, applies: bool) -> Any:
        """A stage with collectives, in a thread of its own: see ``flight``. The last one of a step takes a question."""
        question = self._taken_along() if ends else None
        given = (*given, None if question is None else tf.constant(question.fields, tf.int64))
        function = self._function(name, stage, given, spec, ends=ends, applies=applies)
        flight = Flight(lambda: function(*given), self._stopped)
        flight.wait(math.inf)
        result, counts = flight.result()
        if question is not None:
            question.answered(*counts)
        return result

    def _function(self, name: str, stage: Stage, given: Given, spec: Spec, **static: bool) -> Any:
        """The stage as a function of TensorFlow that takes what is given, and all else that fits its specs.

        It is traced here, in the thread that the model was made in: Keras has settings that belong to a thread.
        """
        key = (name, *static.items())
        if key not in self._functions:
            self._functions[key] = tf.function(lambda *tensors: stage(*tensors, **static), autograph=False)
        kinds = (key, tuple(_kind(one) for one in tf.nest.flatten(given)))
        if kinds not in self._primed:
            with failures():
                self._functions[key].get_concrete_function(*tf.nest.map_structure(spec, given))
            self._primed.add(kinds)
        return self._functions[key]

    # --- the stages, in a graph or in eager mode -------------------------------------------------------------------

    def _whole(self, batch: Any, fields: Any, *, ends: bool, applies: bool) -> tuple[Any, list[Any]]:
        local = self._collect(batch, ends=ends)
        gradients = local.gradients if ends and applies else []
        # A question that is lost must leave all variables as they are, too: the step is computed anew then.
        reduced, sums, counts = together(
            (*self._reduce(gradients, local.deltas), self._counted(fields, local.deltas))
        )
        if gradients:
            reduced = self._probes.lost(reduced)
        return self._finish(reduced, sums, local.before, local.logs, ends=ends, applies=applies), counts

    def _collect(self, batch: Any, *, ends: bool) -> Local:
        before = self._metrics.set_aside()
        self._collected = None
        gradients: list[Any] = []

        def collect(
            applied: Reduction, given: Sequence[Any], names: Sequence[str], places: Sequence[int], update: Any
        ) -> None:
            self._check(applied)
            present = tuple(place for place, gradient in enumerate(given) if gradient is not None)
            named = tuple(names[place] for place in present)
            variables = self._model.optimizer._trainable_variables
            elements = sum(int(np.prod(variables[places[place]].shape)) for place in present)
            self._collected = Collected(named, present, len(given), tuple(places), elements, update)
            gradients[:] = [given[place] for place in present]

        graph = tf.compat.v1.get_default_graph()
        with collecting(collect), self._probes.forward():
            logs = self._model.train_step(batch)
        self._check_graph(gradients, graph)
        gradients = self._probes.backward(gradients)
        reducer = self.reduction.reducer
        gradients = reducer.weighted([reducer.prepared(gradient) for gradient in gradients])
        return Local(self._summed(gradients, ends=ends), self._metrics.deltas(), before, logs)

    def _check(self, applied: Reduction) -> None:
        if applied is not self.reduction:
            raise ConfigurationError(
                "the model's train_step applies gradients by another distributed optimizer than the model's: a model "
                "that is trained under FaultToleranceCallback has one optimizer, and one update in a step"
            )
        if self._collected is not None:
            raise ConfigurationError(
                "the model's train_step applies gradients more than once: a step that is undone as a whole has one "
                "update. Put the updates into one"
            )

    def _check_graph(self, gradients: Sequence[Any], graph: Any) -> None:
        inside = [one for one in tf.nest.flatten(gradients, expand_composites=True) if hasattr(one, "graph")]
        if not tf.executing_eagerly() and any(one.graph is not graph for one in inside):
            raise ConfigurationError(
                "the model's train_step applies gradients inside of tf.cond, tf.while_loop or another tf.function: "
                "apply them at the end of train_step itself"
            )

    def _summed(self, gradients: list[Any], *, ends: bool) -> list[Any]:
        """With several passes: the sums of all passes, or none at all before the last one."""
        accumulation, collected = self.reduction.accumulation, self._collected
        if accumulation is None or collected is None:
            return gradients
        sums = [accumulation.sums[collected.places[place]] for place in collected.present]
        added = [
            tf.convert_to_tensor(total) + tf.cast(tf.convert_to_tensor(gradient), total.dtype)
            for total, gradient in zip(sums, gradients, strict=True)
        ]
        if ends:
            return [total * tf.cast(accumulation.factor, total.dtype) for total in added]
        for variable, value in zip(sums, added, strict=True):
            variable.assign(value)
        return []

    def _reduce(self, gradients: Sequence[Any], deltas: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        reducer = self.reduction.reducer
        reduced: list[Any] = []
        with reducer.compared(gradients, self.names):
            for gradient, name in zip(gradients, self.names, strict=False):
                with self._probes.before(reduced):
                    reduced.append(reducer.one(gradient, name))
        with self._probes.before(reduced) if gradients else tf.control_dependencies([]):
            return reduced, {dtype: self._sum(delta, dtype) for dtype, delta in deltas.items()}

    def _sum(self, delta: Any, dtype: str) -> Any:
        return self._operations.allreduce(delta, f"metrics.{dtype}", hvd.Sum, 1.0, 1.0)

    def _counted(self, fields: Any, deltas: dict[str, Any]) -> list[Any]:
        """A question's fields, summed up over all workers; nothing without a question.

        After the forward pass, where most of the user's errors are: they end a step, and nothing that waits for other
        workers is to be left behind.
        """
        if fields is None:
            return []
        with tf.control_dependencies(list(deltas.values())):
            return [self._operations.allreduce(tf.identity(fields), NAME, hvd.Sum, 1.0, 1.0)]

    def _reduce_split(
        self, gradients: Sequence[Any], deltas: dict[str, Any], fields: Any, *, ends: bool, applies: bool
    ) -> tuple[Any, list[Any]]:
        reduced, sums = self._reduce(gradients, deltas)
        return self.arrivals.keep(reduced, sums), self._counted(fields, deltas)

    def _finish(
        self, reduced: Sequence[Any], sums: dict[str, Any], before: Sequence[Any], logs: Any, *, ends: bool,
        applies: bool,
    ) -> Any:  # fmt: skip
        collected, reduction = self._collected, self.reduction
        if ends and applies and collected is not None:
            every: list[Any] = [None] * collected.length
            for place, gradient in zip(collected.present, self._probes.update(reduced), strict=True):
                every[place] = gradient
            reduction.update(every, collected.update)
        if ends and reduction.accumulation is not None:
            reduction.accumulation.discard()
        self._metrics.merge(before, sums)
        return self.merged(logs)

    def merged(self, logs: Any) -> Any:
        """Logs in which metrics have their values over all workers."""
        if not isinstance(logs, dict):
            return logs
        metrics = self._model.get_metrics_result()
        return {name: metrics.get(name, value) for name, value in logs.items()}


def _kind(value: Any) -> Any:
    """What values have in common that a graph takes one as well as the other: all but the number of samples."""
    shape: Any = getattr(value, "shape", None)
    if shape is None or shape.rank is None:
        return getattr(value, "dtype", type(value)), None
    return value.dtype, (shape.rank, *shape[1:])


def _exactly(value: Any) -> Any:
    """But for the rows of a sparse gradient: how many there are depends on the samples, and on the workers."""
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlicesSpec(
            value.shape, value.dtype, value.indices.dtype, value.dense_shape.dtype, indices_shape=[None]
        )
    return value if value is None else tf.type_spec_from_value(value)


def _for_any_number(value: Any) -> Any:
    if isinstance(value, tf.Tensor) and value.shape.rank:
        return tf.TensorSpec([None, *value.shape[1:]], value.dtype)
    return value if value is None else tf.type_spec_from_value(value)
