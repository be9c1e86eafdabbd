"""Fault plans: what can be said, and what is refused with the place and the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from horovod_ft.errors import ConfigurationError, FaultPlanError
from horovod_ft.faults.plan import KINDS, PHASES, Fault, parse_plan


def entry(**fields: object) -> str:
    texts = {name: f'"{value}"' if isinstance(value, str) else value for name, value in fields.items()}
    return "[[fault]]\n" + "\n".join(f"{name} = {text}" for name, text in texts.items()) + "\n"


def test_an_entry_is_read() -> None:
    text = entry(worker=2, step=11, phase="allreduce", after=3, kind="kill")
    assert parse_plan(text) == (Fault(phase="allreduce", worker=2, step=11, after=3, kind="kill"),)


def test_without_more_words_a_worker_is_killed_in_the_first_step() -> None:
    assert parse_plan(entry(worker=0, phase="data")) == (Fault(phase="data", worker=0, step=1, kind="kill"),)


def test_entries_keep_their_order() -> None:
    plan = parse_plan(entry(worker=1, phase="data") + entry(worker=0, phase="data"))
    assert [fault.worker for fault in plan] == [1, 0]


def test_a_plan_may_lie_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(entry(host="node7", phase="forward"))
    assert parse_plan(str(path)) == (Fault(phase="forward", host="node7"),)


@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_is_accepted(phase: str) -> None:
    assert parse_plan(entry(worker=0, phase=phase))[0].phase == phase


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_accepted(kind: str) -> None:
    seconds = {"seconds": 1.5} if kind == "slow" else {}
    assert parse_plan(entry(worker=0, phase="allreduce", kind=kind, **seconds))[0].kind == kind


@pytest.mark.parametrize(
    ("fault", "start_rank", "host", "hit"),
    [
        (Fault("data", worker=2), 2, "a", True),
        (Fault("data", worker=2), 1, "a", False),
        (Fault("data", host="a"), 7, "a", True),
        (Fault("data", host="a"), 7, "b", False),
    ],
)
def test_a_fault_hits_a_worker_or_all_of_a_host(fault: Fault, start_rank: int, host: str, hit: bool) -> None:
    assert fault.hits(start_rank, host) is hit


def test_a_fault_reads_as_a_sentence() -> None:
    fault = Fault("allreduce", worker=2, step=11, after=3)
    assert str(fault) == "kill worker 2 at step 11 in allreduce after 3 gradients"
    assert str(Fault("data", kind="stop", host="a")) == "stop host a at step 1 in data"


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"phase": "data"}, "give worker .* or host, one of them"),
        ({"phase": "data", "worker": 1, "host": "a"}, "give worker .* or host, one of them"),
        ({"phase": "data", "worker": -1}, "worker is a start rank, 0 or more"),
        ({"phase": "data", "worker": 1, "step": 0}, "steps are counted from 1"),
        ({"phase": "data", "worker": 1, "after": 1}, "after counts reduced gradients.* in phase allreduce only"),
        ({"phase": "allreduce", "worker": 1, "after": -1}, "after counts reduced gradients"),
        ({"phase": "data", "worker": 1, "kind": "slow"}, "slow needs seconds"),
        ({"phase": "data", "worker": 1, "kind": "lose"}, "lose is for phase allreduce only"),
        ({"phase": "data", "worker": 1, "kind": "kill", "seconds": 1.0}, "seconds is .* for slow and stop only"),
        ({"phase": "data", "worker": 1, "kind": "stop", "seconds": 0.0}, "seconds is a positive number"),
    ],
)
def test_an_entry_that_can_never_fire_is_refused_with_its_number(fields: dict[str, object], said: str) -> None:
    plan = entry(worker=0, phase="data", step=9) + entry(**fields)
    with pytest.raises(FaultPlanError, match=rf"in HOROVOD_FT_FAULTS is wrong: entry 2 \(.*\): {said}"):
        parse_plan(plan)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"phase": "lunch", "worker": 1}, r"Invalid enum value 'lunch' - at `\$.fault\[0\].phase`"),
        ({"phase": "data", "worker": 1, "kind": "explode"}, "explode"),
        ({"phase": "data", "worker": "one"}, r"\$.fault\[0\].worker"),
        ({"phase": "data", "wroker": 1}, "wroker"),
        ({"worker": 1}, "missing required field `phase`"),
    ],
)
def test_a_field_that_is_wrong_is_named(fields: dict[str, object], said: str) -> None:
    with pytest.raises(FaultPlanError, match=said):
        parse_plan(entry(**fields))


def test_text_that_is_no_toml_is_refused_with_the_line() -> None:
    with pytest.raises(FaultPlanError, match=r"the fault plan in HOROVOD_FT_FAULTS is wrong: .*line 1"):
        parse_plan("fault = ]")


@pytest.mark.parametrize("text", ["fault = []", "# a = b"])
def test_a_plan_without_an_entry_is_refused(text: str) -> None:
    with pytest.raises(FaultPlanError, match=r"has no \[\[fault\]\] entry"):
        parse_plan(text)


def test_an_entry_that_stands_twice_is_refused() -> None:
    with pytest.raises(FaultPlanError, match="more than one entry says: kill worker 1 at step 3 in data"):
        parse_plan(entry(worker=1, step=3, phase="data") * 2)


def test_a_file_that_is_not_there_is_named_with_what_was_expected(tmp_path: Path) -> None:
    missing = tmp_path / "plan.toml"
    with pytest.raises(FaultPlanError) as raised:
        parse_plan(str(missing))
    message = str(raised.value)
    assert message.startswith(f"cannot read the fault plan {missing}: ")
    assert message.endswith("HOROVOD_FT_FAULTS is the path of a TOML file or TOML itself")


def test_a_file_with_a_wrong_entry_is_named(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(entry(phase="data"))
    with pytest.raises(FaultPlanError, match=rf"the fault plan {path} is wrong: entry 1"):
        parse_plan(str(path))


def test_a_wrong_plan_is_a_wrong_configuration() -> None:
    assert issubclass(FaultPlanError, ConfigurationError)
