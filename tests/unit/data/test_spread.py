"""Which records are taken when there are more than are wanted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from support.training_data import record

from headstart.data.records import Record, spread

SIZES = {"code": 60, "math": 30, "rare": 10}


def many() -> list[Record]:
    """Ids sort by category: the first ones are all of one."""
    return [
        record(f"{name}-{number:03d}", [1, 2, 3], 1, name)
        for name, size in SIZES.items()
        for number in range(size)
    ]


@pytest.mark.parametrize("limit", [1, 10, 33, 99])
def test_a_few_are_taken_from_every_category(limit: int) -> None:
    found = spread(many(), limit)
    assert len(found) == limit
    shares = Counter(r.category for r in found)
    for name, size in SIZES.items():
        assert abs(shares[name] - limit * size / 100) <= 1
    names = [r.id for r in found]
    assert names == sorted(names), "in the order in which they were given"
    # Control: not simply the first ones of each.
    assert limit > 90 or names[-1] != f"rare-{shares['rare'] - 1:03d}" or limit == 1


def test_neither_order_nor_number_decides_who_comes_first() -> None:
    records = many()
    assert {r.id for r in spread(records[::-1], 20)} == {r.id for r in spread(records, 20)}
    assert {r.id for r in spread(records, 20)} <= {r.id for r in spread(records, 40)}
    assert spread(records, None) == spread(records, 100) == records


def test_answers_to_one_prompt_are_taken_together() -> None:
    samples = [replace(r, id=f"{r.id}/s{n}", sample=n) for r in many()[:20] for n in range(4)]
    counts = Counter(r.prompt_id for r in spread(samples, 12))
    assert list(counts.values()) == [4, 4, 4]
