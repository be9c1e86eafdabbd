"""The ledger: what it proves of a run, and what it finds wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from horovod_ft.data import BatchSize, Cursor, Deal, EpochOrder, Place
from horovod_ft.errors import ConfigurationError
from horovod_ft.ledger import Ledger, LedgerReport, Lossy, verify_ledger

SAMPLES = 8
BATCH = 4


class Workers:
    """Workers that write their ledgers as the engine would. Four samples a step, two steps an epoch."""

    def __init__(self, folder: Path, *, drop_last: bool = False, samples: int = SAMPLES) -> None:
        self.folder = folder
        self._cursor = Cursor(EpochOrder(samples, shuffle=True, seed=1), BatchSize(total=BATCH), drop_last=drop_last)
        self._drop_last = drop_last
        self._ledgers: dict[str, Ledger] = {}

    def ledger(self, name: str) -> Ledger:
        if name not in self._ledgers:
            self._ledgers[name] = Ledger(self.folder, f"host:{name}:1")
            self._ledgers[name].describe(length=self._cursor.order.length, drop_last=self._drop_last)
        return self._ledgers[name]

    def deal(self, step: int, rank: int, size: int, generation: int) -> Deal:
        steps = -(-self._cursor.order.length // BATCH)
        place = Place((step - 1) // steps, (step - 1) % steps * BATCH)
        deal = self._cursor.peek(generation=generation, rank=rank, size=size, after=place)
        assert deal is not None
        return deal

    def dealt(self, step: int, names: str, generation: int = 0) -> None:
        """These workers are the group, in order of their ranks; one letter each."""
        for rank, name in enumerate(names):
            self.ledger(name).dealt(step, self.deal(step, rank, len(names), generation))

    def committed(self, step: int, names: str, generation: int = 0) -> None:
        for name in names:
            self.ledger(name).committed(step, generation)

    def failed(self, names: str) -> None:
        for name in names:
            self.ledger(name).discarded()

    def train(self, steps: range, names: str, generation: int = 0) -> None:
        for step in steps:
            self.dealt(step, names, generation)
            self.committed(step, names, generation)

    def verify(self) -> LedgerReport:
        return verify_ledger(self.folder)


@pytest.fixture
def workers(tmp_path: Path) -> Workers:
    return Workers(tmp_path / "ledger")


def edit(workers: Workers, name: str, change: Callable[[list[dict[str, object]]], None]) -> None:
    """Tamper with the records of a worker."""
    path = workers.folder / f"ledger-host-{name}-1.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    change(records)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


# --- runs that are as they should be -------------------------------------------------------------------------------


def test_a_run_without_failures_is_exact(workers: Workers) -> None:
    workers.train(range(1, 5), "abc")
    report = workers.verify()
    assert (report.exact, report.steps, report.epochs, report.samples) == (True, 4, 2, 16)


def test_a_run_that_stops_within_an_epoch_is_exact_as_far_as_it_went(workers: Workers) -> None:
    workers.train(range(1, 4), "abc")
    report = workers.verify()
    assert (report.exact, report.epochs, report.samples) == (True, 1, 12)


def test_a_mini_batch_that_is_replayed_by_the_survivors_counts_once(workers: Workers) -> None:
    workers.train(range(1, 2), "abc")
    workers.dealt(2, "abc")  # b dies here
    workers.failed("ac")
    workers.train(range(2, 5), "ac", generation=1)
    assert workers.verify() == LedgerReport(steps=4, epochs=2, samples=16)


def test_the_share_of_a_worker_that_died_counts_if_the_survivors_have_its_gradient(workers: Workers) -> None:
    workers.dealt(1, "abc")
    workers.committed(1, "ac")  # b died before its own commit
    workers.train(range(2, 5), "ac", generation=1)
    assert workers.verify().exact


def test_a_laggard_that_is_brought_forward_need_not_have_committed_the_step_itself(workers: Workers) -> None:
    workers.dealt(1, "abc")
    workers.committed(1, "a")
    workers.failed("abc")
    workers.train(range(2, 5), "abc", generation=1)
    assert workers.verify().exact


def test_a_step_that_only_a_dead_worker_committed_is_superseded_by_the_survivors(workers: Workers) -> None:
    workers.dealt(1, "abc")
    workers.committed(1, "b")  # and b dies before anybody else has all gradients
    workers.failed("ac")
    workers.train(range(1, 5), "ac", generation=1)
    assert workers.verify() == LedgerReport(steps=4, epochs=2, samples=16)


def test_a_replay_of_a_step_whose_first_update_was_applied_belongs_to_the_group_that_computed_it(
    workers: Workers,
) -> None:
    workers.dealt(1, "abc")
    workers.failed("ac")
    workers.dealt(1, "ac", generation=1)
    workers.committed(1, "ac", generation=0)
    workers.train(range(2, 5), "ac", generation=1)
    assert workers.verify().exact


def test_idle_workers_contribute_nothing(workers: Workers) -> None:
    workers.train(range(1, 5), "abcdef")
    assert workers.verify().samples == 16


def test_a_step_may_hold_several_batches_even_of_two_epochs(workers: Workers) -> None:
    for batches, step in (((1,), 1), ((2, 3), 2), ((4,), 3)):
        for rank, name in enumerate("ab"):
            for batch in batches:
                workers.ledger(name).dealt(step, workers.deal(batch, rank, 2, 0))
            workers.ledger(name).committed(step, 0)
    assert workers.verify() == LedgerReport(steps=3, epochs=2, samples=16)


def test_what_drop_last_leaves_out_is_not_missed(tmp_path: Path) -> None:
    workers = Workers(tmp_path, drop_last=True, samples=9)
    for step, start in ((1, Place(0, 0)), (2, Place(0, 4)), (3, Place(1, 0))):
        deal = workers._cursor.peek(generation=0, rank=0, size=1, after=start)
        assert deal is not None
        workers.ledger("a").dealt(step, deal)
        workers.ledger("a").committed(step, 0)
    report = workers.verify()
    assert (report.exact, report.epochs, report.samples) == (True, 0, 12)


# --- what can be wrong ---------------------------------------------------------------------------------------------


def test_a_sample_that_was_lost_is_found(workers: Workers) -> None:
    workers.train(range(1, 4), "ab")
    edit(workers, "a", lambda records: records[1].update(ids=[]))
    assert workers.verify().problems == [
        "step 1: 2 samples were trained on, its global batch has 4",
        "epoch 0: 2 of 8 samples were never trained on",
    ]


def test_a_sample_that_was_repeated_is_found(workers: Workers) -> None:
    workers.train(range(1, 3), "ab")
    edit(workers, "a", lambda records: records[1].update(ids=records[3]["ids"]))
    assert workers.verify().problems == ["epoch 0: 2 samples were trained on more than once"]


def test_a_step_that_nobody_committed_is_found(workers: Workers) -> None:
    workers.train(range(1, 2), "ab")
    workers.train(range(3, 5), "ab")
    assert "steps that nobody committed: [2]" in workers.verify().problems


def test_two_living_workers_that_claim_different_groups_for_a_step_are_found(workers: Workers) -> None:
    workers.dealt(1, "ab")
    workers.committed(1, "a", generation=0)
    workers.failed("b")
    workers.dealt(1, "ba", generation=1)
    workers.committed(1, "b", generation=1)
    problems = workers.verify().problems
    assert len(problems) == 1
    assert problems[0].startswith("step 1 was committed as (1, ")
    assert "by host-a-1, as (0, " in problems[0]


def test_two_workers_that_claim_different_samples_for_a_step_are_found(workers: Workers) -> None:
    workers.ledger("a").dealt(1, workers.deal(1, 0, 2, 0))
    workers.ledger("b").dealt(1, workers.deal(2, 1, 2, 0))
    workers.committed(1, "ab")
    assert any(problem.startswith("step 1 was committed as") for problem in workers.verify().problems)


def test_workers_with_datasets_of_different_lengths_are_found(workers: Workers, tmp_path: Path) -> None:
    workers.train(range(1, 3), "a")
    Ledger(workers.folder, "host:z:1").describe(length=9, drop_last=False)
    assert workers.verify().problems[0].startswith("workers disagree on the length of the dataset")


def test_a_run_without_a_committed_step_proves_nothing(workers: Workers) -> None:
    workers.dealt(1, "ab")
    assert not workers.verify().exact


def test_a_folder_without_a_ledger_is_an_error_that_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds no ledger: run with HOROVOD_FT_LEDGER="):
        verify_ledger(tmp_path)


# --- writing -------------------------------------------------------------------------------------------------------


def test_a_ledger_that_is_switched_off_does_nothing(workers: Workers) -> None:
    off = Ledger(None)
    off.describe(length=SAMPLES, drop_last=False)
    off.dealt(1, workers.deal(1, 0, 1, 0))
    off.committed(1, 0)
    assert not workers.folder.exists()


def test_what_was_dealt_is_on_record_before_the_step_ends(workers: Workers) -> None:
    workers.dealt(1, "a")
    records = [json.loads(line) for line in (workers.folder / "ledger-host-a-1.jsonl").read_text().splitlines()]
    assert [record["kind"] for record in records] == ["stream", "dealt"]


def test_a_discarded_deal_is_no_part_of_the_step_that_is_committed(workers: Workers) -> None:
    workers.dealt(1, "a")
    workers.failed("a")
    workers.dealt(1, "a", generation=1)
    workers.committed(1, "a", generation=1)
    last = json.loads((workers.folder / "ledger-host-a-1.jsonl").read_text().splitlines()[-1])
    assert last["ranges"] == [[0, 0, 4]]


def test_a_folder_that_cannot_be_written_to_names_the_variable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="HOROVOD_FT_LEDGER"):
        Ledger(tmp_path / "file" / "below", "w")


# --- steps that were carried forward ---------------------------------------------------------------------------------


def carried_forward(workers: Workers, *, noted: str = "ab") -> None:
    """Worker b dies in step 2; a finishes it. ``noted``: who has written down what it was dealt."""
    workers.train(range(1, 2), "ab")
    deals = {"a": workers.deal(2, 0, 2, 0), "b": workers.deal(2, 1, 2, 0)}
    for name in noted:
        workers.ledger(name).dealt(2, deals[name])
    workers.ledger("a").lossy(2, 0, deals["b"].ids.tolist(), 30, 120)
    workers.committed(2, "a", generation=0)


def test_samples_that_lost_weight_are_accounted_for(tmp_path: Path) -> None:
    workers = Workers(tmp_path)
    carried_forward(workers)
    report = workers.verify()
    assert report.complete
    assert not report.exact
    assert (report.steps, report.samples, report.epochs) == (2, SAMPLES, 1)
    assert report.lossy == {2: Lossy(tuple(workers.deal(2, 1, 2, 0).ids.tolist()), 30, 120)}


def test_a_worker_that_died_before_it_noted_its_share_leaves_no_hole(tmp_path: Path) -> None:
    workers = Workers(tmp_path)
    carried_forward(workers, noted="a")
    report = workers.verify()
    assert report.complete
    assert (report.samples, report.epochs) == (SAMPLES, 1)


def test_a_step_that_was_computed_again_after_all_has_lost_nothing(tmp_path: Path) -> None:
    workers = Workers(tmp_path)
    workers.train(range(1, 2), "ab")
    workers.dealt(2, "ab")
    workers.ledger("a").lossy(2, 0, workers.deal(2, 1, 2, 0).ids.tolist(), 30, 120)
    workers.failed("a")
    workers.train(range(2, 3), "a", generation=2)
    assert workers.verify().exact


def test_of_two_tries_to_go_forward_the_one_that_lost_more_counts(tmp_path: Path) -> None:
    workers = Workers(tmp_path)
    carried_forward(workers)
    workers.ledger("a").lossy(2, 0, [1], 10, 120)
    assert workers.verify().lossy[2].elements == 30


# --- going back to an earlier step ---------------------------------------------------------------------------------


def went_back(workers: Workers, step: int, names: str, generation: int) -> None:
    for name in names:
        workers.ledger(name).went_back(step, generation)


def test_steps_that_were_given_up_and_computed_again_count_once(tmp_path: Path) -> None:
    workers = Workers(tmp_path)
    workers.train(range(1, 4), "ab")
    went_back(workers, 1, "ab", 1)
    workers.train(range(2, 5), "ab", generation=1)
    report = workers.verify()
    assert report.exact, report.problems
    assert (report.steps, report.epochs, report.samples, report.redone) == (4, 2, 16, 2)


def test_steps_that_were_given_up_and_not_computed_again_do_not_count(tmp_path: Path) -> None:
    workers = Workers(tmp_path)
    workers.train(range(1, 4), "ab")
    went_back(workers, 2, "ab", 1)
    report = workers.verify()
    assert report.exact, report.problems
    assert (report.steps, report.samples, report.redone) == (2, 8, 1)


def test_a_worker_that_does_not_go_back_with_the_others_is_found(tmp_path: Path) -> None:
    workers = Workers(tmp_path)
    workers.train(range(1, 4), "ab")
    went_back(workers, 1, "ab", 1)
    workers.train(range(2, 4), "ab", generation=1)
    workers.train(range(4, 5), "a", generation=1)
    workers.dealt(4, "b")
    workers.committed(4, "b", generation=2)
    assert not workers.verify().exact


def test_going_back_twice(tmp_path: Path) -> None:
    workers = Workers(tmp_path)
    workers.train(range(1, 5), "ab")
    went_back(workers, 3, "ab", 1)
    workers.train(range(4, 5), "ab", generation=1)
    went_back(workers, 1, "ab", 2)
    workers.train(range(2, 5), "a", generation=2)
    report = workers.verify()
    assert report.exact, report.problems
    assert (report.steps, report.redone) == (4, 4)


# --- several attempts at a job -------------------------------------------------------------------------------------

#: The first generation of the second attempt.
AGAIN = 100_000


def test_an_attempt_that_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    workers = Workers(tmp_path)
    workers.train(range(1, 4), "ab")
    workers.ledger("c").went_back(2, AGAIN)
    workers.train(range(3, 5), "c", AGAIN)
    report = workers.verify()
    assert report.exact
    assert (report.steps, report.since, report.epochs, report.redone) == (4, 0, 2, 1)


def test_an_attempt_that_begins_anew(tmp_path: Path) -> None:
    workers = Workers(tmp_path)
    workers.train(range(1, 3), "ab")
    workers.ledger("c").went_back(0, AGAIN)
    workers.train(range(1, 5), "c", AGAIN)
    report = workers.verify()
    assert report.exact
    assert (report.steps, report.redone) == (4, 2)


def test_a_step_that_an_attempt_leaves_out_is_missed(tmp_path: Path) -> None:
    workers = Workers(tmp_path)
    workers.train(range(1, 3), "ab")
    workers.ledger("c").went_back(2, AGAIN)
    workers.train(range(4, 5), "c", AGAIN)
    assert workers.verify().problems[0] == "steps that nobody committed: [3]"


def test_a_run_that_goes_on_from_the_checkpoint_of_another(tmp_path: Path) -> None:
    """Its ledger begins in the middle of an epoch, of which the other run has trained the first half."""
    workers = Workers(tmp_path)
    workers.ledger("a").went_back(1, 0)
    workers.train(range(2, 5), "a")
    report = workers.verify()
    assert report.exact
    assert (report.steps, report.since, report.epochs) == (4, 1, 1)
