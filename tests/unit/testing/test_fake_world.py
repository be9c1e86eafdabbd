"""The fake world keeps its promises, on which the tests of the engine rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from horovod_ft.membership.base import Group, Membership
from horovod_ft.testing.fake_world import (
    Breakage,
    FakeMembership,
    FakeWorld,
    GroupBroken,
    Outcome,
    WorkerDied,
    WorldError,
)


def gather(membership: FakeMembership, name: str = "x") -> list[Any]:
    return membership.comm.allgather_object(membership.index, name)


def started(script: Callable[[FakeMembership], Any]) -> Callable[[FakeMembership], Any]:
    def start_and(membership: FakeMembership) -> Any:
        membership.start()
        return script(membership)

    return start_and


def values(outcomes: dict[int, Outcome[Any]]) -> list[Any]:
    return [outcome.value for outcome in outcomes.values()]


def test_it_is_a_membership() -> None:
    membership: Membership = FakeWorld(1)._members[0]
    assert membership.failure_types == (GroupBroken,)


# --- collectives ---------------------------------------------------------------------------------------------------


def test_everybody_gets_a_rank() -> None:
    assert values(FakeWorld(3).run(lambda membership: membership.start())) == [Group(rank, 3) for rank in range(3)]


def test_an_allgather_gives_the_values_by_rank() -> None:
    world = FakeWorld(3, arrange=lambda order: order[::-1])
    assert values(world.run(started(gather))) == [[2, 1, 0]] * 3


def test_values_are_copies() -> None:
    def script(membership: FakeMembership) -> bool:
        mine: list[int] = []
        return any(mine is other for other in membership.comm.allgather_object(mine, "x"))

    assert values(FakeWorld(2).run(started(script))) == [False, False]


def test_an_object_is_broadcast() -> None:
    def script(membership: FakeMembership) -> Any:
        return membership.comm.broadcast_object({"from": membership.index}, 1, "x")

    assert values(FakeWorld(3).run(started(script))) == [{"from": 1}] * 3


def test_bytes_are_broadcast_into_the_buffer() -> None:
    def script(membership: FakeMembership) -> list[int]:
        buffer = np.full(4, membership.index, dtype=np.uint8)
        membership.comm.broadcast_bytes(buffer, 2, "x")
        return buffer.tolist()

    assert values(FakeWorld(3).run(started(script))) == [[2, 2, 2, 2]] * 3


@pytest.mark.parametrize("said", [(0, 0, 0), (0, 1, 0), (1, 1, 1), (8, 1, 2)])
def test_flags_are_merged_in_the_background(said: tuple[int, int, int]) -> None:
    def script(membership: FakeMembership) -> int:
        pending = membership.comm.any_async(said[membership.index])
        gather(membership)
        return pending.result()

    assert values(FakeWorld(3).run(started(script))) == [said[0] | said[1] | said[2]] * 3


# --- breakages -----------------------------------------------------------------------------------------------------


def test_a_death_before_a_collective_fails_it_on_all_others() -> None:
    outcomes = FakeWorld(3, [Breakage(1, "x")]).run(started(gather))
    assert outcomes[1].died
    assert all(isinstance(outcomes[index].error, GroupBroken) for index in (0, 2))


def test_a_collective_can_complete_on_some_workers_only() -> None:
    outcomes = FakeWorld(3, [Breakage(1, "x", reaches=[2])]).run(started(gather))
    assert outcomes[2].value == [0, 1, 2]
    assert isinstance(outcomes[0].error, GroupBroken)


def test_a_group_can_break_without_a_death() -> None:
    outcomes = FakeWorld(3, [Breakage(1, "x", dies=False)]).run(started(gather))
    assert {type(outcome.error) for outcome in outcomes.values()} == {GroupBroken}


def test_only_the_nth_collective_of_a_name_breaks() -> None:
    def script(membership: FakeMembership) -> list[Any]:
        return [gather(membership, "y"), gather(membership), gather(membership)]

    outcomes = FakeWorld(2, [Breakage(0, "x", nth=2)]).run(started(script))
    assert outcomes[0].died
    assert FakeWorld(2, [Breakage(0, "x", nth=3)], must_break=False).run(started(script))[1].error is None


def test_a_collective_that_all_took_part_in_completes_even_if_one_of_them_dies_next() -> None:
    def script(membership: FakeMembership) -> list[Any]:
        pending = membership.comm.any_async(False)
        if membership.index == 0:
            gather(membership, "y")
        pending.result()
        return gather(membership, "z")

    outcomes = FakeWorld(2, [Breakage(0, "y")]).run(started(script))
    assert str(outcomes[1].error) == "z failed: a worker is gone"


def test_a_worker_that_left_the_group_takes_part_in_nothing_more() -> None:
    def script(membership: FakeMembership) -> list[Any]:
        if membership.index == 0:
            assert membership.abort() == 1
            assert membership.abort() == 0
        return gather(membership)

    outcomes = FakeWorld(2).run(started(script))
    assert {type(outcome.error) for outcome in outcomes.values()} == {GroupBroken}


def test_a_dead_worker_stays_dead_even_if_its_code_goes_on() -> None:
    def script(membership: FakeMembership) -> None:
        try:
            gather(membership)
        finally:
            membership.abort()

    outcomes = FakeWorld(2, [Breakage(0, "x")]).run(started(script))
    assert outcomes[0].died


def test_a_worker_can_die_on_its_own() -> None:
    def script(membership: FakeMembership) -> list[Any]:
        if membership.index == 0:
            membership.die(9)
        return gather(membership)

    assert FakeWorld(2).run(started(script))[0].died


# --- new groups ----------------------------------------------------------------------------------------------------


def test_survivors_form_a_group_with_dense_ranks_and_the_old_generation() -> None:
    def script(membership: FakeMembership) -> Group:
        membership.adopt_generation(4)
        with pytest.raises(GroupBroken):
            gather(membership)
        return membership.reform()

    outcomes = FakeWorld(4, [Breakage(1, "x")]).run(started(script))
    assert [outcomes[index].value for index in (0, 2, 3)] == [Group(rank, 3, 4) for rank in range(3)]


def test_newcomers_wait_for_the_next_group_and_only_one_worker_hears_of_them() -> None:
    def script(membership: FakeMembership) -> Group:
        if membership.start().size == 2:
            if membership.index == 1:
                membership.announce(2)
            assert membership.changed() is (membership.index == 1)
            membership.reform()
            assert not membership.changed()
        return membership.group

    assert values(FakeWorld(2).run(script)) == [Group(rank, 4) for rank in range(4)]


def test_a_notice_of_the_end_is_heard_by_one_worker_and_outlives_its_group() -> None:
    def script(membership: FakeMembership) -> list[bool]:
        told = [membership.preempted()]
        if membership.index == 1:
            membership.preempt()
        membership.reform()
        return [*told, membership.preempted(), membership.changed()]

    assert values(FakeWorld(2).run(started(script))) == [[False, False, False], [False, True, False]]


def test_no_group_waits_for_a_worker_that_has_ended() -> None:
    def script(membership: FakeMembership) -> Group:
        return membership.group if membership.index == 0 else membership.reform()

    assert values(FakeWorld(3).run(started(script))) == [Group(0, 3), Group(0, 2), Group(1, 2)]


# --- bugs of what is being tested ----------------------------------------------------------------------------------


def test_workers_that_wait_for_each_other_are_told_so_at_once() -> None:
    def script(membership: FakeMembership) -> None:
        gather(membership, f"for {membership.index}")

    with pytest.raises(WorldError, match=r"all workers wait, .* worker 0 for 'for 0', worker 1 for 'for 1'"):
        FakeWorld(2).run(started(script))


def test_buffers_of_different_lengths_are_a_bug() -> None:
    def script(membership: FakeMembership) -> None:
        membership.comm.broadcast_bytes(np.zeros(membership.index + 1, dtype=np.uint8), 0, "x")

    with pytest.raises(WorldError, match=r"x: buffers of different lengths \[1, 2\]"):
        FakeWorld(2).run(started(script))


def test_a_buffer_of_another_type_is_a_bug() -> None:
    def script(membership: FakeMembership) -> None:
        membership.comm.broadcast_bytes(np.zeros(3, dtype=np.int8), 0, "x")

    with pytest.raises(WorldError, match="one-dimensional array of uint8"):
        FakeWorld(1).run(started(script))


def test_a_breakage_that_never_comes_is_a_bug_of_the_test() -> None:
    with pytest.raises(WorldError, match="never came"):
        FakeWorld(2, [Breakage(0, "x", nth=2)]).run(started(gather))


def test_an_error_of_a_worker_is_raised_when_its_value_is_asked_for() -> None:
    def script(membership: FakeMembership) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        values(FakeWorld(1).run(script))


def test_nobody_can_catch_a_death_by_mistake() -> None:
    assert not issubclass(WorkerDied, Exception)
