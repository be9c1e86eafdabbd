"""A group that never changes: a single process, or a launcher that cannot replace or drop workers."""

from __future__ import annotations

from dataclasses import replace

from horovod_ft.errors import RecoveryError
from horovod_ft.membership.base import Binding, Collectives, Group


class StaticMembership:
    """Training works as with Horovod itself, and a failure ends the job with an error that says how to survive one."""

    def __init__(self, binding: Binding) -> None:
        self.failure_types = binding.failure_types
        self._binding = binding
        self._group = Group(0, 1)

    @property
    def group(self) -> Group:
        return self._group

    @property
    def comm(self) -> Collectives:
        return self._binding

    def start(self) -> Group:
        self._binding.init()
        self._group = Group(self._binding.rank(), self._binding.size())
        return self._group

    def watch(self) -> None:
        """Nothing to listen to."""

    def changed(self) -> bool:
        return False

    def preempted(self) -> bool:
        return False

    def abort(self) -> int:
        return 0

    def reform(self) -> Group:
        raise RecoveryError(
            "a worker failed, and this job cannot form a new group: it was not started in elastic mode. Start it with "
            "horovodrun --min-np N --host-discovery-script SCRIPT to survive failures"
        )

    def adopt_generation(self, generation: int) -> None:
        self._group = replace(self._group, generation=generation)

    def stop(self) -> None:
        self._binding.shutdown()
