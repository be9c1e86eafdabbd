"""One zygote for all job tests of a session."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.jobs import harness
from tests.jobs.zygote import Zygote


@pytest.fixture(scope="session", autouse=True)
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if os.environ.get("JOBS_FROM_SCRATCH") == "1":
        yield
        return
    harness.Workers.zygote = Zygote(tmp_path_factory.mktemp("zygote") / "socket")
    try:
        yield
    finally:
        harness.Workers.zygote.close()
        harness.Workers.zygote = None
