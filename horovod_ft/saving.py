"""Durable checkpoints while training runs: when one is saved, what goes into it, and what became of earlier ones.

All workers save the same step. Rank 0 decides when that is; the others hear of it with the question of ``changes.py``,
so it costs no collective. A step pays for one copy of this worker's share of the state; writing is the business of
``checkpoint/saver.py``, in a thread of its own. Nothing is restored here.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from horovod_ft.agreement import Agreement
from horovod_ft.changes import Heard
from horovod_ft.checkpoint import values
from horovod_ft.checkpoint.options import Checkpoints
from horovod_ft.checkpoint.partition import plan
from horovod_ft.checkpoint.saver import Captured, SaveEnded, Saver
from horovod_ft.checkpoint.schedule import History, Schedule, parse_every
from horovod_ft.checkpoint.store import CheckpointStore
from horovod_ft.errors import TRY_AGAIN, CheckpointError, ConfigurationError
from horovod_ft.events import EventBus
from horovod_ft.faults.inject import Injector
from horovod_ft.healing import heal_if_due
from horovod_ft.membership.base import Membership
from horovod_ft.open_step import OpenStep
from horovod_ft.policies.checkpoint_restart import CheckpointRestart, as_often_as
from horovod_ft.trainee import Durable

log = logging.getLogger("horovod_ft")

#: Beside what the state calls its own, which has the names of attributes.
SCHEDULE = "schedule of saves"


class Saving:
    """One worker's part in it. Without a store it saves nothing, and still hears that training has to end.

    Args:
        timeout_s: bound of the waits for a save to end, when training ends.

    Attributes:
        store: where checkpoints are; None for nowhere.
    """

    def __init__(
        self,
        membership: Membership,
        bus: EventBus,
        injector: Injector,
        open_step: OpenStep,
        mono: Callable[[], float],
        timeout_s: float,
    ) -> None:
        self.store: CheckpointStore | None = None
        self._membership = membership
        self._bus = bus
        self._injector = injector
        self._trainee = open_step.trainee
        self._committer = open_step.committer
        self._mono = mono
        self._timeout_s = timeout_s
        self._options: Checkpoints | None = None
        self._saver: Saver | None = None
        self._before: Saver | None = None
        self._schedule = Schedule(step=0, now=mono())
        self._processes: tuple[int, ...] = ()
        self._saves = 0
        self._known: tuple[int, float] | None = None
        self._known_in = ""
        self._void_until = -math.inf
        self._first = False
        self._told_busy = False
        self._fatal: str | None = None
        self._lacking = False

    # --- the beginning -----------------------------------------------------------------------------------------------

    def start(self, options: Checkpoints | None, restart: CheckpointRestart | None) -> None:
        """A training function is about to run, and nothing of it has been looked at.

        Args:
            options: where to save; None for nowhere.
            restart: the part of the policy that goes back to checkpoints, if there is one.

        Raises:
            ConfigurationError: the two do not fit together, or the state is of a kind that cannot be saved.
            UnsupportedStateError: something in the state cannot be saved; names its path.
        """
        if options is None:
            if restart is not None:
                raise ConfigurationError(
                    f"{restart!r} needs a place for checkpoints: elastic.run(checkpoint=...) or HOROVOD_FT_CHECKPOINT"
                )
            self.store = self._saver = self._options = None
            return
        if restart is not None and _differ(options, restart):
            raise ConfigurationError(
                f"{options!r} and {restart!r} say differently when checkpoints are saved: leave one of them out"
            )
        store = options.store()
        self._durable().tensors()
        values.dump(self._durable().shared(), allow_pickle=options.allow_pickle)
        values.dump(self._durable().local(), allow_pickle=options.allow_pickle)
        self._options, self.store = options, store
        self._schedule = (restart or as_often_as(options)).schedule(self._committer.frontier.step, self._mono())
        self._saver = Saver(
            store, retention=options.retention(), at=self._injector.at, mono=self._mono, wait_s=self._timeout_s
        )
        if str(options.url) != self._known_in:
            self._known, self._known_in = None, str(options.url)
        self._first = True
        self._fatal, self._lacking, self._told_busy = None, False, False

    def _durable(self) -> Durable:
        durable = self._trainee.ft_durable()
        if durable is None:
            raise ConfigurationError("checkpoints are saved of a TorchState, and this state is of another class")
        return durable

    # --- what the engine tells ---------------------------------------------------------------------------------------

    def wishes(self, step: int) -> Heard:
        """What this worker has to say to the others about a step."""
        said = Heard.NOTHING
        if self._fatal is not None or self._membership.preempted():
            said |= Heard.END
        if self._saver is not None:
            if self._membership.group.rank == 0 and (self._first or self._schedule.due(step, self._mono())):
                said |= Heard.SAVE
            if self._busy:
                said |= Heard.BUSY
            if self._lacking:
                said |= Heard.FAILED
        return said

    def committed(self, heard: Heard) -> None:
        """A step was committed, and the workers had this to say about it.

        Raises:
            CheckpointError: a checkpoint could not be saved, and training is to end then; on all workers.
            SystemExit: the job is about to be ended from outside, and the last checkpoint is saved; on all workers.
        """
        if Heard.FAILED in heard and self._saver is not None:
            self._saver.broken()  # nobody need wait for that part
            self._lacking = False
        self._report()
        if Heard.END in heard:
            self._end()
        elif Heard.SAVE in heard and Heard.BUSY in heard:
            self._skip()
        elif Heard.SAVE in heard and self._saver is not None:
            self._save(self._saver)

    def settled(self, agreement: Agreement) -> None:
        """A new group is in order."""
        gone = set(self._processes) - set(agreement.processes)  # ``lost`` is since the last try, which may have broken
        self._processes, self._saves = agreement.processes, 0
        if self._saver is not None and gone:
            self._saver.broken()

    def failed(self) -> None:
        """A failure was met, whichever way it is recovered."""
        self._schedule.failed()

    def going_back(self) -> None:
        """All workers are about to go back: what is not durable by now never will be. Blocks for one small collective.

        Else a state that was given up would come back with the next failure.
        """
        if self._saver is None:
            return
        error: CheckpointError | None = None
        for saver in (self._before, self._saver):
            try:
                if saver is not None:
                    saver.drop(self._timeout_s / 2)
            except CheckpointError as caught:
                error = caught
        found = [one for one in self._membership.comm.allgather_object(error, "dropped") if one is not None]
        if found:
            raise found[0]

    def went_back(self, step: int) -> None:
        """Training goes on from a copy in memory."""
        now, newest = self._mono(), self.newest
        self._schedule.restored(step, now)
        if newest is not None and newest[0] > step:  # it was passed over
            self._known, self._void_until = None, now

    def restored(self, step: int, shared: Any) -> None:
        """Training goes on from a checkpoint."""
        now = self._mono()
        history = shared.get(SCHEDULE)
        if history is not None and self._known is None:  # of an earlier attempt, which has ended by a failure
            self._schedule.adopt(History(**history), now)
            self._schedule.failed()
        self._schedule.restored(step, now)
        self._known = step, now
        self._first = False

    @property
    def newest(self) -> tuple[int, float] | None:
        """Step of the newest checkpoint that this worker knows of, and the seconds since; None if it knows of none.

        Those that were saved before training went back count no more: they may have been passed over as damaged.
        """
        found = self._known
        saved = None if self._saver is None else self._saver.newest
        if saved is not None and saved[1] >= (self._void_until if found is None else found[1]):
            found = saved
        return None if found is None else (found[0], self._mono() - found[1])

    @property
    def _busy(self) -> bool:
        """What was captured last is still being written, maybe by the saver of a run that has ended meanwhile."""
        return any(saver.busy for saver in (self._before, self._saver) if saver is not None)

    # --- saving ------------------------------------------------------------------------------------------------------

    def _save(self, saver: Saver) -> None:
        """Capture the present state, and let it be written."""
        began = self._mono()
        step = self._committer.frontier.step
        self._injector.at("save_copy", step)
        try:
            saver.submit(self._captured(step))
        except (CheckpointError, MemoryError, RuntimeError) as error:  # torch has no class for too little memory
            self._lacking = True
            self._failed(step, str(error))
        held_up_s = self._mono() - began
        self._schedule.saved(step, self._mono(), held_up_s)
        self._first = self._told_busy = False
        self._bus.emit("saving", held_up_s=held_up_s)

    def _captured(self, step: int) -> Captured:
        group, durable = self._membership.group, self._durable()
        specs = durable.tensors()
        parts, ready = durable.capture(plan(specs, group.size)[group.rank])
        self._saves += 1  # in this group: equal on all workers
        named = repr((self._processes, group.generation, step, self._saves)).encode()
        return Captured(
            step=step, attempt=hashlib.sha256(named).hexdigest()[:16], generation=group.generation, rank=group.rank,
            size=group.size, specs=specs, parts=parts, ready=ready, local=durable.local(),
            shared=self._shared(durable) if group.rank == 0 else None, versions=durable.versions,
        )  # fmt: skip

    def _shared(self, durable: Durable) -> Any:
        return {**durable.shared(), SCHEDULE: asdict(self._schedule.export(self._mono()))}

    def _skip(self) -> None:
        if self._saver is not None and not self._told_busy:
            self._told_busy = True
            self._bus.emit("save_late")
            if self._membership.group.rank == 0:
                log.warning("horovod_ft: a checkpoint is due, and the one before is still being written: it waits")

    def _report(self) -> None:
        """Put on record what has become of earlier saves."""
        for ended in [] if self._saver is None else self._saver.endings():
            self._bus.emit("saved", **_record(ended))
            if ended.error is None:
                continue
            if ended.committed:
                self._bus.emit("warning", text=f"after the checkpoint of step {ended.step} was saved: {ended.error}")
                log.warning("horovod_ft: after the checkpoint of step %d was saved: %s", ended.step, ended.error)
                continue
            self._lacking |= not ended.written
            if ended.written and self._membership.group.rank:  # worker 0 says what is wrong
                log.info("horovod_ft: the checkpoint of step %d was not saved: %s", ended.step, ended.error)
            else:
                self._failed(ended.step, str(ended.error))

    def _failed(self, step: int, why: str) -> None:
        self._bus.emit("warning", text=f"the checkpoint of step {step} was not saved: {why}")
        log.warning("horovod_ft: the checkpoint of step %d was not saved: %s", step, why)
        if self._options is not None and self._options.end_on_error:
            self._fatal = why

    # --- the end -----------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        self._raise_fatal()
        self.last()
        self._bus.emit("preempted")
        log.warning("horovod_ft: the job is about to be ended from outside, and leaves after step %d",
                    self._committer.frontier.step)  # fmt: skip
        raise SystemExit(TRY_AGAIN)

    def _raise_fatal(self) -> None:
        """On all workers, if one of them could not save and training is to end then."""
        fatal: list[str | None] = self._membership.comm.allgather_object(self._fatal, "ending")
        told = [f"worker {rank}: {why}" for rank, why in enumerate(fatal) if why is not None]
        if told:
            raise CheckpointError(f"training ends because a checkpoint could not be saved: {'; '.join(told)}")

    def last(self) -> None:
        """Save the present state, and wait until that has ended. All workers call it. Does nothing without a store.

        Raises:
            CheckpointError: it could not be saved, and training is to end then; on all workers.
            DivergenceError: replicas differ, and no majority has the same; on all workers.
        """
        if self._saver is None:
            return
        ended, step = self._drain(self._saver), self._committer.frontier.step
        if self._agreed_newest(self._saver) != step:
            if ended:
                heal_if_due(self._membership, self._trainee, self._committer, self._bus, also=True)
                self._save(self._saver)
                self._drain(self._saver)
            else:
                self._failed(step, "the save before it has not ended, and its memory cannot be used again")
        self._report()
        if self._options is not None and self._options.end_on_error:
            self._raise_fatal()

    def _drain(self, saver: Saver) -> bool:
        """Wait until the save that is under way has ended: first for all parts, then for the manifest.

        Returns:
            whether nothing is being written any more, on any worker.
        """
        comm, first = self._membership.comm, self._membership.group.rank == 0
        if not first:
            self._wait(saver)
        self._report()
        lacking = any(comm.allgather_object(self._lacking, "written"))
        self._lacking = False
        if lacking:
            saver.broken()
        if first:
            self._wait(saver)
        return not any(comm.allgather_object(self._busy, "durable"))

    def _wait(self, saver: Saver) -> None:
        """For half of the time that the others, who are through with theirs, wait in a collective."""
        until = self._mono() + self._timeout_s / 2
        for one in (self._before, saver):
            if one is not None:
                one.wait(max(0.0, until - self._mono()))

    def _agreed_newest(self, saver: Saver) -> int:
        newest = self.newest
        step: int = self._membership.comm.broadcast_object(-1 if newest is None else newest[0], 0, "newest")
        return step

    def close(self) -> None:
        """Training has ended, one way or the other: nothing more is saved."""
        if self._saver is not None:
            newest = self.newest
            self._known = None if newest is None else (newest[0], self._mono() - newest[1])
            self._saver.close()
            if self._before is None or not self._before.busy:  # else this run has saved nothing
                self._before = self._saver
        self.store = self._saver = self._options = None


def _differ(options: Checkpoints, restart: CheckpointRestart) -> bool:
    """Whether both say when to save, and not the same."""
    return options.every is not None and parse_every(options.every) != parse_every(restart.every)


def _record(ended: SaveEnded) -> dict[str, Any]:
    """What an event says of a save."""
    return {
        "of": ended.step, "folder": ended.folder, "committed": ended.committed, "nbytes": ended.nbytes,
        "duration_s": ended.seconds, "error": None if ended.error is None else str(ended.error),
    }  # fmt: skip
