"""Horovod's elastic driver, which starts workers again on hosts that come back. It changes nothing else of it.

As released the driver takes every worker of the last group for a running one. A host that failed and came back while
the driver was waiting for ``--min-np`` slots got no worker, and the job hung: ``_update_host_assignments`` in
``horovod/runner/elastic/driver.py``. The rules here:

* A host fails with a worker of it that ends with a status other than 0. Its other workers are ended, and what they end
  with counts for nothing.
* It comes back when its cooldown is over (``--blacklist-cooldown-range``; without it never) and discovery still lists
  it. Then all its workers are started again, once the old ones have ended, and they get the last ranks.
* A worker that ends while the driver waits for slots fails its host in that moment, not in the group to come.
* No group is formed of hosts that have come back alone: nobody there would have the state of the training. A job that
  nobody is left of ends at once, and has failed with what ended its workers: Horovod waits for more hosts, and takes a
  job without results for one that has succeeded.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from horovod.runner.elastic.driver import ElasticDriver

#: Host name and local rank.
Slot: TypeAlias = tuple[str, int]

#: ``safe_shell_exec.py`` gives a worker 5 s after SIGTERM, and its shell as long again.
ENDING_S = 15.0
NO_SURVIVOR = "No hosts from previous set remaining, unable to broadcast state."


@dataclass(eq=False)
class Worker:
    """A worker that has been started.

    Attributes:
        slot: as Horovod's ``SlotInfo`` has it.
        host_failed: set when its host fails, for the processes that run there.
        ended: set when its process has ended.
        status: with which it has.
        moment: when it has; wall seconds since the epoch.
        reported: its end counts in the group that it was in.
    """

    slot: Any
    host_failed: threading.Event
    ended: threading.Event = field(default_factory=threading.Event)
    status: int | None = None
    moment: float = 0.0
    reported: bool = False

    def failed(self) -> bool:
        """Whether it has ended, and not well."""
        return self.ended.is_set() and self.status != 0

    def lost(self) -> bool:
        """Whether it has failed, and nobody has taken that into account."""
        return self.failed() and not self.reported and not self.host_failed.is_set()


class Driver(ElasticDriver):  # type: ignore[misc]
    """See the module. Arguments are those of ``ElasticDriver``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._workers: dict[Slot, Worker] = {}
        self._deciding = threading.Lock()
        self._waiting = False
        super().__init__(*args, **kwargs)

    def listeners(self) -> list[Any]:
        """A notification client for each running worker that has registered."""
        return [client for slot, client in list(self._worker_clients.items()) if self._running(slot)]

    def _running(self, slot: Slot) -> bool:
        worker = self._workers.get(slot)
        return worker is not None and not worker.ended.is_set()

    def start(self, num_proc: int, create_worker_fn: Callable[..., tuple[int, float]]) -> None:
        def create(slot_info: Any, events: Any) -> tuple[int, float]:
            worker = self._workers[_slot(slot_info)]
            try:
                worker.status, worker.moment = create_worker_fn(slot_info, events)
            finally:
                self._ended(worker)
            return worker.status, worker.moment

        super().start(num_proc, create)

    def _start_worker_process(self, slot_info: Any) -> None:
        self._worker_clients.pop(_slot(slot_info), None)  # of the worker before it
        self._workers[_slot(slot_info)] = Worker(slot_info, self._host_manager.get_host_event(slot_info.hostname))
        super()._start_worker_process(slot_info)

    def _handle_worker_exit(self, slot_info: Any, exit_code: int, timestamp: float) -> None:
        if not self.finished():
            self._worker_registry._action_event.wait()  # until the group that is being formed has its hosts
        with self._deciding:
            worker = self._workers[_slot(slot_info)]
            if worker.slot is not slot_info or worker.host_failed.is_set():
                logging.debug("ignoring exit of %s[%s]: its host has failed", *_slot(slot_info))
                return
            worker.reported = True
        super()._handle_worker_exit(slot_info, exit_code, timestamp)

    def _ended(self, worker: Worker) -> None:
        with self._deciding:
            worker.ended.set()
            in_vain = self._waiting and self._nobody_left()
        if in_vain:
            self._shutdown.set()
            with self._wait_hosts_cond:
                self._wait_hosts_cond.notify_all()

    def wait_for_available_slots(self, min_num_proc: int, min_hosts: int = 1) -> Any:
        """See ``ElasticDriver``.

        Raises:
            RuntimeError: also when nobody is left of the last group.
        """
        while True:
            with self._deciding:
                self._raise_if_nobody_left()
                self._waiting = True
            try:
                current_hosts = super().wait_for_available_slots(min_num_proc, min_hosts)
            except RuntimeError:  # so ``_ended`` ends the wait
                with self._deciding:
                    self._raise_if_nobody_left()
                raise
            finally:
                self._waiting = False
            with self._deciding:
                self._raise_if_nobody_left()
            if not self._fail_hosts_of_lost():
                return current_hosts

    def _nobody_left(self) -> bool:
        """Whether there was a group, and each worker of it has failed or is being ended with its host."""
        present = self._present()
        return bool(present) and all(worker.failed() or worker.host_failed.is_set() for worker in present)

    def _raise_if_nobody_left(self) -> None:
        if not self._nobody_left():
            return
        for worker in self._present():
            if worker.failed():
                self._results.add_result("{}[{}]".format(*_slot(worker.slot)), (worker.status, worker.moment))
        raise RuntimeError(NO_SURVIVOR) from None

    def _fail_hosts_of_lost(self) -> bool:
        """Whether there were any."""
        with self._deciding:
            hosts = {worker.slot.hostname for worker in self._present() if worker.lost()}
            for host in hosts:
                self._host_manager.blacklist(host)
        return bool(hosts)

    def _update_host_assignments(self, current_hosts: Any) -> list[Any]:
        present = self._present()
        if present and not any(self._survives(worker, current_hosts) for worker in present):
            raise RuntimeError(NO_SURVIVOR)
        failed = {_slot(worker.slot) for worker in present if worker.host_failed.is_set()}
        pending = super()._update_host_assignments(current_hosts)
        starting = failed.union(_slot(slot) for slot in pending)
        slots = [slot for slots in self._host_assignments.values() for slot in slots if _slot(slot) in starting]
        self._await_ends(slots)
        return slots

    def _present(self) -> list[Worker]:
        """The workers of the last group."""
        slots = (_slot(slot) for slots in self._host_assignments.values() for slot in slots)
        return [self._workers[slot] for slot in slots if slot in self._workers]

    def _survives(self, worker: Worker, current_hosts: Any) -> bool:
        return worker.slot.hostname in current_hosts.available_hosts and not worker.host_failed.is_set()

    def _await_ends(self, slots: Iterable[Any]) -> None:
        """Blocks until no worker is left in the slots that get new ones, for at most ENDING_S."""
        deadline = time.monotonic() + ENDING_S
        before: Sequence[Worker] = [self._workers[_slot(slot)] for slot in slots if _slot(slot) in self._workers]
        for worker in before:
            if not worker.ended.wait(max(0.0, deadline - time.monotonic())):
                logging.warning("the worker before the new one of %s[%s] has not ended", *_slot(worker.slot))


def _slot(slot_info: Any) -> Slot:
    return slot_info.hostname, slot_info.local_rank
