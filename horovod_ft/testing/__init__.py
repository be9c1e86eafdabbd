"""Help for testing: a world of workers as threads, real jobs on one machine, conformance kits. Imports no framework."""

from horovod_ft.testing.conformance import check_membership, check_policy, every_failure
from horovod_ft.testing.fake_world import Breakage, FakeWorld
from horovod_ft.testing.local_job import LocalJob
from horovod_ft.testing.store_kit import check_store

__all__ = ["Breakage", "FakeWorld", "LocalJob", "check_membership", "check_policy", "check_store", "every_failure"]
