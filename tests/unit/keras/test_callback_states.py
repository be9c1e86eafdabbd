"""What a newcomer takes over from Keras's callbacks on other workers."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from horovod_ft.keras.callback_states import CallbackStates, is_plain


def stopping(**attributes: Any) -> Any:
    made = keras.callbacks.EarlyStopping("loss", patience=2, min_delta=0.5)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def test_a_newcomer_waits_as_the_others_do() -> None:
    mine = stopping()
    CallbackStates([mine]).adopt(CallbackStates([stopping(wait=1, best=0.25)]).export())
    assert (mine.wait, mine.best) == (1, 0.25)


def test_what_the_script_has_given_stays() -> None:
    """Keras has turned the sign of ``min_delta`` on the others, and will here."""
    mine = stopping()
    CallbackStates([mine]).adopt(CallbackStates([stopping(min_delta=-0.5, patience=9)]).export())
    assert (mine.min_delta, mine.patience) == (0.5, 2)


def test_the_history_is_that_of_the_others() -> None:
    mine, other = keras.callbacks.History(), keras.callbacks.History()
    other.history = {"loss": [1.0, 0.5]}
    CallbackStates([mine]).adopt(CallbackStates([other]).export())
    other.history["loss"].append(0.25)
    assert mine.history == {"loss": [1.0, 0.5]}


def test_other_callbacks_beside_them_do_not_matter() -> None:
    mine, other = stopping(), keras.callbacks.History()
    CallbackStates([other, mine]).adopt(CallbackStates([stopping(wait=1)]).export())
    assert mine.wait == 1


def test_once_it_trains_nothing_is_taken_over() -> None:
    mine = stopping(wait=3)
    states = CallbackStates([mine])
    states.open = False
    states.adopt(CallbackStates([stopping(wait=1)]).export())
    assert mine.wait == 3


def test_between_the_borders_of_epochs_nothing_is_looked_up() -> None:
    mine = stopping(wait=1)
    states = CallbackStates([mine])
    first = states.export()
    mine.wait = 2
    assert states.export() is first
    states.changed()
    assert states.export()["EarlyStopping.0"]["wait"] == 2


def test_screens_files_and_callbacks_of_the_users_are_left_alone() -> None:
    class Mine(keras.callbacks.Callback):  # type: ignore[misc]
        rank = 3

    assert CallbackStates([keras.callbacks.ProgbarLogger(), Mine()]).export() == {}


def test_a_callback_made_from_one_of_keras_is_looked_after() -> None:
    class Mine(keras.callbacks.EarlyStopping):  # type: ignore[misc]
        """With a change."""

    assert len(CallbackStates([Mine()]).export()) == 1


def test_plain_values_are_numbers_and_texts_and_what_is_made_of_them() -> None:
    assert is_plain({"a": [1, 2.0, "x", None, np.float32(1)]})
    assert not is_plain([print])
