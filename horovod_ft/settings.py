"""All settings that come from outside the script, in one frozen value. The only reader of environment variables.

An argument in the script always wins over the environment; the environment wins over the default.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from horovod_ft.errors import ConfigurationError

PREFIX = "HOROVOD_FT_"
KNOWN = ("POLICY", "CHECKPOINT", "FAULTS", "EVENTS", "LEDGER", "TIMEOUT", "ATTEMPT", "CACHE")


@dataclass(frozen=True)
class Settings:
    """What ``HOROVOD_FT_*`` and the launcher's own ``HOROVOD_*`` variables say.

    Attributes:
        policy: text of ``HOROVOD_FT_POLICY``, such as ``rollback(max_consecutive=5)``; None when unset.
        checkpoint: ``HOROVOD_FT_CHECKPOINT``: a folder or URL for durable checkpoints; None when unset.
        faults: text of ``HOROVOD_FT_FAULTS``: the path of a TOML file, or the plan itself; None when unset.
        events: folder for one JSON-lines file a worker; None switches recording off.
        ledger: folder for the ledger of samples; None switches it off.
        timeout_s: bound, in seconds, of every wait inside a recovery.
        attempt: how often ``horovod-ft run`` has started this job before; 0 for the first attempt and without it.
        elastic: the launcher is ``horovodrun`` in elastic mode.
        host: the host name the launcher gave this worker, ``localhost`` without a launcher.
        start_rank: this worker's rank when its process started. It never changes and names the worker in plans.
    """

    policy: str | None = None
    checkpoint: str | None = None
    faults: str | None = None
    events: Path | None = None
    ledger: Path | None = None
    timeout_s: float = 600.0
    attempt: int = 0
    elastic: bool = False
    host: str = "localhost"
    start_rank: int = 0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read the environment once.

        Raises:
            ConfigurationError: a variable that starts with ``HOROVOD_FT_`` is unknown (a typing error would otherwise
                be ignored in silence), or its value cannot be used.
        """
        env = os.environ if environ is None else environ
        unknown = sorted(name for name in env if name.startswith(PREFIX) and name.removeprefix(PREFIX) not in KNOWN)
        if unknown:
            raise ConfigurationError(
                f"unknown environment variable{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}: "
                f"horovod_ft reads {', '.join(PREFIX + name for name in KNOWN)}"
            )
        return cls(
            policy=env.get(PREFIX + "POLICY") or None,
            checkpoint=env.get(PREFIX + "CHECKPOINT") or None,
            faults=env.get(PREFIX + "FAULTS") or None,
            events=_folder(env, "EVENTS"),
            ledger=_folder(env, "LEDGER"),
            timeout_s=_seconds(env, "TIMEOUT", 600.0),
            attempt=_attempt(env),
            elastic=env.get("HOROVOD_ELASTIC") == "1",
            host=env.get("HOROVOD_HOSTNAME", "localhost"),
            start_rank=_rank(env),
        )


def _folder(env: Mapping[str, str], name: str) -> Path | None:
    text = env.get(PREFIX + name)
    return Path(text).expanduser() if text else None


def _rank(env: Mapping[str, str]) -> int:
    text = env.get("HOROVOD_RANK", "0")
    if not text.isdecimal():
        raise ConfigurationError(
            f"HOROVOD_RANK={text!r} is not a rank. The launcher sets it; unset it to run without a launcher"
        )
    return int(text)


def _attempt(env: Mapping[str, str]) -> int:
    text = env.get(PREFIX + "ATTEMPT") or "0"
    if not text.isdecimal():
        raise ConfigurationError(f"{PREFIX}ATTEMPT={text!r} is not a number: horovod-ft run sets it, leave it unset")
    return int(text)


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(PREFIX + name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ConfigurationError(f"{PREFIX}{name}={text!r} is not a positive number of seconds")
    return value


def writable_folder(path: Path, variable: str) -> Path:
    """Make the folder if need be and prove that a file can be made in it.

    Raises:
        ConfigurationError: it cannot; the message names the folder, the cause and the variable it came from.
    """
    probe = path / f".probe-{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink(missing_ok=True)  # another host's worker may have the same process id
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigurationError(
            f"cannot write into {str(path)!r} ({reason}): set {variable} to a folder that this user may write to, "
            "or leave it unset"
        ) from error
    return path
