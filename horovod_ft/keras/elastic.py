"""``hvd.elastic``: training that goes on when workers die or join, with the names that Horovod users know."""

from __future__ import annotations

from horovod_ft.checkpoint.options import Checkpoints
from horovod_ft.guard import ReplicaGuard
from horovod_ft.keras.callback import FaultToleranceCallback
from horovod_ft.keras.dataset import ElasticDataset
from horovod_ft.keras.elastic_callbacks import (
    CommitStateCallback,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
)
from horovod_ft.keras.keras_state import KerasState
from horovod_ft.keras.run import run
from horovod_ft.keras.runtime import init, shutdown
from horovod_ft.keras.state import TensorFlowState
from horovod_ft.policies.auto import Auto
from horovod_ft.policies.checkpoint_restart import CheckpointRestart
from horovod_ft.policies.lossy_forward import LossyForward
from horovod_ft.policies.rollback import MiniBatchRollback
from horovod_ft.policy import Abort, Decision, Failure, Forward, RecoveryPolicy, Replay, Restart

__all__ = [
    "Abort",
    "Auto",
    "CheckpointRestart",
    "Checkpoints",
    "CommitStateCallback",
    "Decision",
    "ElasticDataset",
    "Failure",
    "FaultToleranceCallback",
    "Forward",
    "KerasState",
    "LossyForward",
    "MiniBatchRollback",
    "RecoveryPolicy",
    "Replay",
    "ReplicaGuard",
    "Restart",
    "TensorFlowState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "init",
    "run",
    "shutdown",
]
