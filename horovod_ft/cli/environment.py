"""Checks of what is installed on this machine. Frameworks and Horovod are only loaded in processes of their own.

A crash while an extension loads is then one row of a table, and nothing that a framework prints gets in the way.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from horovod_ft.cli.check import Check, Ran, failed, ok, run, warning
from horovod_ft.installation import GOES_ON, HOROVOD, REMEDY, stops_after_failure
from horovod_ft.membership.sockets import SocketCutter

Runner = Callable[..., Ran]

OLDEST_PYTHON = (3, 10)
#: Module -> oldest version that horovod_ft is made for.
OLDEST = {"torch": (2, 3), "tensorflow": (2, 16), "keras": (3, 3)}
#: Loading a framework from a cold disk takes its time.
LOAD_TIMEOUT_S = 120.0
MPI_TIMEOUT_S = 60.0
MPI_REMEDY = "Only for jobs under mpirun, not for horovodrun: pip install 'horovod_ft[mpi]'. Then: " + REMEDY
#: Build tool -> Debian package.
TOOLS = {"g++": "g++", "make": "make", "cmake": "cmake"}


@dataclass(frozen=True)
class Extension:
    """What loading Horovod's extension for one framework has shown; ``why`` is empty if it loads."""

    framework: str
    why: str = ""
    gloo: bool = False
    mpi: bool = False


def environment_checks(run: Runner = run) -> Iterator[Check]:
    """All checks of this machine, one after the other. Blocks: two frameworks are loaded, and mpirun is tried."""
    yield check_python(sys.version_info[:3])
    for module in OLDEST:
        yield check_package(module, installed_version(module))
    horovod = installed_version("horovod")
    yield check_horovod(horovod)
    if horovod is not None:
        found = [load_extension(framework, run) for framework in ("torch", "tensorflow") if is_there(framework)]
        yield from map(check_extension, found)
        yield check_gloo(found)
        yield check_mpi(found)
        yield check_launcher(find_program("horovodrun"))
    yield from check_mpirun(find_program("mpirun"), run)
    yield check_build_tools([tool for tool in TOOLS if shutil.which(tool) is None], horovod is not None)
    yield check_socket_cutter()


# --- versions ------------------------------------------------------------------------------------------------------


def is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def installed_version(module: str) -> str | None:
    """Version of the distribution that brings a module, without importing it; None if there is none."""
    if not is_there(module):
        return None
    names = metadata.packages_distributions().get(module, [])
    return metadata.version(names[0]) if names else "unknown"


