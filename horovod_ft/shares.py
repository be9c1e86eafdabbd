"""What a survivor's local gradients count in an update that is finished without those who are gone. No framework."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shares:
    """How much of the mini-batch is left, and what follows from that for a gradient that is made of it.

    Attributes:
        weights: of the survivors, by rank; see ``agreement.Gradients``.
        largest: rank of the one with the most samples.
        size_before: of the group that broke.
        rescale: as in ``policy.Forward``.
        average: the reduction is an average, not a sum.
    """

    weights: tuple[float, ...]
    largest: int
    size_before: int
    rescale: bool
    average: bool

    def factor(self) -> float:
        """What every local gradient is multiplied by, beside its weight, before it is reduced by all that are left."""
        whole = sum(self.weights) if self.rescale else self.size_before
        return (len(self.weights) if self.average else self.size_before) / whole

    def factor_alone(self) -> float:
        """The same for the gradient of ``largest`` if it stands for all."""
        whole = self.weights[self.largest] if self.rescale else self.size_before
        return (1 if self.average else self.size_before) / whole
