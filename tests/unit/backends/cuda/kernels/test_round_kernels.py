"""The bookkeeping of a round against the same in Python."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton")

from headstart.backends.cuda.kernels.rounds import (
    accept,
    chain_rows,
    head_rows,
    keep_boundaries,
    keep_states,
    pack_trunk_rows,
    trunk_rows,
)
from headstart.backends.cuda.kernels.squeezed import FEW_ROWS, fit_drafts, squeeze_trunk_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE = 4


def ints(*values: int, kind: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=kind, device=DEVICE)


TABLES = torch.arange(30, dtype=torch.int32, device=DEVICE).view(3, 10).flip(1)


def place(index: int, slot: int) -> int:
    return int(TABLES[index, slot // PAGE]) * PAGE + slot % PAGE


def test_rows_of_a_verification_lie_behind_the_newest_token() -> None:
    # request 0 has room for everything, index 1 is free, request 2 may get two more tokens
    lengths, left, limits = ints(10, 0, 5), ints(99, 0, 2), ints(3, 3, 3)
    positions, kv_slots, seen = trunk_rows(lengths, left, limits, TABLES, PAGE, 4)
    assert seen.tolist() == [9, -1, 4]
    wanted = [*(place(0, s) for s in range(9, 13)), *[-1] * 4, place(2, 4), place(2, 5), -1, -1]
    assert kv_slots.tolist() == wanted
    assert positions.tolist() == [9, 10, 11, 12, 0, 0, 0, 0, 4, 5, 0, 0]


def test_rows_of_a_packed_verification_leave_those_behind_them_alone() -> None:
    # request 0 has room for everything, request 1 has ended, index 2 is free
    lengths, left, limits = ints(10, 5, 0), ints(99, 0, 0), ints(3, 3, 3)
    drafted = torch.arange(15, device=DEVICE).view(3, 5)[:, :4]
    ids, positions = (ints(*[77] * 10, kind=torch.int64) for _ in range(2))
    kv_slots = ints(*[77] * 10)
    seen = pack_trunk_rows(lengths, left, limits, TABLES, PAGE, drafted, ids, positions, kv_slots)
    assert seen.tolist() == [9, -1, -1]
    assert ids.tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 77, 77]
    assert kv_slots.tolist() == [*(place(0, s) for s in range(9, 13)), *[-1] * 4, 77, 77]
    assert positions.tolist() == [9, 10, 11, 12, *[0] * 4, 77, 77]


@pytest.mark.parametrize("seed", range(6))
def test_rows_of_requests_with_different_numbers_of_drafts_have_no_gaps(seed: int) -> None:
    numbers, requests, rows, total = random.Random(seed), 3, 7, 23
    lengths = [numbers.choice([0, 5, 10]) for _ in range(requests)]
    left = [numbers.choice([0, 1, 2, 99]) for _ in range(requests)]
    limits = [numbers.randrange(rows) for _ in range(requests)]
    drafted = torch.arange(requests * 8, device=DEVICE).view(requests, 8)[:, :rows]
    ids, positions, sources = (ints(*[77] * total, kind=torch.int64) for _ in range(3))
    kv_slots, places = ints(*[77] * total), ints(*[77] * requests * rows, kind=torch.int64)
    seen, starts, counts = squeeze_trunk_rows(
        ints(*lengths), ints(*left), ints(*limits), TABLES, PAGE, drafted, ids, positions,
        kv_slots, sources, places,
    )  # fmt: skip
    at = 0
    for index, (length, room, limit) in enumerate(zip(lengths, left, limits, strict=True)):
        count = min(limit, room - 1) + 1 if length and room else 0
        slots = range(length - 1, length - 1 + count)
        own = slice(at, at + count)
        found = torch.stack([seen, starts, counts], -1)[:, index].tolist()
        if count <= FEW_ROWS:
            assert found[0] == [length - 1 if count else -1, at, count]
            assert found[1][::2] == [-1, 0]
        else:  # the newest token, and its drafts
            assert found == [[length - 1, at, 1], [length, at + 1, count - 1]]
        assert ids[own].tolist() == drafted[index, :count].tolist()
        assert positions[own].tolist() == list(slots)
        assert kv_slots[own].tolist() == [place(index, slot) for slot in slots]
        assert sources[own].tolist() == list(range(index * rows, index * rows + count))
        first = places[index * rows : (index + 1) * rows].tolist()
        assert first[:count] == list(range(at, at + count)) and max(first) < total
        at += count
    assert not ids[at:].any() and not positions[at:].any() and not sources[at:].any()
    assert kv_slots[at:].tolist() == [-1] * (total - at)


@pytest.mark.parametrize("seed", range(6))
def test_drafts_that_a_pass_has_no_rows_for_are_cut_alike(seed: int) -> None:
    numbers, requests, most = random.Random(seed), 5, 8
    lengths = [numbers.choice([0, 5, 10]) for _ in range(requests)]
    left = [numbers.choice([0, 1, 3, 99]) for _ in range(requests)]
    limits = [numbers.choice([1, 1, 6, most]) for _ in range(requests)]
    going = [i for i in range(requests) if lengths[i] and left[i]]
    wanted = {i: min(limits[i], left[i] - 1) for i in going}
    for rows in range(len(going), requests * (most + 1) + 1):
        found = ints(*limits, 77)
        fit_drafts(ints(*lengths), ints(*left), found[:requests], most=most, rows=rows)
        assert found[requests] == 77
        room, expected = rows - len(going), dict.fromkeys(going, 0)
        for depth in range(most):  # a row for each in turn
            for i in going:
                if depth < wanted[i] and room:
                    expected[i], room = expected[i] + 1, room - 1
        assert {i: min(int(found[i]), left[i] - 1) for i in going} == expected
        assert all(int(found[i]) == limits[i] for i in range(requests) if i not in going)


def test_head_rows_are_the_tokens_of_the_last_round() -> None:
    lengths, left, valid = ints(10, 0, 5), ints(99, 0, 2), ints(3, 0, 1)
    limits = ints(3, 3, 3)
    positions, kv_slots, seen = head_rows(lengths, valid, TABLES, PAGE, 4, 0, 0, left, limits)
    assert seen.tolist() == [7, -1, 4]
    assert kv_slots.tolist() == [
        *(place(0, s) for s in (7, 8, 9)),
        *[-1] * 5,
        place(2, 4),
        *[-1] * 3,
    ]
    assert positions.tolist() == [6, 7, 8, 0, 0, 0, 0, 0, 3, 0, 0, 0]


def test_a_later_module_goes_on_with_drafts_where_one_more_may_follow() -> None:
    # request 0 may have three drafts, request 1 two, request 2 has reached slot 2
    lengths, left, valid, limits = ints(10, 6, 3), ints(99, 99, 99), ints(2, 1, 2), ints(3, 2, 3)
    given = lengths, valid, TABLES, PAGE, 4, 2, 2, left, limits
    positions, kv_slots, seen = head_rows(*given)
    assert seen.tolist() == [8, 5, 1]
    assert kv_slots.tolist() == [
        *(place(0, s) for s in (8, 9, 10, 11)),
        *(place(1, 5), -1, -1, -1),
        *(-1, -1, place(2, 3), place(2, 4)),  # module 2 has no entry in slots 0 to 2
    ]
    assert positions.tolist() == [5, 6, 7, 8, 2, 0, 0, 0, 0, 0, 0, 1]


def test_what_a_module_gave_is_kept_at_ends_of_blocks() -> None:
    rows = torch.arange(12.0, device=DEVICE).view(3, 4, 1)
    boundary = torch.zeros(int(TABLES.max()) + 1, 2, 1, device=DEVICE)
    # slots 6 and 7 of request 0; of request 1 none; request 2 has ended
    keep_boundaries(rows, boundary[:, 1], ints(8, 6, 8), ints(9, 9, 0), ints(2, 1, 2), TABLES, PAGE)
    found = {(block, at): value for block, own in enumerate(boundary.flatten(1).tolist())
             for at, value in enumerate(own) if value}  # fmt: skip
    assert found == {(place(0, 7) // PAGE, 1): 1.0}


def test_a_chain_goes_on_while_the_limit_allows() -> None:
    lengths, left, limits = ints(10, 0, 5), ints(99, 0, 2), ints(3, 3, 3)
    positions, kv_slots, seen = chain_rows(lengths, left, limits, TABLES, PAGE, 2)
    assert (positions.tolist(), kv_slots.tolist()) == ([9, 0, 0], [place(0, 10), -1, -1])
    assert seen.tolist() == [10, -1, -1]


def test_leading_drafts_that_equal_the_choices_are_accepted() -> None:
    drafts = torch.tensor([[7, 8, 9], [1, 2, 3], [4, 5, 6], [4, 5, 6]], device=DEVICE)
    choices = torch.tensor([[7, 8, 9, 1], [1, 5, 3, 4], [4, 5, 6, 7], [4, 5, 6, 7]], device=DEVICE)
    lengths, left, limits = ints(10, 10, 5, 0), ints(99, 99, 2, 5), ints(3, 3, 3, 3)
    pending, tokens = ints(9, 9, 9, 9), torch.zeros(4, 5, dtype=torch.int64, device=DEVICE)
    emitted = torch.zeros(4, 6, dtype=torch.int64, device=DEVICE)
    accept(drafts, choices, limits, lengths, left, pending, tokens, emitted, has_read=True)
    assert pending.tolist() == [4, 2, 2, 0]
    assert (lengths.tolist(), left.tolist()) == ([14, 12, 7, 0], [95, 97, 0, 5])
    assert emitted[0].tolist() == [4, 7, 8, 9, 1, 0] and emitted[1, :3].tolist() == [2, 1, 5]
    assert tokens[2].tolist() == [4, 5, 0, 0, 0]


def test_tokens_that_the_head_has_not_read_wait_for_it() -> None:
    none = torch.zeros(1, 0, dtype=torch.int64, device=DEVICE)
    lengths, left, limits, pending = ints(10), ints(5), ints(0), ints(2)
    tokens = torch.tensor([[7, 8, 0, 0]], device=DEVICE)
    emitted = torch.zeros(1, 6, dtype=torch.int64, device=DEVICE)
    choice = torch.tensor([[9]], device=DEVICE)
    accept(none, choice, limits, lengths, left, pending, tokens, emitted, has_read=False)
    assert (tokens.tolist(), pending.tolist(), lengths.tolist()) == ([[7, 8, 9, 0]], [3], [11])
    states, row = torch.zeros(1, 4, 6, device=DEVICE), torch.ones(1, 1, 6, device=DEVICE)
    boundary = torch.zeros(30, 6, device=DEVICE)
    keep_states(row, states, boundary, lengths, pending, emitted, TABLES[:1], PAGE)
    assert states.sum(-1).tolist() == [[0, 0, 6, 0]] and not boundary.any()


def test_states_are_kept_for_the_head_and_at_block_ends() -> None:
    rows = torch.randn(2, 3, 6).to(DEVICE)
    states = torch.zeros(2, 4, 6, device=DEVICE)
    boundary = torch.zeros(30, 6, device=DEVICE)
    # request 0 emitted two tokens after slot 6: its rows consumed slots 6 and 7, the end of a block
    lengths, pending = ints(9, 6), ints(2, 1)
    emitted = torch.tensor([[2, 0], [1, 0]], device=DEVICE)
    keep_states(rows, states, boundary, lengths, pending, emitted, TABLES, PAGE)
    assert torch.equal(states[0, :2], rows[0, :2]) and torch.equal(states[1, 0], rows[1, 0])
    assert not states[1, 1:].any()
    wanted = torch.zeros_like(boundary)
    wanted[TABLES[0, 1]] = rows[0, 1]
    assert torch.equal(boundary, wanted)
