"""Rows of prompts in groups: where each row goes, and what its group sees."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from headstart.backends.cuda.forward import GROUP_ROWS
from headstart.backends.cuda.joined import MOST_GROUPS, JoinedRows, num_groups, starts_of
from headstart.backends.rows import TrunkRows

PAGE = 16


def rows(count: int, start: int, blocks: list[int]) -> TrunkRows:
    tokens = list(range(100, 100 + count))
    return TrunkRows(tokens, start, blocks, num_logits=1, feeds_head=True)


def test_every_request_begins_a_group() -> None:
    asked = [rows(GROUP_ROWS + 1, 0, [3, 4, 5]), rows(1, 7, [9]), rows(GROUP_ROWS, 0, [1, 2])]
    assert num_groups(asked) == 4 and starts_of(asked) == [0, 2 * GROUP_ROWS, 3 * GROUP_ROWS]


def test_rows_go_to_the_slots_of_their_request() -> None:
    room = JoinedRows(8, 4, torch.float32, torch.device("cpu"))
    first, second = rows(40, 5, [6, 2, 7]), rows(3, 20, [1, 4])
    room.fill([first, second], PAGE, 4)  # three groups, and one that is empty
    places = room._kv_slots.flatten().tolist()
    slots = [first.blocks[slot // PAGE] * PAGE + slot % PAGE for slot in range(5, 45)]
    assert places[:40] == slots and places[40 : 2 * GROUP_ROWS] == [-1] * 24
    assert places[2 * GROUP_ROWS : 2 * GROUP_ROWS + 3] == [4 * PAGE + 4 + row for row in range(3)]
    assert room._seen[:4].tolist() == [5, 5 + GROUP_ROWS, 20, -1]
    assert room._positions[1, :8].tolist() == list(range(37, 45))
    assert room._ids[2, :4].tolist() == [100, 101, 102, 0]
    assert room._tables[:3, :4].tolist() == [[6, 2, 7, 0], [6, 2, 7, 0], [1, 4, 0, 0]]


def test_nothing_is_left_of_the_rows_before() -> None:
    room = JoinedRows(8, 4, torch.float32, torch.device("cpu"))
    room.fill([rows(60, 0, [1, 2, 3, 4])], PAGE, 2)
    room.fill([rows(2, 0, [5])], PAGE, 1)
    assert room._kv_slots[0].tolist() == [5 * PAGE, 5 * PAGE + 1, *[-1] * (GROUP_ROWS - 2)]
    assert room._tables[0, :3].tolist() == [5, 0, 0], "rows that fill up look at the first block"


def test_a_pass_has_room_for_the_longest_request() -> None:
    blocks = list(range(MOST_GROUPS * GROUP_ROWS // PAGE))
    room = JoinedRows(len(blocks), 4, torch.float32, torch.device("cpu"))
    room.fill([rows(MOST_GROUPS * GROUP_ROWS, 0, blocks)], PAGE, MOST_GROUPS)
    assert room._kv_slots.flatten().tolist() == list(range(MOST_GROUPS * GROUP_ROWS))


@pytest.mark.parametrize("page", [1, PAGE])
def test_rows_that_fill_up_a_group_have_entries_in_the_table(page: int) -> None:
    """Of a request that ends with the last slot that there may be."""
    blocks = list(range(1, 65))
    room = JoinedRows(len(blocks), 4, torch.float32, torch.device("cpu"))
    start = len(blocks) * page - 1
    room.fill([rows(1, start, blocks)], page, 1)
    last = (start + GROUP_ROWS - 1) // page
    assert room._tables.shape[1] > last
    assert room._tables[0, len(blocks) : last + 1].tolist() == [0] * (last + 1 - len(blocks))
