"""The one process-wide thing: what ``hvd.init()`` sets up and ``hvd.shutdown()`` takes down, as in Horovod itself."""

from __future__ import annotations

import logging
import os
import sys
from importlib import metadata
from types import TracebackType
from typing import Any

import horovod.torch as hvd

from horovod_ft.errors import TRY_AGAIN, ConfigurationError, JobLostError, UsageError
from horovod_ft.events import EventBus, EventWriter
from horovod_ft.faults.inject import Injector
from horovod_ft.faults.plan import Fault, parse_plan
from horovod_ft.installation import GOES_ON, stops_after_failure
from horovod_ft.ledger import Ledger
from horovod_ft.membership.base import Group, Membership
from horovod_ft.membership.driver import DriverMembership
from horovod_ft.membership.static import StaticMembership
from horovod_ft.policy_names import parse_policy
from horovod_ft.settings import Settings
from horovod_ft.torch.binding import TorchBinding

log = logging.getLogger("horovod_ft")


class Runtime:
    """Everything of this process that outlives a training function. Checks all settings before it starts anything."""

    def __init__(self, settings: Settings, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        worker = f"{settings.host}:{settings.start_rank}:{os.getpid()}"
        faults: tuple[Fault, ...] = parse_plan(settings.faults) if settings.faults else ()
        if settings.policy:
            parse_policy(settings.policy)
        self.settings = settings
        self.bus = EventBus(worker)
        if settings.events is not None:
            self.bus.subscribe(EventWriter(settings.events, worker))
        self.ledger = Ledger(settings.ledger, worker)
        first = settings.attempt == 0  # each entry of a plan strikes once
        self.injector = Injector(faults if first else (), settings.start_rank, settings.host, self.bus)
        self.binding = TorchBinding(settings.timeout_s, *arguments, **options)
        self.membership: Membership = (
            DriverMembership(self.binding, settings.timeout_s) if settings.elastic else StaticMembership(self.binding)
        )

    def group(self) -> Group:
        return self.membership.group


class _Process:
    """Holder of this process's runtime: Horovod's own state is process-wide too, in C++."""

    runtime: Runtime | None = None
    ends_with_status = False


def init(*args: Any, **kwargs: Any) -> None:
    """``hvd.init()``: read and check the environment, then join the group. Blocks until all its members are there.

    Calling it again does nothing. Arguments are Horovod's.

    Raises:
        ConfigurationError: a setting is wrong, or process sets were asked for in an elastic job. Nothing was started.
    """
    if _Process.runtime is not None:
        return
    settings = Settings.from_environment()
    if settings.elastic and any(given is not None and given != [] for given in (*args, *kwargs.values())):
        raise ConfigurationError(
            "hvd.init() with a communicator or process sets in an elastic job: Horovod 0.28 cannot form them anew "
            "after a failure; call hvd.init() without arguments"
        )
    runtime = Runtime(settings, args, kwargs)
    _end_with_status()
    group = runtime.membership.start()
    runtime.bus.position.rank, runtime.bus.position.size = group.rank, group.size
    runtime.bus.emit("init")
    if settings.elastic and group.rank == 0 and not stops_after_failure(metadata.version("horovod")):
        log.warning("horovod_ft: %s", GOES_ON)
    _Process.runtime = runtime


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


def shutdown() -> None:
    """``hvd.shutdown()``: leave the group. Calling it again does nothing."""
    runtime, _Process.runtime = _Process.runtime, None
    if runtime is not None:
        runtime.membership.stop()
    else:
        hvd.shutdown()


def current() -> Runtime:
    """This process's runtime.

    Raises:
        UsageError: ``hvd.init()`` has not been called.
    """
    if _Process.runtime is None:
        raise UsageError("horovod_ft is not initialized: call hvd.init() first (import horovod_ft.torch as hvd)")
    return _Process.runtime
