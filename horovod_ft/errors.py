"""The exception tree. Each class says whose fault it is and what can be done now.

Nothing here is ever raised for a failure that the policy recovers: such a failure stays inside the engine.
"""

from __future__ import annotations

#: Exit status of a process that asks for another attempt at its job: EX_TEMPFAIL of ``sysexits.h``.
TRY_AGAIN = 75


class HorovodFtError(Exception):
    """Root of every error that this package raises on purpose."""


class ConfigurationError(HorovodFtError, ValueError):
    """The user's arguments or environment are wrong. Nothing has been started or changed."""


class FaultPlanError(ConfigurationError):
    """A fault plan cannot be read, or an entry of it can never fire."""


class PolicyError(ConfigurationError):
    """A recovery policy is unknown, cannot be loaded, or answered with something that is not a Decision."""


class UsageError(HorovodFtError, RuntimeError):
    """The API was called at a moment at which it has no meaning, such as ``state.step()`` outside ``elastic.run``."""


class InstallationError(HorovodFtError, ImportError):
    """Horovod is missing or was built without what is needed. The message holds the command that mends it."""


class DivergenceError(HorovodFtError, RuntimeError):
    """Workers that must be equal are not: other parameters, shapes, decisions. Training on would be silently wrong."""


class RecoveryError(HorovodFtError, RuntimeError):
    """A failure that cannot be recovered within this job. Local state is that of the last commit."""


class JobLostError(RecoveryError):
    """What is left of this job cannot go on, but a new start of it may: ``horovod-ft run`` makes one.

    A process that ends by it ends with the status TRY_AGAIN.
    """


class RecoveryTimeoutError(RecoveryError):
    """A wait inside a recovery reached its bound; the message says what was waited for, and for how long."""


class CheckpointError(HorovodFtError, RuntimeError):
    """A durable checkpoint cannot be written, found or read. What is in memory, and older checkpoints, are sound."""


class StorageError(CheckpointError):
    """The storage under a checkpoint refused: full, read-only, gone. The message says where, and what to do."""


class UnsupportedStateError(CheckpointError):
    """The state holds something that a checkpoint cannot hold as it is; the message names its path in the state."""


class MismatchError(CheckpointError):
    """A sound checkpoint is of another model: names, shapes or dtypes of tensors differ. Each is named."""


class DamagedCheckpointError(CheckpointError):
    """One checkpoint cannot be used: half written, cut short, altered. Use the one before it.

    If it was raised while tensors were being read, their memory holds parts of it.
    """


class ForeignCheckpointError(DamagedCheckpointError):
    """It was not written by this package."""


class NewerCheckpointError(DamagedCheckpointError):
    """It was written by a newer version of this package, in a format that this one does not know."""


class NoCheckpointError(CheckpointError):
    """There is no checkpoint that can be used.

    Attributes:
        problems: each one that is there, newest first, with the reason why it cannot be used; empty if there is none.
    """

    def __init__(self, message: str, problems: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems
