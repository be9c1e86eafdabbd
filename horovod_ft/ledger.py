"""The ledger: who was dealt which samples, and which steps were committed. Proof that no sample was lost or repeated.

Each worker appends to a file of its own: a ``dealt`` record before a batch is trained on, with the ids it really got,
and a ``committed`` record when the step is final. A worker that dies between the two has left its ``dealt`` record, and
the survivors' ``committed`` record says whether that share went into the weights.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from horovod_ft.data import Deal
from horovod_ft.errors import ConfigurationError
from horovod_ft.events import JsonLines, file_name
from horovod_ft.settings import writable_folder


class Ledger:
    """The writing side. With ``folder=None`` every call does nothing.

    Args:
        folder: where the file of this worker goes; made if need be.
        worker: name of this worker for its whole life.
    """

    def __init__(self, folder: Path | None, worker: str = "") -> None:
        self._lines: JsonLines | None = None
        self._open: list[Deal] = []
        if folder is not None:
            writable_folder(folder, "HOROVOD_FT_LEDGER")
            self._lines = JsonLines(folder / f"ledger-{file_name(worker)}.jsonl")

    def describe(self, *, length: int, drop_last: bool) -> None:
        """Say once what the stream is made of."""
        self._write(kind="stream", length=length, drop_last=drop_last)

    def dealt(self, step: int, deal: Deal) -> None:
        """This worker is about to train on a deal; ``step`` is the step it will belong to once committed."""
        if self._lines is None:
            return
        self._open.append(deal)
        ids = [] if deal.idle else deal.ids.tolist()
        where = {"generation": deal.generation, "rank": deal.rank, "size": deal.size, "epoch": deal.epoch}
        self._write(kind="dealt", step=step, **where, ids=ids)

    def committed(self, step: int, generation: int) -> None:
        """The step is final; its update was computed by the group of ``generation``."""
        if self._lines is None:
            return
        ranges = [(deal.epoch, deal.start, deal.stop) for deal in self._open]
        self._write(kind="committed", step=step, generation=generation, ranges=ranges)
        self._open.clear()

    def lossy(self, step: int, generation: int, ids: list[int], elements: int, of: int) -> None:
        """The samples ``ids``, dealt in ``generation``, do not count in ``elements`` of the ``of`` of an update."""
        self._write(kind="lossy", step=step, generation=generation, ids=ids, elements=elements, of=of)

    def went_back(self, step: int, generation: int) -> None:
        """From ``generation`` on training goes on from an earlier step: what was committed after it counts no more."""
        self._write(kind="back", step=step, generation=generation)

    def discarded(self) -> None:
        """What was dealt since the last commit will be dealt again."""
        self._open.clear()

    def _write(self, **record: Any) -> None:
        if self._lines is not None:
            self._lines.write(json.dumps(record, separators=(",", ":")))


class Lossy(NamedTuple):
    """One step of lossy forward recovery.

    Attributes:
        ids: samples of the workers that died in it.
        elements: elements of its update in which they do not count.
        of: elements of its update.
    """

    ids: tuple[int, ...]
    elements: int
    of: int


@dataclass
class LedgerReport:
    """What the ledger of a run proves.

    Attributes:
        steps: committed steps; over all attempts at the job that have left their records here.
        since: the run goes on from this step of another one, whose ledger is elsewhere.
        epochs: epochs whose every sample was visited exactly once, of those that began here.
        samples: samples applied, over all epochs.
        lossy: step -> what was carried forward without the dead workers' share.
        redone: how often a committed step was given up by going back to an earlier one.
        problems: everything that is not as it should be, one sentence each.
    """

    steps: int = 0
    since: int = 0
    epochs: int = 0
    samples: int = 0
    lossy: dict[int, Lossy] = field(default_factory=dict)
    redone: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Every sample of every finished epoch exactly once, every step committed once, everywhere alike."""
        return self.complete and not self.lossy

    @property
    def complete(self) -> bool:
        """As ``exact``, but some samples may have lost weight, which ``lossy`` accounts for."""
        return not self.problems and self.steps > 0


