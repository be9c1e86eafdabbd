"""``KerasState``: Horovod's state of a Keras training, for scripts that commit themselves and enter ``fit`` again."""

from __future__ import annotations

from typing import Any

from horovod_ft.agreement import who_has_it
from horovod_ft.committer import Part
from horovod_ft.errors import UsageError
from horovod_ft.keras.parts import Variables
from horovod_ft.keras.runtime import current
from horovod_ft.keras.state import TensorFlowState
from horovod_ft.transfer import transfer


class Snapshot(Variables):
    """A full copy of weights and of the optimizer's variables. It shares their memory until they change."""

    def drop(self) -> None:
        """Not needed any more: replicas are the copy of a training that goes by steps."""
        self._variables = tuple
        self._saved = None


class KerasState(TensorFlowState):
    """Model, optimizer and values of a training that commits itself, with the names that Horovod's has.

    ``elastic.run`` goes back to the last commit after a failure, and enters the training function again. The steps
    since then are computed anew. With ``FaultToleranceCallback`` in ``fit`` neither is needed.

    Args:
        model: built and compiled.
        optimizer: default: the compiled one. It is built if it is not.
        kwargs: more values to track, such as ``epoch`` and ``batch``; each becomes an attribute.

    Raises:
        UsageError: before ``hvd.init()``.
        ConfigurationError: see ``TensorFlowState``.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        optimizer = optimizer if optimizer is not None else model.optimizer
        if model.built and optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)
        super().__init__(model=model, optimizer=optimizer, **kwargs)

    def commit(self) -> None:
        """Remember everything, and look for workers that come or go. Blocks for one small collective.

        Raises:
            HostsChanged: workers come or go: let it through to ``elastic.run``.
        """
        self.engine.commit_explicitly()

    def check_host_updates(self) -> None:
        """Look for workers that come or go, as ``commit`` does, without remembering anything."""
        self.engine.check_for_changes()

    def save(self) -> None:
        """Remember everything, without looking for workers that come or go. Never blocks."""
        self._only_by_hand("save")
        self._committer.save()

    def restore(self) -> None:
        """Go back to the last ``commit`` or ``save``. Never blocks."""
        self._only_by_hand("restore")
        for part in self._committer.parts:
            part.rollback()

    def sync(self) -> None:
        """Take over everything from worker 0. Blocks; all workers call it."""
        self._only_by_hand("sync")
        runtime = current()
        group = runtime.group()
        others = range(1, group.size)
        everything = who_has_it(self._committer.frontier, group, (0,), start=True, newcomers=others)
        transfer(runtime.membership.comm, everything, group.rank, self, self._committer)
        self._committer.open = False
        self._committer.begin()

    def stepping(self) -> None:
        self._snapshot.drop()

    def _only_by_hand(self, called: str) -> None:
        if self.engine.stepping:
            raise UsageError(f"state.{called}() has no meaning in a training that goes by state.step()")

    def _metrics_variables(self) -> list[Any]:
        return []  # ``fit`` begins with new ones

    def _parts(self) -> dict[str, Part]:
        self._snapshot = Snapshot(
            lambda: [variable for _, variable in self._replica.replicated()], replicated=False
        )
        return {"_snapshot": self._snapshot, **super()._parts()}
