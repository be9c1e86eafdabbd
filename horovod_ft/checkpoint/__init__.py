"""Durable checkpoints: files that outlive the job. Knows no framework, calls no collectives; adapters build on it."""

from horovod_ft.checkpoint.inspection import Candidate, Level, Status
from horovod_ft.checkpoint.retention import Retention, prune
from horovod_ft.checkpoint.saver import Captured, SaveEnded, Saver
from horovod_ft.checkpoint.schedule import Schedule
from horovod_ft.checkpoint.store import CheckpointStore

__all__ = [
    "Candidate", "Captured", "CheckpointStore", "Level", "Retention", "SaveEnded", "Saver", "Schedule", "Status",
    "prune",
]  # fmt: skip
