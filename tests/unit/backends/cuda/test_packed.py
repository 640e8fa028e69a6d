"""Rows of prompts behind those of a round: where each row goes, and what its group sees."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton")

from headstart.backends.cuda.attending import GROUP_ROWS
from headstart.backends.cuda.packed import (
    MOST_GROUPS,
    MOST_JOINED_ROWS,
    PackedRows,
    best_rows,
    captured_rows,
    captured_sizes,
    first_sizes,
    joinable_rows,
    most_captured,
    num_groups,
    num_rows,
    starts_of,
)
from headstart.backends.rows import TrunkRows

PAGE = 16
CPU, GPU = torch.device("cpu"), torch.device("meta")


def rows(count: int, start: int, blocks: list[int]) -> TrunkRows:
    tokens = list(range(100, 100 + count))
    return TrunkRows(tokens, start, blocks, num_logits=1, feeds_head=True)


def room(max_blocks: int = 8) -> PackedRows:
    return PackedRows(8, max_blocks=max_blocks, hidden=4, width=6, dtype=torch.float32, device=CPU)


def test_every_request_begins_a_group_and_rows_have_no_gaps() -> None:
    asked = [rows(GROUP_ROWS + 1, 0, [3, 4, 5]), rows(1, 7, [9]), rows(GROUP_ROWS, 0, [1, 2])]
    assert num_groups(asked) == 4 and num_rows(asked) == 2 * GROUP_ROWS + 2
    assert starts_of(asked) == [0, GROUP_ROWS + 1, GROUP_ROWS + 2]


def test_a_pass_has_few_rows_more_than_there_are() -> None:
    assert [captured_rows(count, GPU) for count in (1, 64, 65, 1024, 1025, 1300)] == [
        64, 64, 128, 1024, 1152, 1408,
    ]  # fmt: skip
    assert captured_sizes(GPU)[-2:] == [1920, MOST_JOINED_ROWS] and len(captured_sizes(GPU)) == 24
    assert captured_rows(5, CPU) == 8, "the interpreter takes milliseconds for each"
    assert [most_captured(count, GPU) for count in (63, 64, 100, 1100, 1152)] == [
        0, 64, 64, 1024, 1152,
    ]  # fmt: skip


def test_some_sizes_are_captured_at_the_start() -> None:
    """A pass finds one that is at most a quarter larger, or the next one of the finest step."""
    sizes = first_sizes(GPU)
    assert set(sizes) < set(captured_sizes(GPU)) and sizes[-1] == MOST_JOINED_ROWS
    assert all(b <= max(1.25 * a, a + 64) for a, b in pairwise(sizes)) and len(sizes) < 16


SECONDS = {512: 5.0, 640: 6.8, 768: 7.5, 832: 9.5, 1152: 11.6, MOST_JOINED_ROWS: 22.0}


@pytest.mark.parametrize(
    ("own", "wanted", "taken"),
    [
        (512, 265, 256),  # a pass of 768 instead of 832
        (512, 50, 50),  # one of 512 would take none
        (512, 200, 200),  # all of them fit one that costs least
        (440, 720, 712),  # 1152 of 1160
        (512, 1900, 1536),  # more than the largest pass has room for
        (2100, 100, 100),  # no pass is known
    ],
)
def test_rows_join_in_a_pass_that_costs_least_for_each(own: int, wanted: int, taken: int) -> None:
    assert best_rows(own, wanted, SECONDS) == taken


def test_a_small_engine_knows_too_few_sizes_to_choose() -> None:
    """One with 2048 tokens of K/V memory, say, reads no prompt of 1152 tokens at its start."""
    few = {512: 5.0, 1024: 11.0}
    assert best_rows(512, 1000, few) == 1000 and best_rows(512, 400, few) == 400
    assert best_rows(512, 100, {}) == 100


def test_as_many_rows_may_join_as_there_are_groups_for() -> None:
    assert joinable_rows([5, 70, 64]) == 139
    assert joinable_rows([1] * 60 + [500]) == 60 + 4 * GROUP_ROWS


def test_rows_go_to_the_slots_of_their_request() -> None:
    packed, first, second = room(), rows(40, 5, [6, 2, 7]), rows(3, 20, [1, 4])
    packed.kv_slots[:4] = torch.arange(4)  # of a round, which a kernel has placed
    packed.fill(4, [first, second], PAGE, rows=50, groups=4)  # three groups, and one that is empty
    places = packed.kv_slots[:50].tolist()
    slots = [first.blocks[slot // PAGE] * PAGE + slot % PAGE for slot in range(5, 45)]
    assert places[:4] == [0, 1, 2, 3] and places[4:44] == slots
    assert places[44:47] == [4 * PAGE + 4 + row for row in range(3)] and places[47:] == [-1] * 3
    assert packed.starts[:4].tolist() == [4, 4 + GROUP_ROWS, 44, 0]
    assert packed.counts[:4].tolist() == [GROUP_ROWS, 8, 3, 0]
    assert packed.seen[:4].tolist() == [5, 5 + GROUP_ROWS, 20, -1]
    assert packed.positions[4:50].tolist() == [*range(5, 45), 20, 21, 22, 0, 0, 0]
    assert packed.ids[43:50].tolist() == [139, 100, 101, 102, 0, 0, 0]
    assert packed.tables[:3, :3].tolist() == [[6, 2, 7], [6, 2, 7], [1, 4, 0]]


def test_nothing_is_left_of_the_rows_before() -> None:
    packed = room()
    packed.fill(0, [rows(60, 0, [1, 2, 3, 4])], PAGE, rows=64, groups=2)
    packed.fill(0, [rows(2, 0, [5])], PAGE, rows=64, groups=2)
    assert packed.kv_slots[:64].tolist() == [5 * PAGE, 5 * PAGE + 1, *[-1] * 62]
    assert packed.seen[:2].tolist() == [0, -1] and packed.counts[:2].tolist() == [2, 0]


def test_a_pass_has_room_for_the_longest_request() -> None:
    blocks = list(range(MOST_JOINED_ROWS // PAGE))
    packed = room(len(blocks))
    asked = [rows(MOST_JOINED_ROWS, 0, blocks)]
    packed.fill(8, asked, PAGE, rows=8 + MOST_JOINED_ROWS, groups=MOST_GROUPS)
    assert packed.kv_slots[8:].tolist()[:MOST_JOINED_ROWS] == list(range(MOST_JOINED_ROWS))


def test_what_a_row_takes_is_counted() -> None:
    other = PackedRows(12, max_blocks=8, hidden=4, width=6, dtype=torch.float32, device=CPU)
    assert other.num_bytes - room().num_bytes == 4 * room().row_bytes
    assert room().row_bytes == 3 * 8 + 4 + (4 + 4 + 6) * 4
