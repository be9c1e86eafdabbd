"""Full copies to go back to, and the object by which a user asks for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from horovod_ft.errors import ConfigurationError
from horovod_ft.snapshot import ARENAS, Copies, StateCommitter
from tests.unit.toy import Value, WeightsArena


class Training:
    """Weights, a schedule that all share and draws of its own; time passes when a test says so."""

    def __init__(self, every: int | None = 2) -> None:
        self.weights = np.zeros(3, dtype=np.int64)
        self.schedule, self.draws = Value(), Value(replicated=False)
        self.now = 0.0
        self.arenas = [WeightsArena(self.weights) for _ in range(ARENAS)]
        self.copies = Copies(self.arenas, [self.schedule, self.draws], every, mono=lambda: self.now)

    def step(self, step: int) -> None:
        self.weights[:] = step
        self.schedule.value, self.draws.value = 10 * step, 100 * step
        self.copies.committed(step)

    def present(self) -> tuple[int, int, int]:
        return int(self.weights[0]), self.schedule.value, self.draws.value


@pytest.fixture
def training() -> Training:
    return Training()


def test_there_is_no_copy_at_first_but_room_for_it(training: Training) -> None:
    assert (training.copies.steps, training.copies.nbytes) == ((), 2 * 24)


def test_a_copy_is_taken_every_so_many_steps_and_the_last_two_are_kept(training: Training) -> None:
    seen: list[tuple[int, ...]] = []
    for step in range(1, 8):
        training.step(step)
        seen.append(training.copies.steps)
    assert seen == [(), (2,), (2,), (4, 2), (4, 2), (6, 4), (6, 4)]


def test_on_request_only() -> None:
    training = Training(every=None)
    training.step(2)
    training.step(4)
    training.copies.take(4)
    assert training.copies.steps == (4,)


@pytest.mark.parametrize("step", [4, 6])
def test_going_back_restores_weights_and_light_state_of_that_step(training: Training, step: int) -> None:
    for one in range(1, 8):
        training.step(one)
    training.copies.go_back(step)
    assert training.present() == (step, 10 * step, 100 * step)


def test_one_can_go_back_to_a_copy_twice(training: Training) -> None:
    training.step(2)
    for later in (3, 5):
        training.step(later)
        training.copies.go_back(2)
        assert training.present() == (2, 20, 200)


def test_a_copy_of_the_same_step_replaces_the_one_before(training: Training) -> None:
    training.step(2)
    training.step(4)
    training.schedule.value = 7  # the script has changed something between two steps
    training.copies.take(4)
    assert training.copies.steps == (4,)
    training.copies.go_back(4)
    assert training.schedule.value == 7


def test_copies_of_a_future_that_does_not_come_are_forgotten(training: Training) -> None:
    seen = []
    for step in (2, 4, 6):  # the third in the place of the one that was forgotten
        training.step(step)
        if step == 4:
            training.copies.forget_after(2)
        seen.append(training.copies.steps)
    assert seen == [(2,), (2,), (6, 2)]


def test_a_copy_that_fails_half_way_is_none_and_the_other_stays(training: Training) -> None:
    training.step(2)
    training.step(4)

    def fail() -> None:
        raise MemoryError

    training.arenas[0].write = fail  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        training.step(6)
    assert training.copies.steps == (4,)


def test_how_old_a_copy_is_and_how_long_it_took(training: Training) -> None:
    def slowly(write: Any = training.arenas[0].write) -> None:
        training.now += 0.5
        write()

    training.arenas[0].write = slowly  # type: ignore[method-assign]
    training.step(2)
    training.now += 3
    assert (training.copies.age_s(2), training.copies.seconds) == (3.0, 0.5)


def test_an_update_waits_for_copies_that_are_under_way(training: Training) -> None:
    training.copies.settle()
    assert [arena.settled for arena in training.arenas] == [1, 1]


# --- StateCommitter ------------------------------------------------------------------------------------------------


class State:
    """Whatever can keep copies."""

    def __init__(self) -> None:
        self.asked: list[int | None] = []

    def keep_copies(self, every: int | None) -> Copies:
        self.asked.append(every)
        return Training(every).copies


def test_by_default_no_copy_is_kept() -> None:
    state = State()
    committer = StateCommitter(state)
    assert (state.asked, committer.keep, committer.every) == ([], "replica", 1)
    assert (committer.steps, committer.nbytes, committer.seconds) == ((), 0, 0.0)


@pytest.mark.parametrize("every", [1, 7, None])
def test_copies_are_kept_if_asked_for(every: int | None) -> None:
    state = State()
    committer = StateCommitter(state, every, keep="copy")
    assert state.asked == [every]
    assert (committer.steps, committer.nbytes) == ((), 48)


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "1"])
def test_steps_between_copies_must_be_a_whole_number(every: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"every is {every!r}; it must be a whole number of steps"):
        StateCommitter(State(), every, keep="copy")


def test_what_to_keep_must_be_known() -> None:
    with pytest.raises(ConfigurationError, match="keep is 'all'; it must be 'replica' or 'copy'"):
        StateCommitter(State(), keep="all")  # type: ignore[arg-type]


@pytest.mark.parametrize("every", [5, None])
def test_light_state_alone_has_to_be_remembered_in_every_step(every: int | None) -> None:
    with pytest.raises(ConfigurationError, match=f"every is {every!r}, but without a copy.*Use keep='copy'"):
        StateCommitter(State(), every)
