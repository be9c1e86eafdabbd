"""Compare the replicas of all workers, and heal those that differ; see ``guard.py``. Collectives, no framework."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from horovod_ft.agreement import Agreement
from horovod_ft.committer import Committer
from horovod_ft.errors import DivergenceError
from horovod_ft.events import EventBus
from horovod_ft.guard import Verdict, judge
from horovod_ft.membership.base import Membership
from horovod_ft.trainee import Trainee
from horovod_ft.transfer import transfer

log = logging.getLogger("horovod_ft")


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
    whole = _whole(verdict, committer, group.size, group.generation)
    sent = transfer(comm, whole, group.rank, trainee, committer)
    bus.emit("healed", nbytes=sent.nbytes, differing=verdict.differing)


def _whole(verdict: Verdict, committer: Committer, size: int, generation: int) -> Agreement:
    """That the healthy have the state, and those who differ lack it."""
    return Agreement(
        frontier=committer.frontier, holders=verdict.healthy, lacking=verdict.differing, newcomers=(),
        generation=generation, start=False, computed_by=None, reenter=True, lost=(), survivors=tuple(range(size)),
        size_before=size, consecutive=0, open_ranges=(), at_risk=0,
    )  # fmt: skip


def _no_majority(step: int, digests: Sequence[int]) -> DivergenceError:
    listed = ", ".join(f"worker {rank}: {digest:016x}" for rank, digest in enumerate(digests))
    return DivergenceError(
        f"after step {step} the workers have different parameters or optimizer states, and no majority has the same: "
        f"{listed}. A bit has flipped somewhere, or the script updates parameters from something that is not equal "
        "everywhere. Go back to a checkpoint; with three workers or more, one that differs can be healed"
    )
