"""The update of an open step: who applies it, what the engine hears, and what is left when it breaks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from horovod.common.exceptions import HorovodInternalError

from horovod_ft.keras.update import Update

BROKEN = HorovodInternalError("Horovod has been shut down")


class Engine:
    """Admits each update but those of a replay that are applied already."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.admits = True
        self.finishes = False

    def admit_update(self) -> bool:
        return self.admits

    def update_applied(self) -> None:
        self.heard.append("applied")

    def note(self, error: BaseException) -> None:
        self.heard.append(error)

    def broken_update(self, error: BaseException) -> bool:
        self.heard.append("asked")
        return self.finishes


class Place(SimpleNamespace):
    """A reduction."""


class Stages:
    """Steps that break as a test says.

    Attributes:
        did: each pass and each update: whether it ended a step, and applied its gradients.
        local: what a split step has when it breaks.
    """

    def __init__(self, passes: int = 1) -> None:
        self.passes, self.split, self.local = passes, False, None
        self.elements = 11
        self.names = ("w", "b")
        self.did: list[tuple[str, bool, bool]] = []
        self.breaks = False
        self.forgotten = 0
        places = [Place(lossy=False, elements=4), Place(lossy=True, elements=7)]
        self.arrivals = SimpleNamespace(done=lambda: (True, False), places=places)

    def compute(self, batch: Any, *, ends: bool, applies: bool) -> Any:
        self.did.append(("compute", ends, applies))
        if self.breaks:
            self.local = object() if self.split else None  # type: ignore[assignment]
            raise BROKEN
        return {"loss": 1.0}

    def update(self, *, ends: bool, applies: bool) -> Any:
        self.did.append(("update", ends, applies))
        return {"loss": 2.0}

    def forget(self) -> None:
        self.forgotten += 1
        self.local = None


def update_of(stages: Stages | None, **engine: Any) -> Any:
    made: Any = Update(lambda: [])
    made.engine = Engine()
    for name, value in engine.items():
        setattr(made.engine, name, value)
    made.use(stages)
    return made


def test_a_pass_that_ends_a_step_applies_its_update() -> None:
    update = update_of(stages := Stages())
    assert update.train("batch") == {"loss": 1.0}
    assert (stages.did, update.engine.heard, update.elements) == ([("compute", True, True)], ["applied"], 11)


def test_of_several_passes_the_last_one_does() -> None:
    update = update_of(stages := Stages(passes=3))
    states = [(update.train("batch"), update.accumulating())[1] for _ in range(3)]
    assert states == [True, True, False]
    assert stages.did == [("compute", False, False), ("compute", False, False), ("compute", True, True)]
    assert update.engine.heard == ["applied"]


def test_an_update_that_is_in_the_variables_already_is_not_applied_again() -> None:
    update = update_of(stages := Stages(), admits=False)
    update.train("batch")
    assert (stages.did, update.engine.heard) == ([("compute", True, False)], [])


@pytest.mark.parametrize("kept", [False, True])
def test_an_update_that_breaks_and_is_not_finished_raises(kept: bool) -> None:
    update = update_of(stages := Stages())
    update.keep_gradients(kept)
    stages.breaks = True
    with pytest.raises(HorovodInternalError):
        update.train("batch")
    assert update.engine.heard == [BROKEN, *(["asked"] if kept else [])]
    assert [what for what, _, _ in stages.did] == ["compute"]


def test_an_update_that_the_survivors_finish_is_applied() -> None:
    update = update_of(stages := Stages(), finishes=True)
    update.keep_gradients(True)
    stages.breaks = True
    assert update.train("batch") == {"loss": 2.0}
    assert stages.did == [("compute", True, True), ("update", True, True)]
    assert update.engine.heard == [BROKEN, "asked", "applied"]


@pytest.mark.parametrize(("passes", "admits"), [(2, True), (1, False)])
def test_where_no_gradient_is_reduced_there_is_no_update_to_finish(passes: int, admits: bool) -> None:
    update = update_of(stages := Stages(passes), admits=admits, finishes=True)
    update.keep_gradients(True)
    stages.breaks = True
    with pytest.raises(HorovodInternalError):
        update.train("batch")
    assert "asked" not in update.engine.heard


def test_stages_that_come_later_are_split_if_gradients_are_kept() -> None:
    update = update_of(None)
    update.keep_gradients(True)
    update.use(stages := Stages())
    assert stages.split
    update.keep_gradients(False)
    assert not stages.split


def test_what_is_refused_is_raised_until_the_step_is_given_up() -> None:
    update = update_of(stages := Stages(passes=2))
    update.train("batch")
    update.refused = ValueError("on its way out")
    with pytest.raises(ValueError, match="on its way out"):
        update.train("batch")
    update.discard()
    assert (stages.forgotten, update.accumulating()) == (1, False)
    assert update.train("batch") == {"loss": 1.0}


def test_what_has_arrived_is_told_while_it_waits() -> None:
    update = update_of(stages := Stages())
    update.keep_gradients(True)
    assert update.gradients(1, 1.0) == "was not waiting for the gradients of an update"
    seen: list[Any] = []

    def asked(error: BaseException) -> bool:
        seen.append(update.gradients(3, 0.5))
        return False

    update.engine.broken_update = asked
    stages.breaks = True
    with pytest.raises(HorovodInternalError):
        update.train("batch")
    assert seen == [("number 3 of the step", (True, False), (False, True), (4, 7), 0.5)]
    assert update.gradients(1, 1.0) == "was not waiting for the gradients of an update"


def test_what_has_arrived_is_counted() -> None:
    assert update_of(None).drain() == (0, 0)
    update = update_of(stages := Stages())
    assert update.drain() == (0, 2)
    stages.local = object()  # type: ignore[assignment]
    assert update.drain() == (1, 2)
