"""Checks of the HOROVOD_FT_* variables, with the same code that reads them when a job starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from horovod_ft.cli.check import Check, failed, ok
from horovod_ft.errors import ConfigurationError
from horovod_ft.faults.plan import parse_plan
from horovod_ft.policy_names import parse_policy
from horovod_ft.settings import PREFIX, Settings, writable_folder


def variable_checks(environ: Mapping[str, str] | None = None) -> Iterator[Check]:
    """One row for the variables as a whole, and one for each whose value can be wrong in its own way.

    Folders that are named but do not exist yet are made, as a job would.
    """
    name = f"{PREFIX}* variables"
    try:
        settings = Settings.from_environment(environ)
    except ConfigurationError as error:
        yield failed(name, str(error), "correct the variable, or unset it")
        return
    yield ok(name, f"understood; a wait inside a recovery ends after {settings.timeout_s:.0f} s")
    if settings.policy is not None:
        yield _tried("POLICY", partial(_policy, settings.policy))
    if settings.faults is not None:
        yield _tried("FAULTS", partial(_faults, settings.faults))
    for variable, folder in (("EVENTS", settings.events), ("LEDGER", settings.ledger)):
        if folder is not None:
            yield _tried(variable, partial(_folder, folder, PREFIX + variable))


def _tried(variable: str, look: Callable[[], str]) -> Check:
    name = PREFIX + variable
    try:
        return ok(name, look())
    except Exception as error:  # ours say all; the import of another package's policy can raise anything
        found = str(error) if isinstance(error, ConfigurationError) else repr(error)
        return failed(name, found, f"correct {name}, or unset it")


def _policy(text: str) -> str:
    return repr(parse_policy(text))


def _faults(source: str) -> str:
    faults = parse_plan(source)
    return f"{len(faults)} fault{'' if len(faults) == 1 else 's'}, the first: {faults[0]}"


def _folder(folder: Path, name: str) -> str:
    return f"{writable_folder(folder, name)} can be written"
