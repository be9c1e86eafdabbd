"""Yes-or-no questions of all workers in one sum of 64 bits: each flag has a field that counts who said yes."""

from __future__ import annotations

from horovod_ft.membership.base import FLAGS

#: Of a field: up to 4,095 workers can say yes.
BITS = 12


def fields_of(flags: int) -> int:
    """What one worker says, bit by bit, as a number that is to be summed up over all workers."""
    return sum((flags >> bit & 1) << bit * BITS for bit in range(FLAGS))


def flags_of(total: int) -> int:
    """Bit by bit, whether any worker said yes."""
    return sum(1 << bit for bit in range(FLAGS) if total >> bit * BITS & (1 << BITS) - 1)
