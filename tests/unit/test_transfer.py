"""The transfer: who lacks the state has it afterwards, and who has it is never written to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from horovod_ft.agreement import Agreement
from horovod_ft.committer import Committer, Frontier
from horovod_ft.membership.base import Bytes
from horovod_ft.testing.fake_world import Breakage, FakeMembership, FakeWorld, GroupBroken, Outcome
from horovod_ft.transfer import Block, Transferred, plan_chunks, transfer
from tests.unit.toy import ArrayBlock, Value

# --- the plan ------------------------------------------------------------------------------------------------------


@settings(deadline=None, derandomize=True, database=None, max_examples=60)
@given(
    total=st.integers(0, 500),
    holders=st.lists(st.integers(0, 20), min_size=1, max_size=8, unique=True),
    size=st.integers(1, 60),
)
def test_every_byte_is_sent_once_in_chunks_that_are_not_too_large(total: int, holders: list[int], size: int) -> None:
    plan = sorted(plan_chunks(total, holders, size), key=lambda chunk: chunk.start)
    ends = [0, *(chunk.stop for chunk in plan)]
    assert [chunk.start for chunk in plan] == ends[:-1]
    assert ends[-1] == total
    assert all(0 < chunk.stop - chunk.start <= size for chunk in plan)
    assert {chunk.root for chunk in plan} <= set(holders)


@settings(deadline=None, derandomize=True, database=None, max_examples=60)
@given(total=st.integers(0, 500), holders=st.integers(1, 8), size=st.integers(1, 60))
def test_the_holders_send_equally_much(total: int, holders: int, size: int) -> None:
    sent = dict.fromkeys(range(holders), 0)
    for chunk in plan_chunks(total, range(holders), size):
        sent[chunk.root] += chunk.stop - chunk.start
    assert max(sent.values()) - min(sent.values()) <= 1


def test_the_holders_take_turns() -> None:
    assert [chunk.root for chunk in plan_chunks(40, [3, 5], 10)] == [3, 5, 3, 5]


# --- the transfer --------------------------------------------------------------------------------------------------


class DeviceBlock(ArrayBlock):
    """A tensor that is not in host memory: ``host`` is a copy."""

    def __init__(self, array: NDArray[Any], *, local: bool = False) -> None:
        super().__init__(array, local=local)
        self._copy: Bytes | None = None

    def host(self, *, read: bool) -> Bytes:
        if self._copy is None:
            memory = super().host(read=read)
            self._copy = memory.copy() if read else np.full(memory.shape, 255, dtype=np.uint8)
        return self._copy

    def write_back(self) -> None:
        if self._copy is not None:
            super().host(read=False)[:] = self._copy


class Replica:
    """Two weights and a buffer of each worker's own, all filled with one number."""

    def __init__(self, content: int, rooms: int = 2) -> None:
        self.weights = [np.full(5 + room, content, dtype=np.float32) for room in range(rooms)]
        self.buffer = np.full(3, content, dtype=np.int16)
        self.joins: list[tuple[int, int]] = []

    def structure(self) -> int:
        return len(self.weights)

    def prepare(self, structure: int) -> None:
        while len(self.weights) < structure:
            self.weights.append(np.empty(5 + len(self.weights), dtype=np.float32))

    def blocks(self) -> list[Block]:
        weights: list[Block] = [DeviceBlock(weight) for weight in self.weights]
        return [*weights, ArrayBlock(self.buffer, local=True)]

    def joined(self, generation: int, rank: int) -> None:
        self.joins.append((generation, rank))

    def numbers(self) -> tuple[list[float], list[int]]:
        """The distinct numbers in the weights, and in the buffer."""
        return sorted({float(x) for weight in self.weights for x in weight}), sorted({int(x) for x in self.buffer})


AGREEMENT = Agreement(
    frontier=Frontier(9, 1), holders=(), lacking=(), newcomers=(), generation=4, start=False, computed_by=3,
    reenter=True, lost=(), survivors=(), size_before=3, consecutive=1, open_ranges=(), at_risk=0,
)  # fmt: skip

BEGINNING = Frontier(0, 0)


class Worker:
    def __init__(self, index: int, *, holds: bool, rooms: int = 2) -> None:
        self.replica = Replica(100 if holds else index, rooms)
        self.light = Value(101 if holds else index)
        self.committer = Committer([self.light])
        self.committer.frontier = Frontier(9, 1) if holds else Frontier(0, 0)
        self.committer.committed = [100 if holds else index]


def run(
    holders: Sequence[int],
    lacking: Sequence[int],
    newcomers: Sequence[int] = (),
    *,
    rooms: int = 2,
    start: bool = False,
    breakages: Sequence[Breakage] = (),
    laggards_at: Frontier = BEGINNING,
) -> tuple[list[Worker], dict[int, Outcome[Transferred]]]:
    """A transfer in a group whose holders' state is all 100 and where each other worker's is its index.

    The holders' scripts have changed the light value to 101 since the last commit.
    """
    size = len(holders) + len(lacking)
    workers = [Worker(i, holds=i in holders, rooms=rooms if i in newcomers else 2) for i in range(size)]
    for index in lacking:
        workers[index].committer.frontier = laggards_at
    agreement = replace(
        AGREEMENT, holders=tuple(holders), lacking=tuple(lacking), newcomers=tuple(newcomers), start=start
    )

    def script(membership: FakeMembership) -> Transferred:
        membership.start()
        worker = workers[membership.index]
        return transfer(membership.comm, agreement, membership.group.rank, worker.replica, worker.committer)

    return workers, FakeWorld(size, breakages).run(script)


