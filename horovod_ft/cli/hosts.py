"""Checks of the hosts of an elastic job: can it survive the loss of one of them at all?

``horovodrun`` counts a failed worker against its whole host: the host is put on a black list and its other workers are
ended. What is left must be enough to go on.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from horovod_ft.cli.check import Check, Ran, failed, ok, run, warning
from horovod_ft.errors import ConfigurationError

#: Host name -> slots.
Hosts = Mapping[str, int]
Runner = Callable[..., Ran]

#: horovodrun polls the discovery script once a second.
POLL_S = 1.0
SCRIPT_TIMEOUT_S = 10.0
COOLDOWN_LIMITS_S = (1, 3600)
HOST = re.compile(r"(?P<name>[\w.-]+)(:(?P<slots>[0-9]+))?")


def parse_hosts(text: str, unsaid: int = 0) -> dict[str, int]:
    """Read ``a:1,b:2``, or the same with one host a line, as discovery scripts print it.

    Args:
        text: the hosts.
        unsaid: slots of a host that is listed without; with 0 that is an error.

    Raises:
        ConfigurationError: an entry is something else, or a host is named twice.
    """
    hosts: dict[str, int] = {}
    for entry in filter(None, (part.strip() for part in re.split(r"[,\n]", text))):
        match = HOST.fullmatch(entry)
        slots = int(match["slots"] or unsaid) if match else 0
        if match is None or slots < 1:
            raise ConfigurationError(f"{entry!r} is not NAME:SLOTS with at least one slot")
        if match["name"] in hosts:
            raise ConfigurationError(f"the host {match['name']!r} is listed more than once")
        hosts[match["name"]] = slots
    return hosts


def discover(
    script: Path, run: Runner = run, mono: Callable[[], float] = time.monotonic
) -> tuple[Check, dict[str, int]]:
    """Run a discovery script as the launcher does. Blocks for as long as it takes, at most 10 s."""
    name = "discovery script"
    if not script.is_file():
        return failed(name, f"{script} is not a file", "give the path of the script"), {}
    if not os.access(script, os.X_OK):
        return failed(name, f"{script} is not executable", f"chmod +x {script}"), {}
    began = mono()
    ran = run(["sh", "-c", shlex.quote(str(script.absolute()))], SCRIPT_TIMEOUT_S)
    seconds = mono() - began
    try:
        hosts = _listing(ran)
    except ConfigurationError as error:
        remedy = "it must print one line NAME:SLOTS a host, and end with status 0"
        return failed(name, f"{script}: {error}", remedy), {}
    if seconds > POLL_S:
        slow = f"{script} takes {seconds:.1f} s, and horovodrun asks it every second"
        return warning(name, slow, "let it answer at once, from a cache: a job waits for it while it recovers"), hosts
    if any(":" not in line for line in ran.out.split()):
        bare = f"{script} lists hosts without slots, counted here as one each"
        return warning(name, bare, "let it print NAME:SLOTS, or run horovodrun with --slots-per-host"), hosts
    return ok(name, f"{script} lists {_listed(hosts)}"), hosts


def _listing(ran: Ran) -> dict[str, int]:
    if not ran.good:
        raise ConfigurationError(ran.why())
    hosts = parse_hosts(ran.out, unsaid=1)
    if not hosts:
        raise ConfigurationError("it lists no host")
    return hosts


def host_checks(
    hosts: Hosts | None,
    np: int | None = None,
    min_np: int | None = None,
    cooldown: tuple[int, int] | None = None,
    resolve: Callable[[str], str] = socket.gethostbyname,
) -> Iterator[Check]:
    """All checks of a job's size.

    Args:
        hosts: None when they are not known.
        np, min_np: ``-np`` and ``--min-np`` of horovodrun; None when not given.
        cooldown: ``--blacklist-cooldown-range``, seconds.
        resolve: name to address; raises OSError.
    """
    if hosts:
        yield check_names(hosts, resolve)
    if np is not None and min_np is not None and min_np > np:
        yield failed("--min-np", f"{min_np} is more than -np {np}", f"give --min-np of at most {np}")
        return
    if hosts and np is not None and sum(hosts.values()) < np:
        yield failed("slots", f"{_listed(hosts)}, and -np is {np}", "add hosts or slots, or lower -np")
    if hosts or np is not None:
        yield check_spare(hosts, np, min_np, cooldown is not None)
    if cooldown is not None:
        yield check_cooldown(*cooldown)


def check_names(hosts: Hosts, resolve: Callable[[str], str] = socket.gethostbyname) -> Check:
    """Blocks for as long as the resolver takes."""
    unknown = []
    for host in hosts:
        try:
            resolve(host)
        except OSError:
            unknown.append(host)
    if unknown:
        return failed("host names", f"no address for {', '.join(unknown)}", "mend the name, or add it to /etc/hosts")
    return ok("host names", f"{len(hosts)} of {len(hosts)} have an address")


def check_spare(hosts: Hosts | None, np: int | None, min_np: int | None, cooldown: bool) -> Check:
    """After the loss of the largest host, is enough left to go on?

    When not, horovodrun waits for new hosts; with a cool-down it waits for the lost one, for which it then starts no
    worker, and the job hangs.
    """
    name = "room for a failure"
    slots, largest = (sum(hosts.values()), max(hosts.values())) if hosts else (np or 0, 1)
    assumed = "" if hosts else ", if each worker has a host of its own"
    needed = min_np if min_np is not None else np if np is not None else 1
    left = slots - largest
    if left >= needed:
        return ok(name, f"{left} slots are left after the loss of the largest host, {needed} are needed{assumed}")
    if hosts is not None and len(hosts) == 1:
        return failed(
            name,
            f"{next(iter(hosts))} is the only host: horovodrun gives up a host when a worker on it fails",
            "use at least two hosts. To try on one machine, list it under several names: 127.0.0.1:1,127.0.0.01:1,...",
        )
    if left < 1:
        return failed(name, "one worker alone survives nothing", "use at least two hosts with a worker each")
    unset = " (without --min-np it is -np)" if min_np is None else ""
    then = "waits for a host that it then does not use, and hangs" if cooldown else "waits until hosts are added"
    return failed(
        name,
        f"{left} slots are left after the loss of the largest host{assumed}, and {needed} are needed{unset}: "
        f"the job {then}",
        f"give --min-np {left} or less, or spread the workers over more hosts",
    )


def check_cooldown(low: int, high: int) -> Check:
    """``--blacklist-cooldown-range low high``, in seconds."""
    name, (least, most) = "cool-down", COOLDOWN_LIMITS_S
    if not least <= low <= high <= most:
        return failed(
            name, f"{low} to {high} s", f"give two numbers of seconds, the lower first, from {least} to {most}"
        )
    soonest, latest = min(2 * low, high), min(3 * low, high)
    span = f"{soonest} s" if soonest == latest else f"{soonest} to {latest} s"
    return ok(name, f"{span} after its first failure a host is used again")


def _listed(hosts: Hosts) -> str:
    slots = sum(hosts.values())
    return f"{len(hosts)} host{'' if len(hosts) == 1 else 's'} with {slots} slot{'' if slots == 1 else 's'}"
