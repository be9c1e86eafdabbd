"""Fault plans: what shall go wrong, on which worker, at which moment. A list of one-shot entries in TOML.

    [[fault]]
    worker = 2             # start rank of the worker; or: host = "node7"
    step = 11              # the 11th step of the job, counted from 1
    phase = "allreduce"    # see PHASES
    after = 3              # allreduce only: when 3 gradients have been reduced
    kind = "kill"          # see KINDS

Nothing is injected here: see ``inject.py``.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Literal, get_args

import msgspec

from horovod_ft.errors import FaultPlanError

Phase = Literal[
    "data", "forward", "backward", "allreduce", "optimizer", "commit", "reform", "sync", "agreement", "transfer",
    "completion", "restore", "save_copy", "save_write", "save_sync", "save_manifest", "save_done",
]
Kind = Literal["kill", "exception", "stop", "slow", "lose", "bitflip", "nan"]
PHASES: tuple[str, ...] = get_args(Phase)
KINDS: tuple[str, ...] = get_args(Kind)
#: All but the failure that nobody else sees: what happens to the process, or in it.
STRIKES = tuple(kind for kind in KINDS if kind != "lose")
#: Phases of a recovery. Their ``step`` is the first step at which they may fire: which step a recovery goes on from
#: depends on the failure. ``sync`` stands for ``agreement``, under Horovod's name;
#: ``completion`` is that of an update's gradients, in lossy forward recovery; ``restore`` comes when half of a
#: checkpoint's shards are read, and has its step.
RECOVERY_PHASES = ("reform", "sync", "agreement", "transfer", "completion", "restore")
#: Phases of saving a checkpoint. Their ``step`` is the one that it holds. ``save_copy`` is on the training thread,
#: before anything is copied; all others are beside it: ``save_write`` with half of this worker's shard written,
#: ``save_sync`` with all of it written and nothing brought to the disk; ``save_manifest`` and ``save_done`` before and
#: after the manifest is put in place, on the worker that does that, which is rank 0.
SAVE_PHASES = ("save_copy", "save_write", "save_sync", "save_manifest", "save_done")


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of a plan.

    Attributes:
        phase: when in the step.
        kind: ``kill`` sends SIGKILL to the worker itself, ``stop`` sends SIGSTOP (and SIGCONT after ``seconds`` if
            given), ``exception`` raises FaultInjected, ``slow`` sleeps for ``seconds``. ``lose``, in ``allreduce``
            only, is a failure that this worker alone sees: its reductions after the first ``after`` of the step count
            as failed, whatever became of them elsewhere. ``bitflip`` flips a bit of a parameter of this worker alone,
            ``nan`` makes a number of it NaN.
        worker: start rank. Exactly one of worker and host is given.
        host: every worker of that host.
        step: counted from 1.
        after: gradients reduced before the fault; ``allreduce`` only.
        seconds: for ``slow`` and ``stop``.
    """

    phase: Phase
    kind: Kind = "kill"
    worker: int | None = None
    host: str | None = None
    step: int = 1
    after: int = 0
    seconds: float | None = None

    def hits(self, start_rank: int, host: str) -> bool:
        """Whether it is meant for this worker."""
        return self.worker == start_rank if self.worker is not None else self.host == host

    def __str__(self) -> str:
        who = f"worker {self.worker}" if self.worker is not None else f"host {self.host}"
        after = f" after {self.after} gradients" if self.phase == "allreduce" else ""
        seconds = f" for {self.seconds:g} s" if self.seconds is not None else ""
        return f"{self.kind} {who} at step {self.step} in {self.phase}{after}{seconds}"


class _Plan(msgspec.Struct, forbid_unknown_fields=True):
    fault: list[Fault] = []


def parse_plan(source: str) -> tuple[Fault, ...]:
    """Read a plan from the path of a TOML file, or from TOML text itself (anything that holds ``=``).

    Raises:
        FaultPlanError: the file cannot be read, the text is no TOML, or an entry is wrong; names the place.
    """
    inline = "=" in source
    where = "the fault plan in HOROVOD_FT_FAULTS" if inline else f"the fault plan {source}"
    text = source if inline else _read(Path(source).expanduser())
    try:
        faults = tuple(msgspec.toml.decode(text, type=_Plan).fault)
    except (msgspec.DecodeError, ValueError) as error:
        raise FaultPlanError(f"{where} is wrong: {error}") from error
    if not faults:
        raise FaultPlanError(f"{where} has no [[fault]] entry")
    for index, fault in enumerate(faults):
        problem = _problem(fault)
        if problem:
            raise FaultPlanError(f"{where} is wrong: entry {index + 1} ({fault}): {problem}")
    repeated = [str(fault) for fault, count in Counter(faults).items() if count > 1]
    if repeated:
        raise FaultPlanError(f"{where} is wrong: more than one entry says: {'; '.join(repeated)}")
    return faults


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise FaultPlanError(
            f"cannot read the fault plan {path}: {error}. HOROVOD_FT_FAULTS is the path of a TOML file or TOML itself"
        ) from error


def _problem(fault: Fault) -> str | None:
    """What makes an entry impossible, if anything."""
    if (fault.worker is None) == (fault.host is None):
        return "give worker (a start rank) or host, one of them"
    if fault.worker is not None and fault.worker < 0:
        return "worker is a start rank, 0 or more"
    if fault.step < 1:
        return "steps are counted from 1"
    if fault.after < 0 or (fault.after and fault.phase != "allreduce"):
        return "after counts reduced gradients, 0 or more, in phase allreduce only"
    if fault.kind == "lose" and fault.phase != "allreduce":
        return "lose is for phase allreduce only"
    if fault.kind == "slow" and fault.seconds is None:
        return "slow needs seconds"
    if fault.seconds is not None and (fault.kind not in ("slow", "stop") or fault.seconds <= 0):
        return "seconds is a positive number, for slow and stop only"
    return None
