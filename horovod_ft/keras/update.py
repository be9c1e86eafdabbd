"""The update of the open step: computed in stages, and finished by the survivors if it broke and they may.

Which worker holds what is agreed on elsewhere; here is what this worker has of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from horovod.common.exceptions import HorovodInternalError

from horovod_ft.agreement import Gradients, Reach
from horovod_ft.keras.completion import Completion, TotalCollectives
from horovod_ft.keras.optimizer import distributed_in
from horovod_ft.keras.stages import Stages
from horovod_ft.membership.base import Group
from horovod_ft.policy import Forward
from horovod_ft.recovery import Engine
from horovod_ft.shares import Shares
from horovod_ft.trainee import Finished


class Update:
    """Of one training state.

    Args:
        optimizers: of the state; asked for anew each time.

    Attributes:
        engine: of the state.
        stages: of its model, if the step is ours to compute, as in ``fit``; None in a loop of the user's own.
        elements: how many numbers the last update had.
        waited_s: how long the last one has taken from its first reduction to its end, in seconds; 0.0 if not known.
        refused: raised by ``train`` until ``discard``: the body of the step is on its way out.
    """

    engine: Engine

    def __init__(self, optimizers: Callable[[], Iterable[Any]], mono: Callable[[], float] = time.monotonic) -> None:
        self.stages: Stages | None = None
        self.elements = 0
        self.waited_s = 0.0
        self.refused: BaseException | None = None
        self._optimizers = optimizers
        self._mono = mono
        self._keep = False
        self._passes = 0
        self._waiting = False

    def use(self, stages: Stages | None) -> None:
        """From now on the steps are computed by these stages."""
        self.stages = stages
        self.keep_gradients(self._keep)

    def keep_gradients(self, keep: bool) -> None:
        """See ``trainee.Trainee``: whether an update that broke may be finished."""
        self._keep = keep
        if self.stages is not None:
            self.stages.split = keep

    def train(self, batch: Any) -> Any:
        """A pass over a batch, inside ``state.step()``: the last of several is followed by the update. Blocks.

        Returns:
            logs, over all workers.

        Raises:
            HorovodInternalError: the group broke, and the step has to be computed anew or is to be given up.
        """
        if self.refused is not None:
            raise self.refused
        assert self.stages is not None
        ends = self._passes + 1 >= self.stages.passes
        applies = ends and self.engine.admit_update()
        try:
            logs = self.stages.compute(batch, ends=ends, applies=applies)
        except HorovodInternalError as error:
            self.engine.note(error)
            if not (applies and self._finished(error)):
                raise
            logs = self.stages.update(ends=ends, applies=applies)
        self._passes = 0 if ends else self._passes + 1
        if applies:
            self.elements = self.stages.elements
            self.engine.update_applied()
        return logs

    def _finished(self, error: BaseException) -> bool:
        """Whether the update that broke has been finished by the survivors; see ``Engine.broken_update``."""
        assert self.stages is not None
        if self.stages.local is None:
            return False
        self._waiting = True
        try:
            return self.engine.broken_update(error)
        finally:
            self._waiting = False

    # --- what the engine asks ------------------------------------------------------------------------------------

    def drain(self) -> tuple[int, int]:
        """Gradients that have arrived, and that were asked for. A graph has ended when its call has."""
        if self.stages is None:
            return 0, 0
        if self.stages.local is None:
            return 0, len(self.stages.names)
        done = self.stages.arrivals.done()
        return sum(done), len(done)

    def gradients(self, number: int, weight: float) -> Gradients | str:
        """See ``trainee.Trainee``.

        Args:
            number: of the update in the step.
            weight: of this worker's share.
        """
        if not self._waiting or self.stages is None:
            return "was not waiting for the gradients of an update"
        places = self.stages.arrivals.places
        return Gradients(
            f"number {number} of the step",
            self.stages.arrivals.done(),
            tuple(place.lossy for place in places),
            tuple(place.elements for place in places),
            weight,
        )

    def finish(self, reach: Reach, decision: Forward, comm: TotalCollectives, group: Group) -> Finished:
        """See ``trainee.Trainee``."""
        stages = self.stages
        assert stages is not None
        assert stages.local is not None
        reducer = stages.reduction.reducer
        shares = Shares(reach.weights, reach.largest, reach.shared_by.size, decision.rescale, reducer.average)
        Completion(stages.arrivals, stages.local, shares, comm, group).run(reach, decision)
        names = (*stages.names, *(f"metrics.{dtype}" for dtype in stages.arrivals.metrics))
        lossy = [
            (name, place.elements) for name, place in zip(names, stages.arrivals.places, strict=True) if place.lossy
        ]
        return Finished(
            gradients=len(reach.holders),
            elements=sum(reach.elements),
            lossy=tuple(name for name, _ in lossy),
            lossy_elements=sum(elements for _, elements in lossy),
        )

    def discard(self) -> None:
        """The step is given up: passes that were summed up, and local gradients, are forgotten."""
        self.refused = None
        self._passes = 0
        if self.stages is not None:
            self.stages.forget()
            return
        for optimizer in self._optimizers():
            distributed = distributed_in(optimizer)
            if distributed is not None and distributed.ft_reduction.accumulation is not None:
                distributed.ft_reduction.accumulation.forget()

    def accumulating(self) -> bool:
        """Gradients of several batches are being summed up and the update is still to come."""
        if self.stages is not None:
            return self._passes > 0
        summed = (distributed_in(optimizer) for optimizer in self._optimizers())
        return any(one is not None and _passes(one.ft_reduction.accumulation) > 0 for one in summed)


def _passes(accumulation: Any) -> int:
    return 0 if accumulation is None or accumulation.count is None else int(accumulation.count)
