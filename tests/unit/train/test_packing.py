"""Which records a step sees."""

from __future__ import annotations

import numpy as np
import pytest
from support.training_data import random_records, record

from headstart.train.options import TrainOptions, resolve
from headstart.train.packing import Row, fit, pack, plan_epoch
from headstart.train.targets import count

RECORDS = random_records(50)


def names(steps: list[list[Row]]) -> list[list[list[str]]]:
    return [[row.names for row in step] for step in steps]


@pytest.mark.parametrize(
    "sizes", [{"batch_tokens": 150}, {"batch_sequences": 7}], ids=["tokens", "sequences"]
)
def test_an_epoch_has_every_record_once_in_steps_of_about_equal_size(sizes: dict[str, int]) -> None:
    options = resolve(TrainOptions(pack_tokens=40, **sizes))
    steps = plan_epoch(RECORDS, options, 0)
    flat = [name for step in names(steps) for row in step for name in row]
    assert sorted(flat) == sorted(one.id for one in RECORDS)
    for step in steps:
        assert all(row.documents.num_rows <= 40 for row in step)
    if "batch_sequences" in sizes:
        assert {sum(len(row.names) for row in step) for step in steps} <= {6, 7}
    else:
        tokens = [sum(row.documents.num_rows for row in step) for step in steps]
        assert min(tokens) > 100 and max(tokens) < 200


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    options = resolve(TrainOptions(batch_tokens=150))
    first = names(plan_epoch(RECORDS, options, 0))
    assert names(plan_epoch(list(RECORDS), options, 0)) == first
    assert names(plan_epoch(RECORDS, options, 1)) != first
    other = resolve(TrainOptions(batch_tokens=150, seed=1))
    assert names(plan_epoch(RECORDS, other, 0)) != first


def test_rows_are_filled_longest_first_and_a_record_that_is_longer_has_its_own() -> None:
    lengths = [9, 3, 30, 12, 7]
    rows = pack([record(str(n), range(n), 1) for n in lengths], 20)
    assert [list(row.documents.lengths) for row in rows] == [[30], [12, 7], [9, 3]]


def test_a_row_lays_ids_and_masks_one_after_another() -> None:
    row = Row((record("a", [5, 6, 7], 1), record("b", [8, 9], 1)))
    assert row.ids.tolist() == [5, 6, 7, 8, 9]
    assert row.mask.tolist() == [False, True, True, False, True]


def test_counts_add_up_whatever_the_packing() -> None:
    whole = count(pack(RECORDS, 1000), 3)
    apart = count([Row((one,)) for one in RECORDS], 3)
    assert whole == apart
    expected = [sum(int(one.mask[k + 1 :].sum()) for one in RECORDS) for k in (1, 2, 3)]
    assert list(whole.by_depth) == expected


def test_long_records_are_cut_or_dropped_and_counted() -> None:
    records = [
        record("long", range(30), 4), record("prompt", range(30), 20), record("short", range(5), 2),
        record("silent", range(5), 5),
    ]  # fmt: skip
    cut = fit(records, 10, "cut")
    assert [(one.id, len(one.ids)) for one in cut.records] == [("long", 10), ("short", 5)]
    assert (cut.num_cut, cut.num_dropped, cut.num_silent) == (2, 0, 2)
    assert "2 cut" in cut.describe() and "2 left out" in cut.describe()
    dropped = fit(records, 10, "drop")
    assert [one.id for one in dropped.records] == ["short"]
    assert (dropped.num_cut, dropped.num_dropped, dropped.num_silent) == (0, 2, 1)


def test_what_follows_the_last_token_to_learn_is_left_out() -> None:
    one = record("a", range(8), 3)
    one.mask[5:] = False
    (kept,) = fit([one], 100, "cut").records
    assert np.array_equal(kept.ids, range(5)) and len(kept.mask) == 5
