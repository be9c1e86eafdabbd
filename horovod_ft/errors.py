"""The exception tree. Each class says whose fault it is and what can be done now.

Nothing here is ever raised for a failure that the policy recovers: such a failure stays inside the engine.
"""

from __future__ import annotations


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


class RecoveryTimeoutError(RecoveryError):
    """A wait inside a recovery reached its bound; the message says what was waited for, and for how long."""
