"""The pages in docs/: their Python blocks run, and what they say about them is true."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import horovod_ft
from horovod_ft.checkpoint.layout import MANIFEST, VALUES, folder_name, shard_name
from horovod_ft.cli.main import main
from horovod_ft.policies.rollback import MiniBatchRollback
from horovod_ft.policy import EVERY_DECISION, MISSING, Costs, Failure, Forward, RecoveryPolicy, Replay, decisions_of
from horovod_ft.policy_names import ENTRY_POINTS, parse_policy
from horovod_ft.settings import PREFIX
from horovod_ft.testing import check_policy
from tests.unit.test_policy import FAILURE

DOCS = Path(horovod_ft.__file__).parents[1] / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def blocks(page: Path, language: str) -> list[str]:
    """The text of each fenced block of a language, after as many empty lines as come before it in the page."""
    text = page.read_text()
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return ["\n" * text.count("\n", 0, block.start(1)) + block[1] for block in found]


def executed(page: Path) -> dict[str, Any]:
    """The names that the Python blocks of a page define, run in order. A traceback shows the line in the page."""
    names: dict[str, Any] = {"__name__": page.stem}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec", dont_inherit=True), names)
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_python_blocks_of_a_page_run(page: Path) -> None:
    executed(page)


# --- writing_a_policy ----------------------------------------------------------------------------------------------

PAGE = DOCS / "writing_a_policy.md"


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    return executed(PAGE)


@pytest.fixture(scope="module")
def careful(names: dict[str, Any]) -> Callable[..., RecoveryPolicy]:
    policy: Callable[..., RecoveryPolicy] = names["CarefulForward"]
    return policy


def losing(part: float) -> Failure:
    """Of ten workers one is lost, and this part of the update is missing."""
    survivors = tuple(range(1, 10))
    return replace(FAILURE, lost=(0,), survivors=survivors, size_before=10, size_after=9, shares=10,
                   shares_lost=1, elements=1000, elements_done=round(1000 * (1 - part)),
                   costs=Costs(0.2, 0.1))  # fmt: skip


def test_the_policy_keeps_to_the_contract(careful: Callable[..., RecoveryPolicy]) -> None:
    check_policy(careful())
    check_policy(careful(0.0) | MiniBatchRollback())


def test_the_policy_fits_in_ten_lines(careful: Callable[..., RecoveryPolicy]) -> None:
    block = blocks(PAGE, "python")[0]
    body = block[block.index("@dataclass") :].splitlines()
    assert len([line for line in body if line.strip() and '"""' not in line]) <= 10


def test_it_goes_forward_if_little_is_lost(careful: Callable[..., RecoveryPolicy]) -> None:
    assert careful()(losing(1.0)) == Forward()
    assert careful(max_loss=0.05)(losing(0.5)) == Forward()


def test_it_replays_if_more_is_lost(careful: Callable[..., RecoveryPolicy]) -> None:
    assert careful(max_loss=0.05)(losing(0.51)) == Replay()
    assert careful()(replace(losing(1.0), lost=(0, 1), shares_lost=2, survivors=tuple(range(2, 10)))) == Replay()


def test_it_replays_if_the_way_forward_is_closed(careful: Callable[..., RecoveryPolicy]) -> None:
    closed = replace(losing(0.0), closed="worker 0 was elsewhere", elements=0, elements_done=0)
    assert careful()(closed) == Replay()


def test_it_hands_over_after_three_failures_in_a_row(careful: Callable[..., RecoveryPolicy]) -> None:
    assert careful()(replace(losing(0.0), consecutive=3)) == Forward()
    assert careful()(replace(losing(0.0), consecutive=4)) is None


def test_the_combination_asks_the_next_one_then(names: dict[str, Any]) -> None:
    assert names["policy"](replace(losing(0.0), consecutive=4)) == Replay()
    assert decisions_of(names["policy"]) == EVERY_DECISION


def test_its_own_tests_pass(names: dict[str, Any]) -> None:
    tests = [value for name, value in names.items() if name.startswith("test_") and inspect.isfunction(value)]
    assert len(tests) == 3
    for test in tests:
        test()


def test_the_table_of_the_failure_has_every_field_once() -> None:
    table = PAGE.read_text().partition("| field of `Failure` |")[2].partition("\n\n")[0]
    told = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(told) == sorted(field.name for field in fields(Failure))


def test_the_costs_are_all_told() -> None:
    assert all(f"`{field.name}`" in PAGE.read_text() for field in fields(Costs))


def test_every_decision_and_every_way_with_what_is_missing_is_told() -> None:
    table = PAGE.read_text().partition("| decision |")[2].partition("\n\n")[0]
    assert all(f"| `{kind.__name__}(" in table for kind in EVERY_DECISION)
    assert all(f'`"{way}"`' in table for way in MISSING)


def test_it_is_registered_under_the_group_that_is_looked_up() -> None:
    (toml,) = blocks(PAGE, "toml")
    assert f'[project.entry-points."{ENTRY_POINTS}"]' in toml


def test_the_variable_names_it_as_it_is_read(careful: Callable[..., RecoveryPolicy]) -> None:
    (line,) = blocks(PAGE, "bash")
    text = re.search(rf'{PREFIX}POLICY="([^"]*)"', line)
    assert text is not None
    policy = parse_policy(text[1], {"careful": careful, "rollback": MiniBatchRollback})
    assert policy == careful(max_loss=0.05) | MiniBatchRollback()


# --- checkpoints ---------------------------------------------------------------------------------------------------


def test_the_storage_of_the_page_keeps_to_the_contract() -> None:
    executed(DOCS / "checkpoints.md")["test_it_keeps_to_the_contract"]()


@pytest.mark.parametrize("line", "".join(blocks(DOCS / "checkpoints.md", "bash")).strip().splitlines())
def test_the_commands_of_the_page_are_taken(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They find no store, and say so; wrong options would be told before that."""
    words = shlex.split(line.partition("#")[0])[1:]
    with pytest.raises(SystemExit):
        main(words)
    told = capsys.readouterr()
    assert "Usage" not in told.err
    assert "/shared/run" in told.out + told.err or "nothing to prune" in told.out


def test_the_page_names_files_as_they_are() -> None:
    text = (DOCS / "checkpoints.md").read_text()
    for name in (folder_name(1234, "9f3c2a71d0b84e65"), shard_name(0, 4), VALUES, MANIFEST):
        assert name in text
