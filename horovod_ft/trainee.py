"""What the engine needs of a framework's training state: the seam between it and the adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from horovod_ft.agreement import Gradients, Reach
from horovod_ft.checkpoint.partition import Part, Piece
from horovod_ft.checkpoint.tensors import Tensor, TensorSpec
from horovod_ft.data import Range
from horovod_ft.guard import ReplicaGuard
from horovod_ft.membership.base import Group
from horovod_ft.policy import Forward
from horovod_ft.snapshot import Copies
from horovod_ft.transfer import Replica


@dataclass(frozen=True)
class Finished:
    """How an update was completed without those who are gone.

    Attributes:
        gradients: of the update.
        elements: of all of them together.
        lossy: names of those that lack the share of the dead, in order.
        lossy_elements: of those.
    """

    gradients: int
    elements: int
    lossy: tuple[str, ...]
    lossy_elements: int


class Trainee(Replica, Protocol):
    """What the engine needs of a framework's training state, beyond its tensors."""

    def schema(self) -> list[str]:
        """One line a tensor: name, shape, dtype. Must be equal on all workers."""

    def drain(self) -> tuple[int, int]:
        """The group broke: wait until Horovod no longer touches any tensor. Returns gradients done, and asked for."""

    def keep_gradients(self, keep: bool) -> None:
        """From now on, whether a reduction that fails in the backward pass is kept until the update."""

    def gradients(self) -> Gradients | str:
        """After ``drain``: what this worker has of the update that failed; or why it cannot finish that update.

        The reason goes on after "worker 2 ".
        """

    def finish(self, reach: Reach, decision: Forward) -> Finished:
        """Complete the reductions of the update among the workers of the new group. Blocks.

        Args:
            reach: what the group has.
            decision: what becomes of the rest.

        Raises:
            HorovodInternalError, or what the framework has for it: the new group broke as well. What has been
                completed counts as done.
        """

    def update_elements(self) -> int:
        """How many numbers the update has that was applied last."""

    def reduction_s(self) -> float:
        """How long the last update has waited for gradients, in seconds."""

    def dealt_to(self, ranks: Iterable[int]) -> list[int]:
        """Ids of the samples of the open step that were dealt to these ranks; empty when no loader is tracked."""

    def refuse(self, error: BaseException) -> None:
        """Until ``discard``, gradients and updates raise: the body of the step is on its way out."""

    def ft_copies(self) -> Copies | None:
        """Full copies of the state, if it takes any."""

    def ft_durable(self) -> Durable | None:
        """What a durable checkpoint holds of it; None if it cannot be checkpointed."""

    def ft_guard(self) -> ReplicaGuard | None:
        """How often replicas are to be compared; None for never."""

    def digest(self) -> int:
        """A number that follows from every bit of the replicated tensors. One pass over their memory."""

    def finite(self) -> bool:
        """Whether the replicated tensors hold finite numbers only."""

    def discard(self) -> None:
        """Forget gradients of the step that failed."""

    def accumulating(self) -> bool:
        """Gradients of several batches are being summed up and the update is still to come."""

    def open_ranges(self) -> tuple[Range, ...]:
        """The global batches of the open step; empty when no loader is tracked."""

    def repeat(self, ranges: tuple[Range, ...]) -> None:
        """An update of the open step is applied, and the step is replayed: deal these global batches again."""

    def regrouped(self, group: Group) -> None:
        """A new group stands, before state is transferred in it. Not called in a process that has just begun."""

    def settled(self, group: Group) -> None:
        """A new group stands and all its workers have the state."""

    def reentering(self) -> None:
        """The training function is about to run from its top."""

    def stepping(self) -> None:
        """Training goes by ``state.step()``: nothing but light state has to be remembered."""


class Durable(Protocol):
    """What a durable checkpoint holds of a training state. No collectives.

    Attributes:
        versions: of the frameworks, by name.
    """

    versions: Mapping[str, str]

    def tensors(self) -> list[TensorSpec]:
        """All replicated tensors, in an order that is equal on all workers."""

    def capture(self, pieces: Sequence[Piece]) -> tuple[list[Part], Callable[[], None]]:
        """Copy these bytes of the tensors into host memory that is kept from capture to capture.

        Returns:
            the parts; and what blocks until their memory is filled, in any thread. One capture is in use at a time.
        """

    def shared(self) -> dict[str, Any]:
        """Everything but the tensors that is equal on all workers, as of the last commit, in plain values."""

    def local(self) -> Any:
        """What this worker has of its own, in plain values."""

    def open(self, shared: dict[str, Any]) -> list[Tensor]:
        """Make room for the state that belongs to ``shared``, and give the memory of its tensors, to be read into.

        Raises:
            MismatchError: it is of another training; nothing has changed.
        """

    def restored(self, shared: dict[str, Any], local: Any) -> None:
        """The memory that ``open`` gave is filled: let everything have its value."""
