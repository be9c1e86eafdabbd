"""What is installed on this machine: every check passes, and fails with what to do about it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import pytest

from horovod_ft.cli import environment
from horovod_ft.cli.check import Check, Ran, Status
from horovod_ft.cli.environment import (
    Extension,
    check_build_tools,
    check_extension,
    check_gloo,
    check_horovod,
    check_launcher,
    check_mpi,
    check_mpirun,
    check_package,
    check_python,
    check_socket_cutter,
    check_ulfm,
    environment_checks,
    find_program,
    installed_version,
    leading,
    load_extension,
)
from horovod_ft.installation import REMEDY


class Runner:
    """Answers instead of running anything, by a word of the command."""

    def __init__(self, **answers: Ran) -> None:
        self.answers = answers
        self.commands: list[str] = []

    def __call__(self, command: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None) -> Ran:
        self.commands.append(" ".join(command))
        return next(ran for word, ran in self.answers.items() if word in self.commands[-1])


OPEN_MPI = Ran(0, "mpirun (Open MPI) 5.0.11\n\nReport bugs to ...\n")
SHRUNK = Ran(0, "shrunk to 2\nshrunk to 2\n")
BUILT = Ran(0, "noise\nbuilt [true, true]\n")


def failed(check: Check, remedy: str) -> bool:
    return check.status is Status.FAILED and remedy in check.remedy


# --- versions ------------------------------------------------------------------------------------------------------


def test_python_that_is_new_enough() -> None:
    assert check_python((3, 10, 0)) == Check("Python", Status.OK, "3.10.0")


def test_python_that_is_too_old() -> None:
    assert failed(check_python((3, 9, 18)), "make a new environment")


@pytest.mark.parametrize(("module", "version"), [("torch", "2.13.0+cpu"), ("torch", "2.3.0"), ("keras", "4.0")])
def test_a_framework_that_is_new_enough(module: str, version: str) -> None:
    assert check_package(module, version).status is Status.OK


@pytest.mark.parametrize(
    ("module", "version"), [("torch", "2.2.9"), ("torch", "1.13"), ("tensorflow", "2.9.1"), ("keras", "unknown")]
)
def test_a_framework_that_is_too_old_is_a_warning(module: str, version: str) -> None:
    check = check_package(module, version)
    assert check.status is Status.WARNING
    assert f"is made for {module}" in check.remedy


def test_torch_is_a_must() -> None:
    assert failed(check_package("torch", None), "pip install 'horovod_ft[torch]'")


def test_tensorflow_is_not() -> None:
    check = check_package("tensorflow", None)
    assert check.status is Status.WARNING
    assert "Only for training with Keras: pip install 'horovod_ft[tensorflow]'" in check.remedy


@pytest.mark.parametrize(
    ("text", "numbers"), [("2.16.0rc1", (2, 16)), ("mpirun (Open MPI) 5.0.11", (5, 0)), ("3", (3,)), ("unknown", ())]
)
def test_the_leading_numbers_of_a_version(text: str, numbers: tuple[int, ...]) -> None:
    assert leading(text) == numbers


def test_the_version_of_a_module_comes_from_its_distribution() -> None:
    assert installed_version("pytest") == pytest.__version__


def test_a_module_that_is_not_installed_has_no_version() -> None:
    assert installed_version("no_such_module") is None


# --- Horovod -------------------------------------------------------------------------------------------------------


def test_the_right_horovod() -> None:
    assert check_horovod("0.28.1+ft6").status is Status.OK


@pytest.mark.parametrize("version", ["0.28.1", "0.28.1+ft5", "0.28.1+ftx"])
def test_horovod_as_released_or_of_an_old_recipe_does_not_survive_every_failure(version: str) -> None:
    check = check_horovod(version)
    assert check.status is Status.WARNING
    assert "take a control word for a part of a gradient" in check.detail


@pytest.mark.parametrize("version", [None, "0.27.0"])
def test_no_horovod_or_another(version: str | None) -> None:
    assert failed(check_horovod(version), REMEDY)


def test_an_extension_that_loads_says_how_it_was_built() -> None:
    runner = Runner(torch=Ran(0, "noise\nbuilt [true, false]\n"))
    assert load_extension("torch", runner) == Extension("torch", gloo=True, mpi=False)


@pytest.mark.parametrize(
    ("ran", "why"),
    [
        (Ran(1, "", "ImportError: undefined symbol"), "ImportError: undefined symbol"),
        (Ran(-11), "it was ended by SIGSEGV"),
        (Ran(None, err="no answer within 120 s"), "no answer within 120 s"),
        (Ran(0, "nothing of use"), "it ended with status 0"),
    ],
)
def test_an_extension_that_does_not_load(ran: Ran, why: str) -> None:
    assert load_extension("torch", Runner(torch=ran)) == Extension("torch", why)


def test_whether_an_extension_loads() -> None:
    assert check_extension(Extension("torch", gloo=True)).status is Status.OK
    broken = check_extension(Extension("torch", "ImportError"))
    assert failed(broken, REMEDY)
    assert broken.detail == "does not load: ImportError"


def test_gloo_is_a_must_for_every_framework() -> None:
    both = [Extension("torch", gloo=True), Extension("tensorflow", gloo=True)]
    assert check_gloo(both).status is Status.OK
    one = check_gloo([Extension("torch", gloo=True), Extension("tensorflow", mpi=True)])
    assert failed(one, REMEDY)
    assert "tensorflow" in one.detail


def test_gloo_when_nothing_loads() -> None:
    assert failed(check_gloo([Extension("torch", "ImportError")]), REMEDY)


def test_mpi_is_optional() -> None:
    assert check_mpi([Extension("torch", mpi=True)]).status is Status.OK
    assert check_mpi([Extension("torch", gloo=True)]).status is Status.WARNING


def test_the_launcher() -> None:
    assert check_launcher("/bin/horovodrun").status is Status.OK
    assert failed(check_launcher(None), REMEDY)


def test_a_program_of_this_environment_is_found_without_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert find_program(sys.executable.rsplit("/", 1)[1]) == sys.executable
    assert find_program("no-such-program") is None


# --- MPI -----------------------------------------------------------------------------------------------------------


def test_mpirun_with_ulfm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "is_there", lambda module: True)
    runner = Runner(**{"--version": OPEN_MPI, "ulfm": SHRUNK})
    assert [check.status for check in check_mpirun("mpirun", runner)] == [Status.OK, Status.OK]


def test_no_mpirun() -> None:
    (check,) = check_mpirun(None, Runner())
    assert check.status is Status.WARNING
    assert "pip install 'horovod_ft[mpi]'" in check.remedy


@pytest.mark.parametrize(
    "ran", [Ran(0, "mpirun (Open MPI) 4.1.4\n"), Ran(0, "HYDRA build details:\n"), Ran(127, "", "not found")]
)
def test_an_mpirun_that_cannot_recover_is_not_tried(ran: Ran) -> None:
    runner = Runner(**{"--version": ran})
    (check,) = check_mpirun("mpirun", runner)
    assert (check.status, len(runner.commands)) == (Status.WARNING, 1)
    assert "recovery needs Open MPI 5" in check.detail


@pytest.mark.parametrize("ran", [Ran(1, "", "no ulfm"), Ran(0, "shrunk to 2\n"), Ran(None, err="no answer in time")])
def test_ulfm_that_does_not_work(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "is_there", lambda module: True)
    check = check_ulfm("mpirun", Runner(ulfm=ran))
    assert (check.status, check.detail.startswith("does not work")) == (Status.WARNING, True)


def test_ulfm_without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "is_there", lambda module: False)
    check = check_ulfm("mpirun", Runner())
    assert (check.status, "mpi4py is not installed" in check.detail) == (Status.WARNING, True)


# --- the machine ---------------------------------------------------------------------------------------------------


def test_build_tools_that_are_there() -> None:
    assert check_build_tools([], horovod=False).status is Status.OK


def test_build_tools_that_are_missing_and_needed() -> None:
    check = check_build_tools(["g++", "cmake"], horovod=False)
    assert failed(check, "apt-get install g++ cmake")
    assert check.detail == "missing: g++, cmake"


def test_build_tools_that_are_missing_and_no_longer_needed() -> None:
    assert check_build_tools(["cmake"], horovod=True).status is Status.OK


def test_sockets_can_be_found_and_cut_here() -> None:
    assert check_socket_cutter().status is Status.OK


def test_sockets_that_cannot_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horovod_ft.membership.sockets.open_sockets", dict)
    assert failed(check_socket_cutter(), "run on Linux, with /proc mounted")


# --- together ------------------------------------------------------------------------------------------------------


def _versions(**versions: str) -> dict[str, str | None]:
    return {"torch": "2.13.0", "tensorflow": None, "keras": None, "horovod": None, **versions}


def test_without_horovod_its_parts_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "installed_version", _versions().get)
    monkeypatch.setattr(environment, "find_program", lambda name: None)
    checks = {check.name: check.status for check in environment_checks(Runner())}
    assert checks["Horovod"] is Status.FAILED
    assert "horovodrun" not in checks


def test_a_machine_with_all_there_is_has_nothing_to_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = _versions(tensorflow="2.21.0", keras="3.15.1", horovod="0.28.1+ft6")
    monkeypatch.setattr(environment, "installed_version", versions.get)
    monkeypatch.setattr(environment, "find_program", lambda name: f"/bin/{name}")
    monkeypatch.setattr(environment, "is_there", lambda module: True)
    runner = Runner(**{"--version": OPEN_MPI, "ulfm": SHRUNK, "hvd": BUILT})
    assert {check.status for check in environment_checks(runner)} == {Status.OK}
