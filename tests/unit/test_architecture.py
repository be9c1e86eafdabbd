"""Who may import whom, and who may read the environment. Read from the source, not from what happens to be loaded."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import horovod_ft

ROOT = Path(horovod_ft.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))
FRAMEWORKS = {"torch", "tensorflow", "keras", "jax"}

#: The floors of the house, the lowest first. A module imports from its own floor and from those below.
FLOORS: tuple[frozenset[str], ...] = (
    frozenset({"policy", "policy_names", "events", "errors", "settings", "version"}),
    frozenset(
        {"agreement", "committer", "data", "faults", "going_back", "guard", "healing", "installation", "ledger",
         "losses", "membership", "parts", "policies", "restoring", "shares", "snapshot", "timeline", "trainee",
         "transfer", "agent", "checkpoint"}
    ),
    frozenset(
        {"changes", "choices", "history", "open_step", "reconcile", "recovery", "regroup", "runtime", "saving", "step"}
    ),
    frozenset({"torch", "keras", "testing"}),
    frozenset({"cli"}),
)  # fmt: skip

#: Who else may touch the environment, and why. Nobody there reads a HOROVOD_* variable.
ENVIRONMENT = {
    "settings": "the one reader of settings",
    "testing.local_job": "starts worker processes, in an environment made from its own",
    "cli.run": "starts a job, in an environment made from its own",
    "cli.chaos": "starts a job, in an environment made from its own",
    "keras.backend": "asks which backend Keras will have, by Keras's own variables",
    "cli.check": "runs other programs, in an environment made from its own",
}

#: Who catches the failure of a group, and where it has a meaning of its own there.
CATCHING = {
    "recovery": "it leaves the training function, or comes at its end",
    "regroup": "it breaks a recovery",
    "step": "it comes at a step's borders",
    "testing.membership_kit": "asks a membership for it",
}


def name_of(path: Path) -> str:
    """``membership.driver``; empty for the package itself."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(tree: ast.AST) -> Iterator[str]:
    """Absolute names of all modules that are imported anywhere in a tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            yield node.module
            if node.module == "horovod_ft":
                yield from (f"horovod_ft.{alias.name}" for alias in node.names)


def imported_at_import(tree: ast.Module) -> set[str]:
    """Top-level packages that importing the module imports: not those inside functions."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    bodies = [node for node in ast.walk(tree) if isinstance(node, functions)]
    inner = {id(node) for body in bodies for node in ast.walk(body)}
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in inner]
    return {name.split(".")[0] for node in found for name in imports(node)}


def floor_of(part: str) -> int:
    return next(floor for floor, parts in enumerate(FLOORS) if part in parts)


def in_each_module(*, but: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    paths = [path for path in MODULES if name_of(path).split(".")[0] not in but]
    return pytest.mark.parametrize("path", paths, ids=name_of)


def test_every_part_of_the_package_has_its_floor() -> None:
    parts = {name_of(path).split(".")[0] for path in MODULES} - {""}
    assert parts <= frozenset().union(*FLOORS)


@in_each_module(but=("",))
def test_imports_go_down_only(path: Path) -> None:
    mine = name_of(path).split(".")[0]
    ours = {name.split(".")[1] for name in imports(tree_of(path)) if name.startswith("horovod_ft.")}
    assert [part for part in sorted(ours) if floor_of(part) > floor_of(mine)] == []


@in_each_module(but=("torch", "keras"))
def test_only_the_adapters_import_a_framework(path: Path) -> None:
    assert FRAMEWORKS.isdisjoint(name.split(".")[0] for name in imports(tree_of(path)))


@in_each_module(but=("torch", "keras", "membership"))
def test_only_the_adapters_membership_and_the_launcher_import_horovod(path: Path) -> None:
    launcher = name_of(path).startswith("agent.launcher")
    assert launcher or "horovod" not in {name.split(".")[0] for name in imports(tree_of(path))}


def catches_failures(tree: ast.AST) -> bool:
    handlers = (node.type for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler))
    return any(caught is not None and "failure_types" in ast.unparse(caught) for caught in handlers)


def test_the_failure_of_a_group_is_caught_only_where_it_is_listed_here() -> None:
    assert {name_of(path) for path in MODULES if catches_failures(tree_of(path))} == CATCHING.keys()


def test_sockets_and_waiting_need_no_horovod() -> None:
    for name in ("base", "notice", "sockets", "static", "waiting"):
        assert "horovod" not in imported_at_import(tree_of(ROOT / "membership" / f"{name}.py"))


@in_each_module()
def test_an_adapter_does_not_import_another(path: Path) -> None:
    other = {"torch": "keras", "keras": "torch"}.get(name_of(path).split(".")[0])
    assert other is None or f"horovod_ft.{other}" not in {".".join(n.split(".")[:2]) for n in imports(tree_of(path))}


def test_importing_the_package_imports_no_framework() -> None:
    heavy = sorted(FRAMEWORKS | {"horovod", "matplotlib"})
    script = f"import sys, horovod_ft, horovod_ft.recovery; print([name for name in {heavy} if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == "[]"


# --- the environment -----------------------------------------------------------------------------------------------


def touches_environment(tree: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv")
        and isinstance(node.value, ast.Name) and node.value.id == "os"
        for node in ast.walk(tree)
    ) or any(
        isinstance(node, ast.ImportFrom) and node.module == "os"
        and {alias.name for alias in node.names} & {"environ", "getenv", "putenv"}
        for node in ast.walk(tree)
    )  # fmt: skip


@in_each_module()
def test_the_environment_is_touched_only_where_it_is_listed_here(path: Path) -> None:
    assert not touches_environment(tree_of(path)) or name_of(path) in ENVIRONMENT


@in_each_module(but=("settings",))
def test_only_settings_reads_variables_of_horovod(path: Path) -> None:
    reads = [
        node for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call | ast.Subscript) and _asks_environ(node)
    ]  # fmt: skip
    assert [ast.unparse(node) for node in reads if "HOROVOD" in ast.unparse(node)] == []


def _asks_environ(node: ast.Call | ast.Subscript) -> bool:
    asked = node.func if isinstance(node, ast.Call) else node.value
    return ast.unparse(asked) in ("os.environ", "os.environ.get", "os.environ.pop", "os.getenv")


def test_the_list_of_those_who_touch_the_environment_is_not_longer_than_need_be() -> None:
    touching = {name_of(path) for path in MODULES if touches_environment(tree_of(path))}
    assert touching == ENVIRONMENT.keys() & {name_of(path) for path in MODULES}


# --- module-level state --------------------------------------------------------------------------------------------


@in_each_module()
def test_a_module_says_what_it_is_for(path: Path) -> None:
    assert path.name == "version.py" or ast.get_docstring(tree_of(path))


@in_each_module()
def test_no_function_changes_a_global(path: Path) -> None:
    assert not [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Global)]
