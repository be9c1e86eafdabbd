"""What a user says about checkpoints, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from horovod_ft.checkpoint.options import Checkpoints
from horovod_ft.checkpoint.retention import Retention
from horovod_ft.errors import ConfigurationError


def test_three_checkpoints_stay_if_nothing_is_said() -> None:
    assert Checkpoints("run").retention() == Retention(3)


def test_all_may_stay() -> None:
    assert Checkpoints("run", keep_last=None).retention() is None


def test_more_than_the_newest_may_stay() -> None:
    assert Checkpoints("run", keep_last=2, keep_every=1000).retention() == Retention(2, 1000)


def test_the_store_is_where_it_was_said(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "run").store().url == str(tmp_path / "run")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"keep_last": 0}, "keep_last is 0"), ({"every": "often"}, "every is 'often'"), ({"every": 0}, "every is 0"),
        ({"keep_last": None, "keep_every": 5}, "keep_last=None keeps all"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(arguments: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        Checkpoints("run", **arguments)  # type: ignore[arg-type]
