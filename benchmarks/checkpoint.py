"""What does a durable checkpoint cost a training, and how long does it take to restore one?

Three sides in the same job: ours (``elastic.run(checkpoint=...)``), ``torch.save`` by worker 0 with flush and fsync,
and ``torch.distributed.checkpoint.async_save`` over Gloo, as it is by default. One job for each size of the state and
number of workers. It saves with each side, then restores with each, and does so again, with another side first each
time; the first round is to warm up. What is under way has ended before the next thing begins. Files are read from the
page cache, on all sides alike; what was restored is looked at.

The model that is trained has 1.3 M parameters. Most of the state are parameters of 20 MB each that are in it but are
not trained: so 2 GB of state need no 2 GB of gradients, and a step is the same for each size. Our saves are not due by
step number but when the benchmark asks for one: else one of ours could fall into another side's.

- *blocked*: how long the call holds up training, on the slowest worker. Ours: ``held_up_s`` of the event ``saving``.
- *plain copy*: seconds of the slowest worker for a copy in memory, by all at once, of as many bytes as each of them
  writes of ours. A save that copies before training goes on cannot hold it up for less.
- *MB each*: bytes that a worker writes, of the worker that writes most.
- *save*: from its begin to its end, when others can restore it and older ones of ours are gone.
- *speed*: steps a second while a save is under way, as part of those without: median duration of the plain steps of the
  round against that of the steps which lie wholly between the save's begin and end, over all rounds.
- *lost*: all seconds that training lost to a save: from the end of the last step before it to the end of the first one
  after it, less as many plain steps. Blocked time is in it, and so is everything that goes on beside slower steps.
- *restore*: seconds of the slowest worker. Ours: ``duration_s`` of the event ``restored``: reading, exchange, putting
  in place. It lacks the time in which the group is formed anew, which the others do not have either.

A save begins and ends when it does for worker 0. Ratios are medians over the rounds of a round's ratio.

All workers are on this machine. With as many workers as cores or more there is no idle core for what saves: it takes
its time from the steps, though our thread has a low priority. Workers on hosts of their own would lose less.

    python benchmarks/checkpoint.py [--sizes 200 2000] [--workers 1 2 4] [--rounds 5] [--folder DISK] [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import (
    BenchmarkError,
    circumstances,
    console,
    guarded,
    run_workers,
    spread,
    told,
    write_json,
)

SIZES_MB, WORKERS = (200, 2000), (1, 2, 4)
#: In the lines of the workers -> for the reader.
SIDES = {"ours": "ours", "torch": "torch.save", "dcp": "async DCP"}
#: As a user has them: no events, no ledger. Gloo of torch goes where Horovod's goes.
ENV = {"HOROVOD_FT_EVENTS": "", "HOROVOD_FT_LEDGER": "", "GLOO_SOCKET_IFNAME": "lo"}
#: Bound of a job: its start, and each round with so many seconds for a GB of each worker.
START_S, ROUND_S, GB_S = 90.0, 60.0, 30.0
#: Of a worker without any state.
WORKER_BYTES = 0.4e9
#: Checkpoints on the disk at once, in sizes of the state: two of ours, one of each other, and a half to spare.
ON_DISK = 4.5
MAX_ROUNDS = 8

#: Ratio -> the least that it is to be, in every case.
GOALS = {
    "blocked: torch.save / ours": 20.0,
    "blocked: async DCP / ours": 1.0,
    "restore: torch.save / ours": 1.0,
    "restore: async DCP / ours": 1.0,
    "speed while saving": 0.95,
}

Line = Mapping[str, Any]


class Ran(NamedTuple):
    """Cases that were measured, what was not even tried and why, and what went wrong."""

    cases: list[dict[str, Any]]
    left_out: list[str]
    failures: list[str]


@dataclass(frozen=True)
class Round:
    """What the workers of a job put on record in one round.

    Attributes:
        plain: seconds of each step beside which nothing was going on.
        steps: begin and end of all steps, in order.
        saves: side -> that of each worker that wrote something.
        restores: side -> seconds on each worker.
        copies: seconds of a plain copy on each worker.
    """

    plain: list[float]
    steps: list[tuple[float, float]]
    saves: dict[str, list[Line]]
    restores: dict[str, list[float]]
    copies: list[float]

    @classmethod
    def of(cls, lines: Sequence[Line]) -> Round:
        """
        Raises:
            BenchmarkError: a side has not saved or not restored.
        """
        steps = [line for line in lines if line["what"] == "step"]
        saves = {side: [line for line in lines if (line["what"], line["side"]) == ("save", side)] for side in SIDES}
        restores = {
            side: [line["seconds"] for line in lines if (line["what"], line["side"]) == ("restore", side)]
            for side in SIDES
        }
        begun = [any(line["rank"] == 0 for line in its) for its in saves.values()]
        copies = [line["seconds"] for line in lines if line["what"] == "copy"]
        if not all([*begun, *restores.values(), copies]):
            raise BenchmarkError("a job ended in order, but the record of a save or restore is not there")
        return cls([line["ended"] - line["began"] for line in steps if line["side"] == "plain"],
                   sorted((line["began"], line["ended"]) for line in steps), saves, restores, copies)  # fmt: skip

    def blocked_s(self, side: str) -> float:
        return float(max(line["blocked_s"] for line in self.saves[side]))

    def copy_s(self) -> float:
        return max(self.copies)

    def written(self, side: str) -> int:
        return int(max(line["nbytes"] for line in self.saves[side]))

    def restore_s(self, side: str) -> float:
        return max(self.restores[side])

    def save_s(self, side: str) -> float:
        began, ended = self._window(side)
        return ended - began

    def beside(self, side: str) -> list[float]:
        """Seconds of each step that lies wholly in a save, by those of a plain one."""
        began, ended = self._window(side)
        usual = statistics.median(self.plain)
        return [(end - begin) / usual for begin, end in self.steps if began <= begin and end <= ended]

    def lost_s(self, side: str) -> float:
        began, ended = self._window(side)
        before = max(end for _, end in self.steps if end <= began)
        ends = [end for _, end in self.steps if end > before]
        after = min(end for end in ends if end >= ended)
        return after - before - sum(end <= after for end in ends) * statistics.median(self.plain)

    def _window(self, side: str) -> tuple[float, float]:
        first = next(line for line in self.saves[side] if line["rank"] == 0)
        return first["began"], first["ended"]


def measure(size_mb: int, workers: int, rounds: int, folder: Path, files: Path) -> list[Round]:
    """Run one job.

    Args:
        folder: for its log and what it measured.
        files: for its checkpoints; they are gone afterwards.

    Returns:
        the round to warm up, and the others.

    Raises:
        BenchmarkError: it failed.
    """
    files.mkdir()
    arguments = [str(folder), str(files), str(size_mb * 10**6), str(rounds)]
    timeout_s = START_S + (rounds + 2) * (ROUND_S + GB_S * size_mb * workers / 1000)
    try:  # horovodrun takes no single host without a discovery script
        run_workers("checkpoint", arguments, workers, folder, env=ENV, timeout_s=timeout_s, fixed_hosts=workers > 1)
    finally:
        shutil.rmtree(files)
    lines = [json.loads(line) for file in folder.glob("lines-*.jsonl") for line in file.read_text().splitlines()]
    return [Round.of([line for line in lines if line["round"] == number]) for number in range(rounds + 1)]


def case(size_mb: int, workers: int, rounds: Sequence[Round]) -> dict[str, Any]:
    """What a job says, of which the first round does not count."""
    first, *others = rounds
    plain = [seconds for one in others for seconds in one.plain]
    return {
        "case": f"{size_mb} MB, {workers} worker{'s' if workers > 1 else ''}",
        "size_mb": size_mb,
        "workers": workers,
        "plain_step_s": spread(plain),
        "plain_copy_s": spread([one.copy_s() for one in others]),
        "sides": {side: its_side(side, first, others) for side in SIDES},
        "ratios": ratios(others),
    }


def its_side(side: str, first: Round, others: Sequence[Round]) -> dict[str, Any]:
    beside = [part for one in others for part in one.beside(side)]
    return {
        "blocked_s": spread([one.blocked_s(side) for one in others]),
        "first_blocked_s": first.blocked_s(side),
        "written_bytes": statistics.median(one.written(side) for one in others),
        "save_s": spread([one.save_s(side) for one in others]),
        "speed": speed(beside),
        "steps_beside": len(beside),
        "lost_s": spread([one.lost_s(side) for one in others]),
        "restore_s": spread([one.restore_s(side) for one in others]),
    }


def speed(beside: Sequence[float]) -> float | None:
    """Of steps in a save, against others; None if a save is over before a step is."""
    return 1 / statistics.median(beside) if beside else None


def ratios(rounds: Sequence[Round]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for what, of in (("blocked", Round.blocked_s), ("restore", Round.restore_s), ("lost", Round.lost_s)):
        for side in ("torch", "dcp"):
            found[f"{what}: {SIDES[side]} / ours"] = _ratio(of, side, rounds)
    found["speed while saving"] = speed([part for one in rounds for part in one.beside("ours")])
    return found


def _ratio(of: Callable[[Round, str], float], side: str, rounds: Sequence[Round]) -> float | None:
    """None if ours is nothing, or less than nothing, as what is lost can be where times are noisy."""
    pairs = [(of(one, side), of(one, "ours")) for one in rounds]
    return statistics.median(its / ours for its, ours in pairs) if all(ours > 0 for _, ours in pairs) else None


def summarized(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What goes into the JSON file."""
    least: dict[str, dict[str, Any]] = {}
    for ratio in GOALS:
        known = [(one["ratios"][ratio], one["case"]) for one in cases if one["ratios"][ratio] is not None]
        if known:
            value, where = min(known)
            least[ratio] = {"ratio": value, "case": where}
    goals = {f"{ratio} >= {goal:g}": least[ratio]["ratio"] >= goal for ratio, goal in GOALS.items() if ratio in least}
    return {
        "benchmark": "checkpoint", "cases": list(cases), "least": least, "goals": goals, **circumstances(),
    }  # fmt: skip


