"""Horovod with one worker, in this process, for the whole folder; and stand-ins for the other workers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import horovod_ft.torch as hvd
from tests.unit.torch.tools import Peers


@pytest.fixture(scope="session", autouse=True)
def _horovod() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Peers:
    """A group of two workers of which the other one is made up."""
    return Peers(monkeypatch, size=2)