def test_without_anybody_who_lacks_it_nothing_is_sent() -> None:
    _, outcomes = run([0, 1], [])
    assert {outcome.value for outcome in outcomes.values()} == {Transferred(0, 0)}


@pytest.mark.parametrize(("holders", "lacking"), [([0], [1]), ([1, 2], [0]), ([0, 2, 3], [1, 4])])
def test_a_laggard_has_the_holders_weights_and_keeps_what_is_its_own(holders: list[int], lacking: list[int]) -> None:
    workers, _ = run(holders, lacking)
    assert [workers[i].replica.numbers() for i in lacking] == [([100.0], [i]) for i in lacking]


def test_a_newcomer_has_the_holders_weights_and_their_buffers() -> None:
    workers, _ = run([0, 2], [1], [1])
    assert workers[1].replica.numbers() == ([100.0], [100])


def test_a_laggard_keeps_its_buffers_even_if_they_are_sent_to_a_newcomer() -> None:
    workers, _ = run([1], [0, 2], [2])
    assert [worker.replica.numbers() for worker in workers] == [([100.0], [0]), ([100.0], [100]), ([100.0], [100])]


def test_a_newcomer_makes_room_for_state_that_it_has_not_yet() -> None:
    workers, _ = run([0], [1], [1], rooms=1)
    assert len(workers[1].replica.weights) == 2
    assert workers[1].replica.numbers() == ([100.0], [100])


def test_the_frontier_comes_with_the_weights() -> None:
    workers, _ = run([0], [1])
    committer = workers[1].committer
    assert (committer.frontier, committer.computed_by) == (Frontier(9, 1), 3)
    assert (committer.fresh, committer.torn) == (False, False)


def test_a_laggard_gets_the_light_state_of_the_commit_and_does_itself_what_comes_after() -> None:
    workers, _ = run([0], [1])
    assert (workers[1].light.value, workers[1].committer.committed) == (100, [100])


def test_a_newcomer_gets_the_light_state_as_it_is() -> None:
    workers, _ = run([0], [1], [1])
    assert (workers[1].light.value, workers[1].committer.committed) == (101, [100])


def test_a_laggard_within_the_same_step_keeps_its_light_state() -> None:
    workers, _ = run([0], [1], laggards_at=Frontier(9, 0))
    assert (workers[1].light.value, workers[1].replica.numbers()[0]) == (1, [100.0])


def test_only_newcomers_of_a_running_job_get_random_streams_of_their_own() -> None:
    workers, _ = run([0], [1, 2], [2])
    assert [worker.replica.joins for worker in workers] == [[], [], [(4, 2)]]


def test_at_the_start_of_a_job_random_streams_are_the_users() -> None:
    workers, _ = run([0], [1], [0, 1], start=True)
    assert workers[1].replica.joins == []


def test_it_says_how_much_was_sent_to_how_many() -> None:
    _, outcomes = run([0], [1, 2], [2])
    weights, buffer = 4 * (5 + 6), 2 * 3
    assert {outcome.value for outcome in outcomes.values()} == {Transferred(weights + buffer, 2)}


def test_a_holders_memory_is_never_written() -> None:
    class ReadOnly(Replica):
        def blocks(self) -> list[Block]:
            arrays: list[NDArray[Any]] = [*self.weights, self.buffer]
            for array in arrays:
                array.flags.writeable = False
            return [ArrayBlock(array, local=array is self.buffer) for array in arrays]

    replicas = [ReadOnly(100), ReadOnly(100), Replica(2)]
    agreement = replace(AGREEMENT, holders=(0, 1), lacking=(2,), newcomers=(2,))

    def script(membership: FakeMembership) -> Transferred:
        membership.start()
        return transfer(membership.comm, agreement, membership.group.rank, replicas[membership.index], Committer([]))

    outcomes = FakeWorld(3).run(script)
    assert all(outcome.value.nbytes > 0 for outcome in outcomes.values())
    assert replicas[2].numbers() == ([100.0], [100])


@pytest.mark.parametrize("name", ["transfer.0", "transfer.1"])
def test_a_receiver_is_torn_if_a_holder_dies_on_the_way(name: str) -> None:
    workers, outcomes = run([0, 1], [2], breakages=[Breakage(1, name)])
    assert [worker.committer.torn for worker in workers] == [False, False, True]
    assert isinstance(outcomes[2].error, GroupBroken)


def test_a_receiver_that_a_transfer_never_reached_is_not_torn() -> None:
    workers, _ = run([0], [1], breakages=[Breakage(0, "structure")])
    assert not workers[1].committer.torn
    assert workers[1].replica.numbers() == ([1.0], [1])


def test_light_state_is_taken_over_only_after_the_last_byte() -> None:
    workers, _ = run([0], [1], breakages=[Breakage(0, "transfer.0")])
    assert (workers[1].light.value, workers[1].committer.frontier) == (1, Frontier(0, 0))