def verify_ledger(folder: Path) -> LedgerReport:
    """Read the files of all workers and check them against each other.

    Raises:
        ConfigurationError: the folder holds no ledger.
    """
    records = list(_read(folder))
    if not records:
        raise ConfigurationError(f"{folder} holds no ledger: run with HOROVOD_FT_LEDGER={folder}")
    report = LedgerReport()
    stream = _one_of(report, "length of the dataset", [(r["length"], r["drop_last"]) for r in _kind(records, "stream")])
    final = _final_steps(report, records)
    dealt: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for record in _kind(records, "dealt"):
        dealt[record["step"], record["generation"]].append(record)
    lossy = _lossy(records)
    visited: dict[int, list[int]] = defaultdict(list)
    for step, (generation, ranges) in sorted(final.items()):
        trained = sum(len(record["ids"]) for record in dealt[step, generation])
        if (step, generation) in lossy:
            report.lossy[step] = lossy[step, generation]
            noted = {sample for record in dealt[step, generation] for sample in record["ids"]}
            died_before_it_noted = [sample for sample in report.lossy[step].ids if sample not in noted]
            visited[ranges[0][0]].extend(died_before_it_noted)
            trained += len(died_before_it_noted)
        expected = sum(stop - start for _, start, stop in ranges)
        if trained != expected:
            report.problems.append(f"step {step}: {trained} samples were trained on, its global batch has {expected}")
        for record in dealt[step, generation]:
            visited[record["epoch"]].extend(record["ids"])
        report.samples += trained
    report.steps = report.since + len(final)
    _check_epochs(report, visited, stream)
    return report


def _lossy(records: list[dict[str, Any]]) -> dict[tuple[int, int], Lossy]:
    """Step and generation -> what was lost. If the going forward failed once itself, the most that anybody noted."""
    found: dict[tuple[int, int], Lossy] = {}
    for record in sorted(_kind(records, "lossy"), key=lambda record: int(record["elements"])):
        found[record["step"], record["generation"]] = Lossy(tuple(record["ids"]), record["elements"], record["of"])
    return found


def _read(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("ledger-*.jsonl")):
        for line in path.read_text().splitlines():
            yield {**json.loads(line), "worker": path.stem.removeprefix("ledger-")}


def _kind(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record for record in records if record["kind"] == kind]


def _one_of(report: LedgerReport, what: str, values: list[Any]) -> Any:
    if len(set(values)) > 1:
        report.problems.append(f"workers disagree on the {what}: {sorted(set(values))}")
    return values[0] if values else None


def _final_steps(report: LedgerReport, records: list[dict[str, Any]]) -> dict[int, tuple[int, list[list[int]]]]:
    """For each committed step the generation that computed it and its ranges; workers must agree.

    A worker can commit a step and die before anybody else has: the survivors compute it again in a later generation.
    Then theirs counts, and nobody who claims the earlier one may have lived to see the later generation.
    """
    final: dict[int, tuple[int, list[list[int]]]] = {}
    newest: dict[str, int] = defaultdict(int)
    for record in _kind(records, "dealt") + _kind(records, "committed"):
        newest[record["worker"]] = max(newest[record["worker"]], record["generation"])
    backs = _kind(records, "back")
    given_up: set[tuple[int, int]] = set()
    for record in sorted(_kind(records, "committed"), key=lambda record: -record["generation"]):
        if _given_up(record, backs):
            given_up.add((record["step"], record["generation"]))
            continue
        step, claim = record["step"], (record["generation"], record["ranges"])
        wins = final.setdefault(step, claim)
        superseded = claim[0] < wins[0] and newest[record["worker"]] < wins[0]
        if claim != wins and not superseded:
            report.problems.append(f"step {step} was committed as {wins} and, by {record['worker']}, as {claim}")
    report.redone = len(given_up)
    report.since = _since(records, backs)
    missing = sorted(set(range(report.since + 1, max(final, default=0) + 1)) - set(final))
    if missing:
        report.problems.append(f"steps that nobody committed: {missing}")
    return final


def _since(records: list[dict[str, Any]], backs: list[dict[str, Any]]) -> int:
    """The step that the run began with: not 0 if its first group has restored a checkpoint of another run."""
    first = min((record["generation"] for record in records if "generation" in record), default=0)
    return max((back["step"] for back in backs if back["generation"] == first), default=0)


def _given_up(committed: dict[str, Any], backs: list[dict[str, Any]]) -> bool:
    """Whether the group has gone back to an earlier step since."""
    return any(back["step"] < committed["step"] and committed["generation"] < back["generation"] for back in backs)


def _check_epochs(report: LedgerReport, visited: dict[int, list[int]], stream: tuple[int, bool] | None) -> None:
    last = max(visited, default=-1)
    for epoch, ids in sorted(visited.items()):
        repeated = len(ids) - len(set(ids))
        if repeated:
            report.problems.append(f"epoch {epoch}: {repeated} samples were trained on more than once")
        length, drop_last = stream if stream is not None else (len(ids), False)
        complete = len(set(ids)) == length
        begun_elsewhere = report.since > 0 and epoch == min(visited)
        report.epochs += complete
        if not complete and epoch != last and not drop_last and not begun_elsewhere:
            report.problems.append(f"epoch {epoch}: {length - len(set(ids))} of {length} samples were never trained on")
