"""The one process-wide thing: what ``hvd.init()`` sets up and ``hvd.shutdown()`` takes down, as in Horovod itself.

The adapter of a framework hands in its name and its binding. No framework here, and nothing is started at import.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from importlib import metadata
from types import TracebackType
from typing import Any, Generic, TypeVar

from horovod_ft.errors import TRY_AGAIN, ConfigurationError, JobLostError, UsageError
from horovod_ft.events import EventBus, EventWriter
from horovod_ft.faults.inject import Injector
from horovod_ft.faults.plan import Fault, parse_plan
from horovod_ft.installation import GOES_ON, stops_after_failure
from horovod_ft.ledger import Ledger
from horovod_ft.membership.base import Binding, Group, Membership
from horovod_ft.membership.driver import DriverMembership
from horovod_ft.membership.static import StaticMembership
from horovod_ft.policy_names import parse_policy
from horovod_ft.settings import Settings

log = logging.getLogger("horovod_ft")

BindingT = TypeVar("BindingT", bound=Binding)


class Runtime(Generic[BindingT]):
    """Everything of this process that outlives a training function. Checks all settings before it starts anything.

    Args:
        adapter: name of the module that users import, such as ``horovod_ft.torch``.
        bind: makes the framework's binding; gets the bound of each blocking collective, in seconds.
    """

    def __init__(self, settings: Settings, adapter: str, bind: Callable[[float], BindingT]) -> None:
        worker = f"{settings.host}:{settings.start_rank}:{os.getpid()}"
        faults: tuple[Fault, ...] = parse_plan(settings.faults) if settings.faults else ()
        if settings.policy:
            parse_policy(settings.policy)
        self.settings = settings
        self.adapter = adapter
        self.bus = EventBus(worker)
        if settings.events is not None:
            self.bus.subscribe(EventWriter(settings.events, worker))
        self.ledger = Ledger(settings.ledger, worker)
        first = settings.attempt == 0  # each entry of a plan strikes once
        self.injector = Injector(faults if first else (), settings.start_rank, settings.host, self.bus)
        self.binding = bind(settings.timeout_s)
        self.membership: Membership = (
            DriverMembership(self.binding, settings.timeout_s) if settings.elastic else StaticMembership(self.binding)
        )

    def group(self) -> Group:
        return self.membership.group


class _Process:
    """Holder of this process's runtime: Horovod's own state is process-wide too, in C++."""

    runtime: Runtime[Any] | None = None
    ends_with_status = False


def init(
    adapter: str, bind: Callable[..., Binding], arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
) -> None:
    """``hvd.init()``: read and check the environment, then join the group. Blocks until all its members are there.

    Calling it again does nothing.

    Args:
        bind: makes the framework's binding of the bound of each blocking collective, in seconds, and of Horovod's
            arguments and options.
        arguments, options: what the user gave to ``hvd.init``: Horovod's.

    Raises:
        ConfigurationError: a setting is wrong, process sets were asked for in an elastic job, or another framework
            of this process has been initialized. Nothing was started.
    """
    options = options or {}
    if _Process.runtime is not None:
        _check_adapter(_Process.runtime, adapter)
        return
    settings = Settings.from_environment()
    if settings.elastic and any(given is not None and given != [] for given in (*arguments, *options.values())):
        raise ConfigurationError(
            "hvd.init() with a communicator or process sets in an elastic job: Horovod 0.28 cannot form them anew "
            "after a failure; call hvd.init() without arguments"
        )
    runtime = Runtime(settings, adapter, lambda timeout_s: bind(timeout_s, *arguments, **options))
    _end_with_status()
    group = runtime.membership.start()
    runtime.bus.position.rank, runtime.bus.position.size = group.rank, group.size
    runtime.bus.emit("init")
    if settings.elastic and group.rank == 0 and not stops_after_failure(metadata.version("horovod")):
        log.warning("horovod_ft: %s", GOES_ON)
    _Process.runtime = runtime


def _check_adapter(runtime: Runtime[Any], adapter: str) -> None:
    if runtime.adapter != adapter:
        raise ConfigurationError(
            f"{adapter}.init() in a process in which {runtime.adapter} has been initialized: Horovod keeps a group for "
            "each framework, and only one of them can be formed anew after a failure. Train with one framework in a "
            "process"
        )


def _end_with_status() -> None:
    """An error that asks for another attempt at the job ends this process with the status that says so."""
    if _Process.ends_with_status:
        return
    _Process.ends_with_status = True
    told = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        told(kind, error, trace)
        if isinstance(error, JobLostError):
            raise SystemExit(TRY_AGAIN)

    sys.excepthook = hook


def shutdown(adapter: str, stop: Callable[[], None]) -> None:
    """``hvd.shutdown()``: leave the group. Calling it again does nothing.

    Args:
        stop: Horovod's own, for a group that ``init`` has not formed.
    """
    runtime = _Process.runtime
    if runtime is not None and runtime.adapter == adapter:
        _Process.runtime = None
        runtime.membership.stop()
    else:
        stop()


def current(adapter: str) -> Runtime[Any]:
    """This process's runtime.

    Raises:
        UsageError: ``hvd.init()`` of this adapter has not been called.
    """
    runtime = _Process.runtime
    if runtime is None or runtime.adapter != adapter:
        raise UsageError(f"horovod_ft is not initialized: call hvd.init() first (import {adapter} as hvd)")
    return runtime
