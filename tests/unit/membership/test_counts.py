"""Flags of all workers in one sum."""

from __future__ import annotations

import pytest

from horovod_ft.membership.base import FLAGS
from horovod_ft.membership.counts import fields_of, flags_of

EVERY = (1 << FLAGS) - 1


@pytest.mark.parametrize("workers", [1, 2, 8, 16, 4095])
@pytest.mark.parametrize("flags", range(EVERY + 1))
def test_all_workers_can_say_the_same(workers: int, flags: int) -> None:
    assert flags_of(workers * fields_of(flags)) == flags


def test_who_says_no_to_one_takes_nothing_away() -> None:
    assert flags_of(fields_of(0b01001) + fields_of(0b00001) + fields_of(0)) == 0b01001


def test_the_sum_of_most_workers_is_a_number_of_64_bits() -> None:
    assert 0 <= 4095 * fields_of(EVERY) < 2**63
