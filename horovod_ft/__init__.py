"""Fault tolerance for Horovod's elastic mode. Imports no framework: use ``horovod_ft.torch`` in a training script."""

from horovod_ft.errors import HorovodFtError
from horovod_ft.policies.auto import Auto
from horovod_ft.policies.checkpoint_restart import CheckpointRestart
from horovod_ft.policies.lossy_forward import LossyForward
from horovod_ft.policies.rollback import MiniBatchRollback
from horovod_ft.policy import Abort, Decision, Failure, Forward, Policy, RecoveryPolicy, Replay, Restart
from horovod_ft.version import __version__

__all__ = [
    "Abort",
    "Auto",
    "CheckpointRestart",
    "Decision",
    "Failure",
    "Forward",
    "HorovodFtError",
    "LossyForward",
    "MiniBatchRollback",
    "Policy",
    "RecoveryPolicy",
    "Replay",
    "Restart",
    "__version__",
]