def show(result: Mapping[str, Any]) -> None:
    table = Table(title="Saves beside a training, and restores; seconds, medians")
    for column in ("MB x workers", "", "blocked", "MB each", "save", "speed", "lost", "restore"):
        table.add_column(column, justify="right" if column else "left", no_wrap=column == "")
    for one in result["cases"]:
        for side, name in SIDES.items():
            its = one["sides"][side]
            table.add_row(
                f"{one['size_mb']} x {one['workers']}", name, f"{its['blocked_s']['median']:.4f}",
                f"{its['written_bytes'] / 1e6:.0f}", f"{its['save_s']['median']:.2f}", percent(its["speed"]),
                f"{its['lost_s']['median']:.2f}", f"{its['restore_s']['median']:.2f}", end_section=side == "dcp",
            )  # fmt: skip
    console.print(table)
    for one in result["cases"]:
        known = ", ".join(f"{name} {value:.2f}" for name, value in one["ratios"].items() if value is not None)
        step_s, copy_s = one["plain_step_s"]["median"], one["plain_copy_s"]["median"]
        console.print(f"{one['case']}, steps of {1000 * step_s:.0f} ms, plain copy {copy_s:.4f} s: {known}")
    for (goal, met), least in zip(result["goals"].items(), result["least"].values(), strict=True):
        console.print(f"{told(goal, met)} (least: {least['ratio']:.2f} with {least['case']})")


