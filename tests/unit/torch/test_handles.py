"""Waiting for handles: no core is taken, and no wait is without a bound if it is given one."""

from __future__ import annotations

import time

import pytest
import torch

import horovod_ft.torch as hvd
from horovod_ft.torch import handles


def test_a_handle_that_is_done_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("slept"))
    handle = hvd.allreduce_async(torch.ones(3), name="handles.done")
    result = hvd.synchronize(handle)
    assert handles.wait(handle)
    assert result.tolist() == [1, 1, 1]


def test_a_wait_ends_when_the_handle_is_done() -> None:
    handle = hvd.allreduce_async(torch.ones(1000), name="handles.wait")
    assert handles.wait(handle)
    assert hvd.poll(handle)
    hvd.synchronize(handle)


def test_an_unknown_handle_is_done() -> None:
    assert handles.done(123456)


def test_a_wait_that_reaches_its_bound_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    monkeypatch.setattr(handles, "done", looks.append)
    assert not handles.wait(7, deadline=0.0)
    assert set(looks) == {7}


def test_a_wait_ends_when_horovod_has_stopped_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handles, "done", lambda _: False)
    monkeypatch.setattr(handles, "ASK_S", 0.0)
    with pytest.raises(hvd.HorovodInternalError, match="Horovod has stopped"):
        handles.wait(7, stopped=lambda: True)


def test_an_answer_that_came_before_the_stop_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = False

    def stopped() -> bool:
        nonlocal answered
        answered = True
        return True

    monkeypatch.setattr(handles, "done", lambda _: answered)
    monkeypatch.setattr(handles, "ASK_S", 0.0)
    assert handles.wait(7, stopped=stopped)
