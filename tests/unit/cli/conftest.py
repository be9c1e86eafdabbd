"""The command line as the tests call it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from horovod_ft.cli.main import main


@dataclass(frozen=True)
class Told:
    """What a command has printed, and its exit code."""

    code: int | str | None
    out: str
    err: str


Call = Callable[..., Told]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run ``horovod-ft`` with arguments, in a terminal that is wide enough for any row."""
    monkeypatch.setenv("COLUMNS", "200")
    for variable in ("HOROVOD_FT_EVENTS", "HOROVOD_FT_FAULTS", "HOROVOD_FT_LEDGER", "HOROVOD_FT_POLICY"):
        monkeypatch.delenv(variable, raising=False)

    def run(*arguments: str) -> Told:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        told = capsys.readouterr()
        return Told(ended.value.code, told.out, told.err)

    return run
