"""On another backend of Keras the import says so first, whatever is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SAID = "ConfigurationError: Keras runs on {}; horovod_ft.keras needs TensorFlow: set KERAS_BACKEND=tensorflow"
IMPORT = "import horovod_ft.keras"


def last_line(script: str, tmp_path: Path, *, backend: str = "", configured: str = "") -> str:
    """What a process ends with, in which Keras has this backend by the environment and by the user's file."""
    (tmp_path / "keras.json").write_text(json.dumps({"backend": configured} if configured else {}))
    env = {**os.environ, "KERAS_BACKEND": backend, "KERAS_HOME": str(tmp_path), "TF_CPP_MIN_LOG_LEVEL": "3"}
    ended = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=100, check=False
    )
    return (ended.stderr if ended.returncode else ended.stdout).strip().splitlines()[-1]


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_another_backend_by_the_environment_is_refused(tmp_path: Path, backend: str) -> None:
    assert SAID.format(backend) in last_line(IMPORT, tmp_path, backend=backend)


def test_another_backend_by_the_users_file_is_refused(tmp_path: Path) -> None:
    assert SAID.format("torch") in last_line(IMPORT, tmp_path, configured="torch")


def test_the_backend_counts_that_keras_has_been_imported_with(tmp_path: Path) -> None:
    later = "import os, keras; os.environ['KERAS_BACKEND'] = 'tensorflow'; import horovod_ft.keras"
    assert SAID.format("torch") in last_line(later, tmp_path, backend="torch")


def test_nothing_heavy_is_imported_to_find_out(tmp_path: Path) -> None:
    script = (
        "import sys\ntry:\n    import horovod_ft.keras\nexcept ValueError:\n"
        "    print([name for name in ('keras', 'tensorflow', 'torch', 'horovod') if name in sys.modules])"
    )
    assert last_line(script, tmp_path, backend="torch") == "[]"


def test_the_environment_counts_before_the_users_file(tmp_path: Path) -> None:
    script = "import horovod_ft.keras, keras; print(keras.backend.backend())"
    assert last_line(script, tmp_path, backend="tensorflow", configured="torch") == "tensorflow"
