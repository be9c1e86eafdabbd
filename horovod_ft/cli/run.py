"""``horovod-ft run``: ``horovodrun`` with faults of its launcher mended, and started again when its job is lost."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer
from typer.core import TyperCommand

from horovod_ft.agent.budget import Budget
from horovod_ft.agent.notice import Notice
from horovod_ft.agent.outcome import Ending, ending, judge
from horovod_ft.agent.supervisor import Signals, attend
from horovod_ft.installation import require_launcher
from horovod_ft.settings import PREFIX, Settings

LAUNCHER = (sys.executable, "-m", "horovod_ft.agent.launcher")
#: EX_TEMPFAIL of sysexits.h, which batch systems know: it may work when tried again. horovodrun has no such status.
EXIT_GIVEN_UP = 75


class PreemptSignal(str, Enum):
    """Signals of which a job can be told before they end it."""

    TERM = "TERM"
    USR1 = "USR1"
    USR2 = "USR2"
    HUP = "HUP"
    INT = "INT"
    NONE = "none"

    @property
    def number(self) -> signal.Signals | None:
        return None if self is PreemptSignal.NONE else signal.Signals[f"SIG{self.value}"]


class Run(TyperCommand):
    """The command ``run``, which leaves everything from the first argument on that is not its own as it is."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        takes_value = {
            name: not getattr(option, "is_flag", False)
            for option in self.get_params(ctx)
            for name in option.opts
            if name.startswith("-")
        }
        return super().parse_args(ctx, with_border(args, takes_value))


def with_border(arguments: Sequence[str], takes_value: Mapping[str, bool]) -> list[str]:
    """The arguments with a ``--`` before the first one that is not ours.

    Args:
        arguments: ours, then those of another program.
        takes_value: our options; whether a value follows.
    """
    index = 0
    while index < len(arguments):
        name, equals, _ = arguments[index].partition("=")
        if name not in takes_value:
            break
        index += 2 if takes_value[name] and not equals else 1
    rest = list(arguments[index:])
    return [*arguments[:index], *(rest if rest[:1] == ["--"] or not rest else ["--", *rest])]


def run(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="ARGUMENTS", help="Those of horovodrun, with the command that it is to run."),
    ],
    restarts: Annotated[int, typer.Option(min=0, help="Start a lost job again, at most so often ...")] = 0,
    within: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="... within such a time.")] = 3600.0,
    backoff: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Pause before a restart; doubled with each that counts.")
    ] = 1.0,
    longest_backoff: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="The longest pause.")] = 60.0,
    grace: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="After a SIGTERM, Ctrl-C or SIGHUP the job has this long.")
    ] = 30.0,
    preempt_signal: Annotated[
        PreemptSignal,
        typer.Option(case_sensitive=False, help="The job is told of this signal, and has the grace for a checkpoint."),
    ] = PreemptSignal.TERM,
    discovery_interval: Annotated[
        float | None,
        typer.Option(
            min=0.01, metavar="SECONDS", help="Between two runs of the discovery script.", show_default="Horovod's 1"
        ),
    ] = None,
) -> None:
    """Run a job under horovodrun's own launcher, with its faults mended, and start it again when it is lost.

    Our options come first. Everything from the first argument that is not one of them goes to horovodrun as it is:
    `horovod-ft run --restarts 3 -np 4 --min-np 2 -H a:2,b:2 python train.py`

    **A restarted job goes on from its newest checkpoint** if it saves any: `elastic.run(checkpoint=...)` or
    `HOROVOD_FT_CHECKPOINT`. Else it begins from the start, unless the script restores something itself. Its workers
    find the number of the attempt in `HOROVOD_FT_ATTEMPT`: 0 at first, then 1. It begins as soon as `--min-np` slots
    are there.

    **Mended**: the rendezvous server takes the connections of many workers at once, so that `hvd.init()` does not wait
    for seconds with 8 workers or more; a worker that ends well is not reported with "status code None"; an elastic job
    starts without loading TensorFlow and torch into the launcher; a host that comes back gets its workers again.

    **Hosts that come back**: a host fails with a worker of it that ends with a status other than 0, and its other
    workers are ended. With `--blacklist-cooldown-range LOW HIGH` it comes back after its cooldown (2 to 3 times LOW at
    first, then doubled, at most HIGH seconds) if discovery still lists it, also when all others wait for it because
    fewer than `--min-np` slots are left. Its workers are started again and get the last ranks. Without that option it
    stays away. A job ends when nobody is left who has the state of the training.

    **Started again** is a job whose first worker to fail was ended by SIGKILL, SIGABRT, SIGTERM, SIGHUP, SIGSEGV or
    SIGBUS, by a lost ssh connection (255) or with status 75 ("try again"), or whose launcher was ended by one of these
    signals; also one that fell below `--min-np` like that, or that in a later attempt found too few hosts. **Not**
    one whose first worker to fail ended with any other status, such as 1 for an exception of the script, nor after
    wrong arguments.

    A first SIGTERM, Ctrl-C or SIGHUP ends the job; what has not ended after the grace is killed. Hosts reached by ssh
    are left to horovodrun then.

    **A notice first**: workers of an elastic job are told of the `--preempt-signal`, once, because a batch system
    sends it before it takes a machine away. The job has the grace to make a last checkpoint and to end by itself.
    After it, or at another SIGTERM, Ctrl-C or SIGHUP (1 s later or more), it is ended as above, and killed at most
    12 s after that. If no worker can be told it is ended at once. Workers listen from `@hvd.elastic.run` on. A script
    of stock Horovod does not, and loses the time: use `--preempt-signal none` with it.

    **Exit code**: 0 when the job has succeeded, also within its grace; horovodrun's own (1 or 2) when it failed in a
    way that would come again; 75 when it was lost and no restart is left; 128 + n when signal n ended it.
    """
    Settings.from_environment()  # what is misspelt would otherwise be told by each worker
    require_launcher()
    budget = Budget(
        restarts, within_s=within, pause_s=backoff, longest_pause_s=longest_backoff, mono=time.monotonic
    )
    preempt = preempt_signal.number
    with Signals(preempt) as signals:
        code = repeat(Launcher(arguments, discovery_interval, signals, grace, preempt), budget, signals)
    raise typer.Exit(code)