def percent(part: float | None) -> str:
    return "" if part is None else f"{100 * part:.0f} %"


def missing_memory(size_mb: int, workers: int, available: int) -> str:
    """Why a case cannot be run; empty if it can. What others copy or read is as large as the state, on each worker."""
    needed = workers * (WORKER_BYTES + 2e6 * size_mb) + 1e6 * size_mb
    if needed <= available:
        return ""
    return (f"{size_mb} MB with {workers} workers needs {needed / 1e9:.0f} GB of memory, and "
            f"{available / 1e9:.0f} GB are available")  # fmt: skip


def check_disk(folder: Path, size_mb: int, free: int) -> None:
    """
    Raises:
        BenchmarkError: the checkpoints would not fit.
    """
    needed = ON_DISK * 1e6 * size_mb
    if needed > free:
        raise BenchmarkError(
            f"the checkpoints need {needed / 1e9:.0f} GB, and {folder} has {free / 1e9:.0f} GB: use --folder or --sizes"
        )


def run_cases(arguments: argparse.Namespace, folder: Path, disk: Path) -> Ran:
    """One after the other; one that fails does not stop the others."""
    ran = Ran([], [], [])
    for size_mb, workers in itertools.product(arguments.sizes, arguments.workers):
        why = missing_memory(size_mb, workers, psutil.virtual_memory().available)
        if why:
            console.print(f"[red]left out:[/red] {why}")
            ran.left_out.append(why)
            continue
        name = f"{size_mb}-{workers}"
        try:
            rounds = measure(size_mb, workers, arguments.rounds, folder / name, disk / name)
        except BenchmarkError as error:
            console.print(f"[red]failed:[/red] {size_mb} MB, {workers} workers")
            ran.failures.append(str(error))
            continue
        ran.cases.append(case(size_mb, workers, rounds))
        one = ran.cases[-1]
        blocked = (f"{title} {one['sides'][side]['blocked_s']['median']:.4f}" for side, title in SIDES.items())
        console.print(f"{one['case']}: seconds blocked: {', '.join(blocked)}")
    return ran


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results as one JSON object")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES_MB), metavar="MB",
                        help="of the state (default: 200 2000)")  # fmt: skip
    parser.add_argument("--workers", type=int, nargs="+", default=list(WORKERS), metavar="N",
                        help="numbers of workers, up to 16 (default: 1 2 4)")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5, help=f"that count, up to {MAX_ROUNDS} (default: 5)")
    parser.add_argument("--folder", type=Path, help="on the disk to write to (default: a temporary one)")
    arguments = parser.parse_args()
    if not 1 <= arguments.rounds <= MAX_ROUNDS or not all(1 <= workers <= 16 for workers in arguments.workers):
        parser.error(f"--rounds must be between 1 and {MAX_ROUNDS}, --workers between 1 and 16")
    if min(arguments.sizes) < 20:
        parser.error("--sizes must be at least 20: so much are the model and its momentum")
    if arguments.folder is not None and not arguments.folder.is_dir():
        parser.error(f"{arguments.folder} is no folder")
    with (
        tempfile.TemporaryDirectory(prefix="horovod_ft-bench-") as folder,
        tempfile.TemporaryDirectory(prefix="horovod_ft-bench-", dir=arguments.folder) as disk,
    ):
        check_disk(Path(disk), max(arguments.sizes), shutil.disk_usage(disk).free)
        ran = run_cases(arguments, Path(folder), Path(disk).resolve())
    if ran.cases:
        result = {
            **summarized(ran.cases), "left_out": ran.left_out, "failures": ran.failures, "rounds": arguments.rounds,
            "folder": str(arguments.folder or "temporary"),
        }  # fmt: skip
        show(result)
        write_json(arguments.json, result)
    for failure in ran.failures:
        print(f"checkpoint.py: {failure}", file=sys.stderr)
    return 1 if ran.failures or not ran.cases else 0


if __name__ == "__main__":
    guarded(main)
