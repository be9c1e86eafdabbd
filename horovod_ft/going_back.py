"""Take all workers of a group back to the newest full copy of the state that is the same on all who have it.

Collectives, no framework. Who lacks the copy gets it from the others, as a newcomer does, in the transfer that follows.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from horovod_ft.agreement import Agreement, Copied
from horovod_ft.committer import Committer, Frontier
from horovod_ft.errors import RecoveryError
from horovod_ft.events import EventBus
from horovod_ft.guard import Verdict, judge
from horovod_ft.membership.base import Membership
from horovod_ft.trainee import Trainee

log = logging.getLogger("horovod_ft")


def go_back(
    membership: Membership, agreement: Agreement, since: int, trainee: Trainee, committer: Committer, bus: EventBus
) -> Agreement:
    """Restore the copy where there is one. Blocks for a small collective a copy; all workers of the group call it.

    Args:
        since: the newest step that is given up, as far as this worker knows.

    Returns:
        The agreement on the state that the group has now: who holds it and who lacks it.

    Raises:
        RecoveryError: on all workers: there is no copy, or those of each step differ and have no majority.
    """
    everybody = range(membership.group.size)
    for copy in agreement.copies:
        verdict = _restore(membership, copy, trainee, committer)
        if verdict is None:
            bus.emit("warning", text=f"the copies of step {copy.step} differ between the workers {list(copy.holders)}")
            log.warning("horovod_ft: the copies of step %d differ between the workers", copy.step)
            continue
        lacking = tuple(rank for rank in everybody if rank not in verdict.healthy)
        if membership.group.rank in lacking:
            committer.torn = True  # its copy is another one, and counts no more even if the group breaks meanwhile
        told_went_back(bus, copy.step, since)
        gone = went_back(agreement, copy.step, verdict.healthy, lacking)
        return replace(gone, newcomers=tuple(rank for rank in lacking if rank not in copy.holders))
    raise RecoveryError(_nowhere_to_go([copy.step for copy in agreement.copies]))


def went_back(agreement: Agreement, step: int, holders: tuple[int, ...], lacking: tuple[int, ...] = ()) -> Agreement:
    """The agreement on the state of an earlier step, with these who have it and those who lack it."""
    return replace(
        agreement, frontier=Frontier(step, 0), holders=holders, lacking=lacking, newcomers=(), computed_by=None,
        reenter=True, open_ranges=(), reach=None,
    )  # fmt: skip


def told_went_back(bus: EventBus, step: int, since: int) -> None:
    """Put on record that training goes back from a step to an earlier one."""
    lost_steps = max(since - step, 0)  # a newcomer may not know
    bus.emit("restarted", to=step, lost_steps=lost_steps)
    log.warning("horovod_ft: training goes back to step %d, %d steps", step, lost_steps)


def _restore(membership: Membership, copy: Copied, trainee: Trainee, committer: Committer) -> Verdict | None:
    """Restore one copy on its holders, and compare: who has the one that counts, and who another; None if none does."""
    copies = trainee.ft_copies()
    rank = membership.group.rank
    held = rank in copy.holders
    if held:
        assert copies is not None
        copies.go_back(copy.step)
        committer.went_back(copy.step)
    else:
        committer.torn = True  # nobody may take its later state for the newest, if the group breaks meanwhile
    digests: list[int | None] = membership.comm.allgather_object(trainee.digest() if held else None, "copies")
    found = judge([digests[holder] or 0 for holder in copy.holders])
    if found is None:
        return None
    verdict = Verdict(
        tuple(copy.holders[index] for index in found.healthy), tuple(copy.holders[index] for index in found.differing)
    )
    # Of the same step there may have been another copy, with other light state: all take that of one of them.
    root = verdict.healthy[0]
    light = membership.comm.broadcast_object(committer.export() if rank == root else None, root, "light")
    if held:
        committer.adopt(light, light, Frontier(copy.step, 0), None)
    return verdict


def _nowhere_to_go(tried: list[int]) -> str:
    if tried:
        return f"training cannot go back: the workers' copies of the steps {tried} differ, and no majority has the same"
    return (
        "training cannot go back: there is no full copy of the state yet. StateCommitter(state, every=k, keep='copy') "
        "takes one after each k-th step, elastic.run(checkpoint=...) saves some"
    )
