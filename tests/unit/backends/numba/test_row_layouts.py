"""Where rows of a pass go and what they see, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from headstart.backends.numba.row_layouts import TextRows, later_layout, layout_of, slot_numbers
from headstart.backends.rows import HeadRows, StateRows, TrunkRows

SIZE = 4  # slots of a block
PROMPT = TextRows.of(TrunkRows([1, 2, 3], 0, [2], 1, True), SIZE)
DRAFTS = TextRows.of(TrunkRows([4, 5], 5, [6, 3], 2, True), SIZE)


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [(0, 4, [24, 25, 26, 27]), (3, 9, [27, 12, 13, 14, 15, 28]), (5, 7, [13, 14])],
    ids=["a block", "three blocks", "part of one"],
)
def test_slots_lie_in_the_blocks_of_a_text(begin: int, end: int, expected: list[int]) -> None:
    assert slot_numbers([6, 3, 7], SIZE, begin, end).tolist() == expected


def test_a_row_sees_its_text_up_to_its_own_slot() -> None:
    layout = layout_of([PROMPT, DRAFTS])
    assert layout.positions.tolist() == [0, 1, 2, 5, 6]
    assert layout.slots.tolist() == [8, 9, 10, 13, 14]
    seen = [
        layout.kv_slots[begin:end].tolist()
        for begin, end in zip(layout.begins, layout.ends, strict=True)
    ]
    context = [24, 25, 26, 27, 12, 13]
    assert seen == [[8], [8, 9], [8, 9, 10], context, [*context, 14]]
    assert layout.runs.tolist() == [3, 2, 1, 4, 3, 2, 1, 3, 2, 1]


def test_two_rows_of_a_text_attend_together() -> None:
    layout = layout_of([PROMPT, DRAFTS])
    groups = zip(layout.firsts.tolist(), layout.lasts.tolist(), strict=True)
    assert list(groups) == [(0, 2), (2, 3), (3, 5)]


def test_positions_begin_where_a_module_has_its_first_entry() -> None:
    rows = HeadRows([7, 8], 5, [6, 3], states=None)  # type: ignore[arg-type]
    layout = layout_of([TextRows.of(rows, SIZE, first=2)])
    assert layout.positions.tolist() == [3, 4]
    assert layout.kv_slots.tolist() == [26, 27, 12, 13, 14]


def test_rows_of_later_drafts_follow_those_of_the_first_pass() -> None:
    texts = [TextRows(2, np.array([8, 9, 20, 21]), later=2), TextRows(1, np.array([4, 5, 6]), 1)]
    first = layout_of(texts)
    assert first.slots.tolist() == [8, 9, 5] and first.positions.tolist() == [0, 1, 1]
    assert first.begins.tolist() == [0, 0, 4] and first.ends.tolist() == [1, 2, 6]
    later = later_layout(texts, first)
    assert later.slots.tolist() == [[20, 6], [21, 0]], "by depth, then by text"
    assert later.positions.tolist() == [2, 2]
    assert later.begins.tolist() == [0, 4] and later.ends.tolist() == [3, 7]
    assert later.kv_slots.tolist() == [8, 9, 20, 21, 4, 5, 6]


def test_recurrent_states_are_kept_where_a_text_may_go_on_from() -> None:
    begins, goes_on = StateRows(None, ((3, 1),)), StateRows(4, ((1, 7), (2, 5)), ((1, 9),))
    layout = layout_of([PROMPT, DRAFTS], [begins, goes_on])
    assert layout.spans.tolist() == [[0, 3, -1, 0, 1], [3, 5, 4, 1, 3]]
    assert layout.keeps.tolist() == [[3, 1], [1, 7], [1, 9], [2, 5]]
