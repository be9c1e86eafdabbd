"""Compare the replicas of all workers, and heal those that differ; see ``guard.py``. Collectives, no framework."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from horovod_ft.agreement import who_has_it
from horovod_ft.committer import Committer
from horovod_ft.errors import DivergenceError
from horovod_ft.events import EventBus
from horovod_ft.guard import judge
from horovod_ft.membership.base import Membership
from horovod_ft.trainee import Trainee
from horovod_ft.transfer import transfer

log = logging.getLogger("horovod_ft")


def heal_if_due(
    membership: Membership, trainee: Trainee, committer: Committer, bus: EventBus, *, also: bool = False
) -> None:
    """``heal``, if there is a guard and it asks for it after this step; or ``also`` now, equal on all workers."""
    guard = trainee.ft_guard()
    if guard is not None and (also or committer.frontier.step % guard.every == 0):
        heal(membership, trainee, committer, bus)


def heal(membership: Membership, trainee: Trainee, committer: Committer, bus: EventBus) -> None:
    """Find out who has another replica than the majority, and give it theirs. At a step boundary; all workers call it.

    Blocks for one small collective; for two and a transfer if replicas differ.

    Raises:
        DivergenceError: on all workers, if there is no majority.
    """
    comm, group, step = membership.comm, membership.group, committer.frontier.step
    digests: list[int] = comm.allgather_object(trainee.digest(), "digest")
    if len(set(digests)) == 1:
        return
    verdict = judge(digests) or judge(digests, comm.allgather_object(trainee.finite(), "finite"))
    if verdict is None:
        bus.emit("diverged", healthy=(), differing=tuple(range(group.size)))
        raise _no_majority(step, digests)
    bus.emit("diverged", healthy=verdict.healthy, differing=verdict.differing)
    log.warning(
        "horovod_ft: after step %d the replicas of the workers %s differ from the others' and are replaced",
        step, list(verdict.differing),
    )  # fmt: skip
    if group.rank in verdict.differing:
        committer.torn = True  # what it has counts no more, even if the group breaks before it is healed
        copies = trainee.ft_copies()
        if copies is not None:
            copies.forget_after(-1)  # nobody knows since when
    whole = who_has_it(committer.frontier, group, verdict.healthy)
    sent = transfer(comm, whole, group.rank, trainee, committer)
    bus.emit("healed", nbytes=sent.nbytes, differing=verdict.differing)


def _no_majority(step: int, digests: Sequence[int]) -> DivergenceError:
    listed = ", ".join(f"worker {rank}: {digest:016x}" for rank, digest in enumerate(digests))
    return DivergenceError(
        f"after step {step} the workers have different parameters or optimizer states, and no majority has the same: "
        f"{listed}. A bit has flipped somewhere, or the script updates parameters from something that is not equal "
        "everywhere. Go back to a checkpoint; with three workers or more, one that differs can be healed"
    )
