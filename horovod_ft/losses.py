"""What is lost when a step is carried forward: which samples do not count in how much of its updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from horovod_ft.agreement import Reach
from horovod_ft.ledger import Ledger
from horovod_ft.policy import Forward
from horovod_ft.trainee import Finished, Trainee


@dataclass
class _Carried:
    """What has been lost in the open step so far.

    Attributes:
        generation: of the group that its batch was dealt to.
        ids: samples that do not count in ``elements`` of the ``of`` elements of its updates so far.
        later: samples that will not count in the updates to come.
        fresh: the update that was carried forward is still to be applied.
    """

    generation: int
    ids: tuple[int, ...] = ()
    elements: int = 0
    of: int = 0
    later: tuple[int, ...] = ()
    fresh: bool = False


class Losses:
    """Keeps the account of the open step."""

    def __init__(self, ledger: Ledger, trainee: Trainee) -> None:
        self._ledger = ledger
        self._trainee = trainee
        self._carried: _Carried | None = None

    def carried_forward(self, step: int, reach: Reach, decision: Forward, done: Finished) -> list[int]:
        """An update was completed without those who are gone. Returns the samples that do not count in a part of it."""
        samples = self._trainee.dealt_to(_not_counted(reach, decision)) if done.lossy else []
        before = self._carried or _Carried(reach.shared_by.generation)
        self._carried = replace(before, later=tuple(self._trainee.dealt_to(reach.gone)), fresh=True)
        self._note(step, self._carried, samples, done.lossy_elements, done.elements)
        return samples

    def update_applied(self, step: int) -> None:
        """An update of the step was applied. If it comes after one that was carried forward, the dead are not in it."""
        carried = self._carried
        if carried is None:
            return
        if carried.fresh:
            carried.fresh = False
        else:
            elements = self._trainee.update_elements()
            self._note(step, carried, carried.later, elements if carried.later else 0, elements)

    def step_ended(self) -> None:
        """It was committed, or is given up."""
        self._carried = None

    def _note(self, step: int, carried: _Carried, samples: Sequence[int], elements: int, of: int) -> None:
        carried.elements += elements
        carried.of += of
        carried.ids = tuple(dict.fromkeys((*carried.ids, *samples)))
        if carried.elements:
            self._ledger.lossy(step, carried.generation, list(carried.ids), carried.elements, carried.of)


def _not_counted(reach: Reach, decision: Forward) -> Sequence[int]:
    """Ranks, in the group that the batch was dealt to, whose samples do not count in a lossy gradient."""
    match decision.missing:
        case "reduce_again":
            return reach.gone
        case "local":
            return [rank for rank in range(reach.shared_by.size) if rank != reach.ranks[reach.largest]]
        case _:
            return range(reach.shared_by.size)