class Attempt(Protocol):
    """Runs a job once."""

    def __call__(self, number: int) -> Ending:
        """Blocks until the job has ended. ``number`` counts from 0."""


class Pauses(Protocol):
    """What ``repeat`` needs of ``Signals``."""

    @property
    def stopped(self) -> int | None: ...

    @property
    def passed_on(self) -> bool: ...

    def pause(self, seconds: float) -> None: ...


class Launcher:
    """Runs a job once, under the mended launcher.

    Args:
        arguments: of ``horovodrun``.
        discovery_interval: in seconds; None for Horovod's own.
        signals: to pass on.
        grace_s: from such a signal until the job is killed, in seconds.
        preempt: the signal of which the job is told before; None for none.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        discovery_interval: float | None,
        signals: Signals,
        grace_s: float,
        preempt: int | None,
    ) -> None:
        self._arguments = arguments
        self._interval = [] if discovery_interval is None else ["--discovery-interval", str(discovery_interval)]
        self._signals = signals
        self._grace_s = grace_s
        self._preempt = preempt

    def __call__(self, number: int) -> Ending:
        with tempfile.TemporaryDirectory(prefix="horovod_ft-") as folder:
            outcome = Path(folder) / "outcome.json"
            own = [*self._interval, *(["--restarted"] if number else []), "--outcome", str(outcome)]
            if self._preempt is None:
                return ending(self._attend(own, number, None), outcome)
            with Notice(self._preempt, _say) as notice:
                return ending(self._attend([*own, "--notices", str(notice.theirs)], number, notice), outcome)

    def _attend(self, own: Sequence[str], number: int, notice: Notice | None) -> int:
        env = {**os.environ, f"{PREFIX}ATTEMPT": str(number)}
        return attend([*LAUNCHER, *own, "--", *self._arguments], env, self._signals, self._grace_s, notice)


def repeat(attempt: Attempt, budget: Budget, signals: Pauses) -> int:
    """Run a job until it succeeds, fails for good, is stopped, or the budget is spent. Returns the exit code."""
    number = 0
    while True:
        end = attempt(number)
        if end.status == 0 and not signals.passed_on:
            return 0
        if signals.stopped is not None:
            return _stopped(signals.stopped)
        verdict = judge(end, ran_before=number > 0)
        if not verdict.recoverable:
            _say(f"the job failed, and would again: {verdict.reason}")
            return end.status if end.status > 0 else 128 - end.status
        pause_s = budget.take()
        if pause_s is None:
            _say(f"the job is lost: {verdict.reason}; {_spent(budget)}")
            return EXIT_GIVEN_UP
        number += 1
        _say(
            f"the job is lost: {verdict.reason}; attempt {number + 1} begins in {pause_s:g} s, "
            f"restart {budget.used} of {budget.restarts} within {budget.within_s:g} s"
        )
        signals.pause(pause_s)
        if signals.stopped is not None:
            return _stopped(signals.stopped)


def _spent(budget: Budget) -> str:
    if budget.restarts == 0:
        return "--restarts says how often it may be started again, and is 0"
    return f"given up, after {budget.restarts} of {budget.restarts} restarts within {budget.within_s:g} s"


def _stopped(number: int) -> int:
    _say(f"the job was ended by {signal.Signals(number).name}")
    return 128 + number


def _say(text: str) -> None:
    print(f"horovod-ft run: {text}", file=sys.stderr, flush=True)
