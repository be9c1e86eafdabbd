"""Is there a Horovod that works? Says exactly what to run if not. Imports Horovod only inside its functions."""

from __future__ import annotations

import importlib
import importlib.util

from horovod_ft.errors import InstallationError

HOROVOD = "0.28.1"
#: The first of ``scripts/build_horovod.py``'s recipes whose Horovod survives failures.
RECIPE = 6
REMEDY = (
    "Run scripts/install in a checkout of horovod_ft with this environment active: it builds Horovod 0.28.1 for the "
    "frameworks that are installed (no wheel on PyPI works with today's)"
)

#: What is wrong with Horovod as released, for the doctor and for a warning at the start of an elastic job.
GOES_ON = (
    "this Horovod goes on after a failed operation: in a failure a worker may abort, hang, wait for 30 s, or in rare "
    "cases take a control word for a part of a gradient. scripts/install builds one that stops"
)


def stops_after_failure(version: str) -> bool:
    """Whether Horovod of this version is one that ``scripts/install`` builds now; the version says which recipe."""
    base, _, recipe = version.partition("+ft")
    return base == HOROVOD and recipe.isdecimal() and int(recipe) >= RECIPE


def require_horovod(framework: str, extension: str) -> None:
    """Make sure that Horovod's extension for a framework can be loaded.

    Args:
        framework: ``torch`` or ``tensorflow``.
        extension: the compiled module inside ``horovod.<framework>``.

    Raises:
        InstallationError: it cannot; the message holds the command that mends it.
    """
    if importlib.util.find_spec(framework) is None:
        raise InstallationError(f"{framework} is not installed: pip install 'horovod_ft[{framework}]'. Then: {REMEDY}")
    require_launcher()
    try:
        importlib.import_module(framework)  # its libraries must be loaded before the extension
        importlib.import_module(f"horovod.{framework}.{extension}")
    except ImportError as error:
        raise InstallationError(
            f"Horovod is installed, but not for {framework} as it is here ({error}). {REMEDY}"
        ) from error


def require_launcher() -> None:
    """Make sure that Horovod's launcher is there, whatever Horovod was built for.

    Raises:
        InstallationError: it is not; the message holds the command that mends it.
    """
    if importlib.util.find_spec("horovod") is None:
        raise InstallationError(f"Horovod is not installed. {REMEDY}")
