"""Form groups through the driver of ``horovodrun`` in elastic mode: host by host, and it works without anything else.

The driver learns of a death from the exit of the process, waits until every survivor has asked for its new rank (that
is what ``hvd.init()`` does), and answers all of them at once. What this file adds is that nobody waits for a timeout on
the way there, and that nobody waits in silence.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from horovod.common.elastic import notification_manager

from horovod_ft.membership.base import Binding, Collectives, Group
from horovod_ft.membership.notice import PREEMPTED
from horovod_ft.membership.sockets import SocketCutter
from horovod_ft.membership.waiting import explained_wait

log = logging.getLogger("horovod_ft")

WAITING_FOR_DRIVER = (
    "for horovodrun to form a new group. It does so once every worker has reported and at least --min-np slots are "
    "free on hosts without a failure; it gives up after --elastic-timeout. A hung worker also holds it up"
)


class HostChanges:
    """The launcher's announcements, kept with the time of their arrival, across all groups of this process.

    Horovod keeps them in the state object and drops them with every reset, so that some are lost; it also compares
    them by whole seconds. Here one is dropped only if it arrived before the present group began to form, because the
    driver had then taken it into account.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrived: list[float] = []
        self._preempted = False

    def on_hosts_updated(self, timestamp: int, result: int) -> None:
        """Called by Horovod's notification thread, for a change of hosts and for a notice."""
        if result == PREEMPTED:
            self._preempted = True
            return
        with self._lock:
            self._arrived.append(time.monotonic())

    def pending(self) -> bool:
        return bool(self._arrived)

    def preempted(self) -> bool:
        """Whether a notice has come; it stays true."""
        return self._preempted

    def forget_before(self, moment: float) -> None:
        with self._lock:
            self._arrived = [arrived for arrived in self._arrived if arrived >= moment]


class DriverMembership:
    """See the module. One process has at most one.

    Args:
        binding: the framework's Horovod.
        timeout_s: bound of the wait for a new group; it should not be less than ``--elastic-timeout``.
    """

    def __init__(self, binding: Binding, timeout_s: float) -> None:
        self.failure_types = binding.failure_types
        self._binding = binding
        self._timeout_s = timeout_s
        self._group = Group(0, 1)
        self._cutter = SocketCutter()
        self._changes = HostChanges()
        self._watching = False

    @property
    def group(self) -> Group:
        return self._group

    @property
    def comm(self) -> Collectives:
        return self._binding

    def start(self) -> Group:
        return self._form()

    def watch(self) -> None:
        if not self._watching:
            notification_manager.init()
            notification_manager.register_listener(self._changes)
            self._watching = True

    def changed(self) -> bool:
        return self._changes.pending()

    def preempted(self) -> bool:
        return self._changes.preempted()

    def abort(self) -> int:
        return self._cutter.cut()

    def reform(self) -> Group:
        self._binding.shutdown()
        began = time.monotonic()
        with explained_wait(WAITING_FOR_DRIVER, self._timeout_s):
            group = self._form()
        self._changes.forget_before(began)
        return group

    def adopt_generation(self, generation: int) -> None:
        self._group = replace(self._group, generation=generation)

    def stop(self) -> None:
        if self._watching:
            notification_manager.remove_listener(self._changes)
            self._watching = False
        self._binding.shutdown()

    def _form(self) -> Group:
        with self._recorded():
            self._binding.init()
        self._group = Group(self._binding.rank(), self._binding.size(), self._group.generation)
        return self._group

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        self._cutter.forming()
        yield
        self._cutter.formed()
