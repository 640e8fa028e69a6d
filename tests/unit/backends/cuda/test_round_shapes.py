"""Which captured round serves a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from headstart.backends.cuda.round_plans import RoundShapes
from headstart.backends.cuda.sampling import PLAIN, SamplingNeeds
from headstart.backends.cuda.shapes import RoundShape

SIZES = [1, 2, 4, 6, 16, 64]
MENU = (0, 1, 2, 3, 5, 8)


class Graphs:
    """Remembers which shapes are captured."""

    has_head = True
    device = torch.device("meta")

    def __init__(self, *captured: RoundShape):
        self._captured = captured

    def sizes(self) -> list[int]:
        return SIZES

    def bucket(self, count: int) -> int:
        return next(size for size in SIZES if size >= count)

    def is_captured(self, shape: RoundShape) -> bool:
        return shape in self._captured


def shapes(*captured: RoundShape, **settings: Any) -> RoundShapes:
    return RoundShapes(Graphs(*captured), window=16, **settings)


def pick(own: RoundShapes, count: int, most: int, pending: int) -> RoundShape:
    return own.pick(count, most, pending)


@pytest.mark.parametrize(
    ("most", "pending", "drafts", "rows"),
    [(3, 4, 3, 4), (4, 2, 5, 6), (0, 3, 0, 0), (0, 16, 0, 16), (2, 6, 1, 16), (1, 9, 1, 16),
     (12, 3, 12, 13), (5, 9, 8, 9), (4, 7, 8, 9), (3, 9, 1, 16), (8, 10, 1, 16), (1, 3, 1, 16)],
    ids=["as wanted", "rounded up", "none", "the head catches up", "K falls", "K rises from 0",
         "beyond the menu", "K falls by a step", "after a round without", "K falls by two steps",
         "nothing above on the menu", "one draft in either case"],
)  # fmt: skip
def test_k_and_pending_tokens_decide_the_shape(
    most: int, pending: int, drafts: int, rows: int
) -> None:
    assert pick(shapes(menu=MENU), 3, most, pending) == RoundShape(4, drafts, rows)


def test_after_many_drafts_the_head_reads_more_than_a_window() -> None:
    own = shapes(menu=MENU, widest=17)
    assert [pick(own, 3, 0, pending).head_rows for pending in (15, 16, 17)] == [0, 16, 17]


def test_without_a_menu_any_number_has_its_shape() -> None:
    assert pick(shapes(), 3, 4, 2) == RoundShape(4, 4, 5)


def test_without_a_head_there_is_one_shape() -> None:
    own = shapes()
    own.graphs.has_head = False
    assert pick(own, 3, 0, 40) == RoundShape(4, 0, 0)


def test_a_larger_round_serves_until_one_of_the_right_size_is_worth_capturing() -> None:
    own = shapes(RoundShape(6, 3, 4), RoundShape(64, 3, 4))
    used = [pick(own, 3, 3, 4).count for _ in range(12)]
    assert used == [6] * 8 + [4] * 4
    assert pick(own, 7, 3, 4).count == 16, "64 would be too large"
    assert pick(own, 3, 2, 3).count == 4, "of another K nothing is captured"


@pytest.mark.parametrize(
    ("shape", "most", "is_usual"),
    [((4, 3, 4), 3, True), ((4, 5, 6), 4, True), ((4, 0, 0), 0, True), ((4, 0, 16), 0, False),
     ((4, 1, 16), 2, False), ((4, 8, 9), 5, False)],
    ids=["as wanted", "rounded up", "none", "the head catches up", "K falls", "K falls by a step"],
)  # fmt: skip
def test_a_time_counts_where_the_round_is_what_was_wanted(
    shape: tuple[int, int, int], most: int, is_usual: bool
) -> None:
    assert shapes(menu=MENU).is_usual(RoundShape(*shape), most) == is_usual


@pytest.mark.parametrize(
    ("copied", "rows", "more", "packed"),
    [(3, 0, 0, 0), (8, 10, 5, 256), (8, 80, 5, 320), (16, 208, 13, 448), (16, 500, 13, 576),
     (8, 330, 5, 0)],
    ids=["in rows that are there", "two of them", "rounded up", "more each", "no room for so many",
         "as many as all could have"],
)  # fmt: skip
def test_only_requests_that_copy_have_rows_for_more_drafts(
    copied: int, rows: int, more: int, packed: int
) -> None:
    own = shapes(menu=MENU, max_rows=576, squeezes=True)
    shape = own.pick(60, 3, 4, PLAIN, copied, copied_rows=rows)
    assert shape == RoundShape(64, 3, 4, PLAIN, more, packed)
    assert shape.trunk.rows == shape.choice.packed == packed and shape.drafts.columns == 3 + more


def test_where_all_have_as_many_rows_there_is_room_for_fewer() -> None:
    own = shapes(menu=MENU, max_rows=576)
    assert own.pick(60, 3, 4, PLAIN, 16, copied_rows=26) == RoundShape(64, 3, 4, PLAIN, 5)
    assert own.pick(3, 3, 4, PLAIN, 16, copied_rows=13) == RoundShape(4, 3, 4, PLAIN, 13)
    processed = SamplingNeeds(processes=True)
    squeezed = shapes(menu=MENU, max_rows=576, squeezes=True)
    shape = squeezed.pick(60, 3, 4, processed, 16, copied_rows=10)
    assert shape == RoundShape(64, 3, 4, processed, 5, 256) and not shape.choice.packed


def test_after_copies_the_head_reads_what_they_gave() -> None:
    own = shapes(menu=MENU, widest=17)
    read = [
        own.pick(3, 3, pending, PLAIN, 0, after_copies=True).head_rows for pending in (4, 9, 10, 17)
    ]
    assert read == [4, 9, 16, 17]
    assert not own.is_usual(own.pick(3, 3, 9, PLAIN, 0, after_copies=True), 3)
    assert own.is_usual(own.pick(3, 3, 4), 3)


@pytest.mark.parametrize(("drafts", "vocabs"), [(0, ()), (2, (0, 3))])
def test_copied_drafts_are_rejected_by_the_rule_that_was_asked_for(
    drafts: int, vocabs: tuple[int, ...]
) -> None:
    """What the head drafted from is computed again only where it drafted."""
    needs = SamplingNeeds(processes=True, rejects=True, vocabs=(0, 3))
    copying = RoundShape(4, drafts, drafts + 1, needs, num_copied=8)
    assert copying.choice.rejects and copying.choice.vocabs == vocabs
    assert not RoundShape(4, 0, 0, needs).choice.rejects