def find_program(name: str) -> str | None:
    """A program of this environment, whether it has been activated or not; else one on PATH."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


def check_python(version: Sequence[int]) -> Check:
    text = ".".join(map(str, version))
    if tuple(version[:2]) < OLDEST_PYTHON:
        return failed("Python", text, "horovod_ft needs Python 3.10 or newer: make a new environment with one")
    return ok("Python", text)


def check_package(module: str, version: str | None) -> Check:
    """A framework. Only PyTorch is a must."""
    if version is None:
        remedy = f"pip install 'horovod_ft[{'torch' if module == 'torch' else 'tensorflow'}]'. Then: {REMEDY}"
        if module == "torch":
            return failed(module, "not installed", remedy)
        return warning(module, "not installed", f"Only for training with Keras: {remedy}")
    if leading(version) < OLDEST[module]:
        oldest = ".".join(map(str, OLDEST[module]))
        return warning(module, version, f"horovod_ft is made for {module} {oldest} and newer")
    return ok(module, version)


def leading(version: str) -> tuple[int, ...]:
    """The first two numbers in a text: ``2.16.0rc1`` -> (2, 16). Empty if it holds none."""
    return tuple(int(number) for number in re.findall("[0-9]+", version)[:2])


# --- Horovod -------------------------------------------------------------------------------------------------------


def check_horovod(version: str | None) -> Check:
    if version is None:
        return failed("Horovod", "not installed", REMEDY)
    if version.split("+")[0] != HOROVOD:
        return failed("Horovod", f"{version}; horovod_ft is made for {HOROVOD}", REMEDY)
    if not stops_after_failure(version):
        return warning("Horovod", f"{version}: {GOES_ON}", REMEDY)
    return ok("Horovod", version)


def load_extension(framework: str, run: Runner = run) -> Extension:
    """Load Horovod for a framework in another process, and ask it how it was built. Blocks for some seconds."""
    code = (
        f"import json, {framework}, horovod.{framework} as hvd\n"
        "print('built', json.dumps([bool(hvd.gloo_built()), bool(hvd.mpi_built())]))"
    )
    ran = run([sys.executable, "-c", code], LOAD_TIMEOUT_S, {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""})
    answers = [line for line in ran.out.splitlines() if line.startswith("built ")]
    if not ran.good or not answers:
        return Extension(framework, ran.why())
    gloo, mpi = json.loads(answers[-1].removeprefix("built "))
    return Extension(framework, gloo=gloo, mpi=mpi)


def check_extension(extension: Extension) -> Check:
    name = f"Horovod for {extension.framework}"
    if extension.why:
        return failed(name, f"does not load: {extension.why}", REMEDY)
    return ok(name, "loads")


def check_gloo(extensions: Sequence[Extension]) -> Check:
    name = "Horovod with Gloo"
    loaded = [extension for extension in extensions if not extension.why]
    if not loaded:
        return failed(name, "cannot be told: no extension loads", REMEDY)
    without = [extension.framework for extension in loaded if not extension.gloo]
    if without:
        return failed(name, f"not built for {' and '.join(without)}; elastic jobs under horovodrun need it", REMEDY)
    return ok(name, "built")


def check_mpi(extensions: Sequence[Extension]) -> Check:
    name = "Horovod with MPI"
    if any(extension.mpi for extension in extensions):
        return ok(name, "built")
    return warning(name, "not built", MPI_REMEDY)


def check_launcher(path: str | None) -> Check:
    if path is None:
        return failed("horovodrun", "neither in this environment nor on PATH", REMEDY)
    return ok("horovodrun", path)


# --- the machine ---------------------------------------------------------------------------------------------------

#: Two workers make their communicator unusable and shrink it, as after a failure. Without ULFM this hangs or fails.
#: The first barrier is there because a worker that still makes the communicator crashes if it is revoked then; the way
#: out is the one after failures: MPI_Finalize may hang.
SHRINK = """
import os
from mpi4py import MPI
world = MPI.COMM_WORLD.Dup()
world.Set_errhandler(MPI.ERRORS_RETURN)
world.Barrier()
world.Revoke()
left = world.Shrink()
print("shrunk to", left.size, flush=True)
left.Barrier()
os._exit(0)
"""


def check_mpirun(path: str | None, run: Runner = run) -> Iterator[Check]:
    """Is there an Open MPI that recovers? Optional, so nothing here fails. Blocks: the second row runs a real job."""
    if path is None:
        yield warning("mpirun", "not found", MPI_REMEDY)
        return
    version = run([path, "--version"], MPI_TIMEOUT_S)
    first = (version.out.strip().splitlines() or [version.why()])[0]
    if "Open MPI" not in first or leading(first) < (5,):
        yield warning("mpirun", f"{first}; recovery needs Open MPI 5 or newer", MPI_REMEDY)
        return
    yield ok("mpirun", first)
    yield check_ulfm(path, run)


def check_ulfm(path: str, run: Runner = run) -> Check:
    """Revoke and shrink a communicator of two workers: the only proof that fault tolerance is built in and works."""
    name = "mpirun --with-ft ulfm"
    if not is_there("mpi4py"):
        return warning(name, "cannot be tried: mpi4py is not installed", MPI_REMEDY)
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    job = [path, "--with-ft", "ulfm", *root, "--oversubscribe", "-np", "2", sys.executable, "-c", SHRINK]
    ran = run(job, MPI_TIMEOUT_S)
    if ran.good and ran.out.count("shrunk to 2") == 2:
        return ok(name, "two workers revoked their communicator and shrank it")
    return warning(name, f"does not work: {ran.why()}", MPI_REMEDY)


def check_build_tools(missing: Sequence[str], horovod: bool) -> Check:
    """Compiler and cmake matter only while Horovod has still to be built."""
    name = "build tools"
    if not missing:
        return ok(name, ", ".join(TOOLS))
    if horovod:
        return ok(name, f"not needed, Horovod is there (missing: {', '.join(missing)})")
    packages = " ".join(TOOLS[tool] for tool in missing)
    return failed(name, f"missing: {', '.join(missing)}", f"apt-get install {packages}, then: {REMEDY}")


def check_socket_cutter() -> Check:
    """Find and shut down a pair of sockets, as a recovery does with those of a broken group."""
    cutter = SocketCutter()
    cutter.forming()
    left, right = socket.socketpair()
    with left, right:
        cutter.formed()
        cut = cutter.cut()
    if cut >= 1:
        return ok("sockets in /proc", "a group's sockets can be found and cut")
    return failed(
        "sockets in /proc",
        "this process's own sockets cannot be found: a failure would be noticed only after 30 s",
        "run on Linux, with /proc mounted in the container",
    )
