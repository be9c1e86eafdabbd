"""``hvd.init`` and ``hvd.shutdown`` of ``horovod_ft.keras``; what they do is in ``tests/unit/test_runtime.py``."""

from __future__ import annotations

import horovod.tensorflow
import pytest

import horovod_ft.keras as hvd
from horovod_ft import runtime
from horovod_ft.errors import ConfigurationError, UsageError
from horovod_ft.keras.binding import TensorFlowBinding
from horovod_ft.keras.runtime import current


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What Horovod's own init and shutdown are called for; they do nothing."""
    called: list[str] = []
    monkeypatch.setattr(horovod.tensorflow, "init", lambda *_, **__: called.append("init"))
    monkeypatch.setattr(horovod.tensorflow, "shutdown", lambda: called.append("shutdown"))
    monkeypatch.setattr(runtime._Process, "runtime", None)
    return called


def test_init_starts_horovod_once_and_shutdown_stops_it(calls: list[str]) -> None:
    hvd.init()
    hvd.init()
    assert isinstance(current().binding, TensorFlowBinding)
    hvd.shutdown()
    assert calls == ["init", "shutdown"]


def test_shutdown_without_init_is_passed_on(calls: list[str]) -> None:
    hvd.shutdown()
    assert calls == ["shutdown"]


def test_before_init_there_is_no_runtime() -> None:
    with pytest.raises(UsageError, match=r"call hvd\.init\(\) first \(import horovod_ft\.keras as hvd\)"):
        current()


def test_pytorch_and_keras_in_one_process_are_refused(calls: list[str]) -> None:
    torch = pytest.importorskip("horovod_ft.torch")
    hvd.init()
    with pytest.raises(ConfigurationError, match=r"torch\.init\(\) in a process in which horovod_ft\.keras"):
        torch.init()
    assert calls == ["init"]
