"""Make the faults of a plan happen in this process, each once, at its moment. Every other moment costs one ``if``."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Container, Sequence

from horovod_ft.events import EventBus
from horovod_ft.faults.plan import KINDS, RECOVERY_PHASES, Fault, Phase


class FaultInjected(RuntimeError):  # noqa: N818  it is no error of anybody, it was asked for
    """What a fault of kind ``exception`` raises."""


class Injector:
    """The faults of a plan that are meant for this worker.

    Attributes:
        corrupt: does ``bitflip`` and ``nan`` to a parameter; set by the adapter that has the parameters.

    Args:
        faults: the whole plan.
        start_rank, host: who this worker is.
        bus: told before a fault happens.
        send: sends a signal to this process.
        sleep: for ``slow``.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        start_rank: int,
        host: str,
        bus: EventBus,
        send: Callable[[int], None] = lambda number: os.kill(os.getpid(), number),
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.corrupt: Callable[[str], None] = lambda kind: None
        self.waiting = [fault for fault in faults if fault.hits(start_rank, host)]
        self._bus = bus
        self._send = send
        self._sleep = sleep

    def pending(
        self, phase: Phase, step: int, *, kinds: Container[str] = KINDS, reduced: float = math.inf
    ) -> Fault | None:
        """The fault that is due now, if any, without making it happen.

        Args:
            kinds: others are passed over.
            reduced: so many gradients are; faults that come after more of them are not due.
        """
        if not self.waiting:
            return None
        due = (fault for fault in self.waiting if _due(fault, phase, step))
        return next((fault for fault in due if fault.kind in kinds and fault.after <= reduced), None)

    def at(self, phase: Phase, step: int) -> None:
        """This worker has come to a phase of a step (counted from 1; 0 before the job's first)."""
        fault = self.pending(phase, step)
        if fault is not None:
            self.fire(fault)

    def fire(self, fault: Fault) -> None:
        """Let a fault happen. It is on record before it does.

        Raises:
            FaultInjected: the fault is of kind ``exception``.
        """
        self.waiting.remove(fault)
        self._bus.emit("fault", fault=str(fault), phase=fault.phase, fault_kind=fault.kind)
        match fault.kind:
            case "kill":
                self._send(signal.SIGKILL)
            case "stop":
                if fault.seconds is not None:
                    wake = f"sleep {fault.seconds}; kill -CONT {os.getpid()}"
                    subprocess.Popen(["sh", "-c", wake], start_new_session=True)
                self._send(signal.SIGSTOP)
            case "slow":
                self._sleep(fault.seconds or 0.0)
            case "lose":
                pass  # done by whoever has the reductions
            case "bitflip" | "nan":
                self.corrupt(fault.kind)
            case "exception":
                raise FaultInjected(f"asked for by the fault plan: {fault}")


def _due(fault: Fault, phase: Phase, step: int) -> bool:
    wanted = "agreement" if fault.phase == "sync" else fault.phase
    if wanted != phase:
        return False
    return step >= fault.step if fault.phase in RECOVERY_PHASES else step == fault.step
