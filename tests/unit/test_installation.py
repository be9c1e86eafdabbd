"""What a user is told whose Horovod is missing or does not fit."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from horovod_ft.errors import InstallationError
from horovod_ft.installation import REMEDY, require_horovod


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the modules that count as installed; a test adds to it. ``broken_*`` cannot be imported."""
    names: set[str] = set()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None) if name in names else None)
    monkeypatch.setitem(sys.modules, "some_framework", ModuleType("some_framework"))
    return names


def test_a_missing_framework_is_named_with_the_command_that_installs_it(installed: set[str]) -> None:
    with pytest.raises(InstallationError, match=r"torch is not installed: pip install 'horovod_ft\[torch\]'") as raised:
        require_horovod("torch", "x")
    assert REMEDY in str(raised.value)


def test_a_missing_horovod_is_told_with_the_remedy(installed: set[str]) -> None:
    installed.add("torch")
    with pytest.raises(InstallationError, match=r"Horovod is not installed. Run scripts/install"):
        require_horovod("torch", "x")


def test_a_horovod_that_does_not_fit_is_told_with_the_cause(installed: set[str]) -> None:
    installed.update({"some_framework", "horovod"})
    said = r"not for some_framework as it is here \(.*\)\. Run scripts/install"
    with pytest.raises(InstallationError, match=said) as raised:
        require_horovod("some_framework", "mpi_lib")
    assert isinstance(raised.value.__cause__, ImportError)


def test_a_horovod_that_works_is_fine(installed: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    installed.update({"some_framework", "horovod"})
    for name in ("horovod", "horovod.some_framework", "horovod.some_framework.mpi_lib"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    require_horovod("some_framework", "mpi_lib")


def test_it_is_an_import_error_too() -> None:
    assert issubclass(InstallationError, ImportError)
