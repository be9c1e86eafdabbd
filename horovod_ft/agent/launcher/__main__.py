"""Mend Horovod's launcher, run it, and write down which error ended it, if any, for whoever started it."""

from __future__ import annotations

import argparse
import multiprocessing.process
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import horovod.runner.elastic.driver
import horovod.runner.gloo_run
import horovod.runner.http.http_server
import horovod.runner.launch

from horovod_ft.agent.launcher import mends
from horovod_ft.agent.launcher.driver import Driver
from horovod_ft.agent.launcher.notices import answer
from horovod_ft.agent.outcome import describe
from horovod_ft.errors import HorovodFtError


def main(arguments: Sequence[str]) -> None:
    """Run a job to its end, in this process. Arguments after ``--`` are those of ``horovodrun``.

    Raises:
        SystemExit: wrong arguments, or ``--help`` and the like.
        Exception: whatever Horovod's launcher ends with.
    """
    border = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(prog="python -m horovod_ft.agent.launcher", description=__doc__)
    parser.add_argument("--discovery-interval", type=float, metavar="SECONDS")
    parser.add_argument("--restarted", action="store_true", help="begin with --min-np workers if need be")
    parser.add_argument("--outcome", type=Path, metavar="FILE", help="the error goes here")
    parser.add_argument("--notices", type=int, metavar="FD", help="whoever asks on this socket has the workers told")
    own = parser.parse_args(arguments[:border])
    drivers: list[Driver] = []
    if own.notices is not None:
        line = socket.socket(fileno=own.notices)
        line.set_inheritable(False)
        answer(line, lambda: [client for driver in drivers for client in driver.listeners()])
    sys.argv = ["horovodrun", *arguments[border + 1 :]]
    # Into a pipe or a file Python would keep what the launcher says until it has a few kilobytes.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        mend(own.discovery_interval, drivers, restarted=own.restarted)
        horovod.runner.launch.run_commandline()
    except Exception as error:
        if own.outcome is not None:
            own.outcome.write_text(describe(error))
        if isinstance(error, HorovodFtError):
            raise SystemExit(f"horovod-ft: {error}") from error
        raise


def mend(discovery_interval: float | None, drivers: list[Driver], *, restarted: bool) -> None:
    """Mend what there is to mend; the driver of an elastic job is put into the list when it has been made."""

    def made(*args: Any, **kwargs: Any) -> Driver:
        drivers.append(Driver(*args, **kwargs))
        return drivers[-1]

    mends.queue_connections(horovod.runner.http.http_server)
    mends.keep_exit_statuses(multiprocessing.process)
    mends.take_gloo_for_granted(horovod.runner.launch)
    mends.drive_with(horovod.runner.gloo_run, made)
    if discovery_interval is not None:
        mends.discover_every(horovod.runner.elastic.driver, discovery_interval)
    if restarted:
        mends.start_with_least(horovod.runner.launch)


if __name__ == "__main__":
    main(sys.argv[1:])
