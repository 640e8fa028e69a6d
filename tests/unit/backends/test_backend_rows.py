"""Rows of a pass: flat numbers from what each request brings."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from headstart.backends.rows import HeadBatch, HeadRows, StateRows, TrunkBatch, TrunkRows, slots_of
from headstart.models.attention import Slots
from headstart.models.recurrence import StateSpan

SIZE = 4  # of blocks


def to_device(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(values))


def numbers(slots: Slots) -> list[int]:
    if isinstance(slots, slice):
        return list(range(slots.start, slots.stop))
    return [int(slot) for slot in slots]


@pytest.mark.parametrize(
    ("blocks", "begin", "end", "expected", "is_slice"),
    [
        ([5, 6, 7], 0, 12, list(range(20, 32)), True),
        ([5, 6, 7], 3, 9, list(range(23, 29)), True),
        ([5, 9, 7], 0, 4, [20, 21, 22, 23], True),
        ([5, 9, 7], 2, 6, [22, 23, 36, 37], False),
        ([5, 9, 10], 5, 12, list(range(37, 44)), True),
        ([2, 1, 0], 3, 9, [11, 4, 5, 6, 7, 0], False),
        ([3, 7, 5], 1, 12, [13, 14, 15, 28, 29, 30, 31, 20, 21, 22, 23], False),
    ],
    ids=["whole", "part", "one block", "two apart", "the rest is a run", "backwards",
         "ends as a run would"],
)  # fmt: skip
def test_slots_are_a_slice_where_blocks_follow_one_another(
    blocks: list[int], begin: int, end: int, expected: list[int], is_slice: bool
) -> None:
    found = slots_of(blocks, SIZE, begin, end, to_device)
    assert numbers(found) == expected and isinstance(found, slice) == is_slice


PROMPT = TrunkRows([11, 12, 13], 0, [1], num_logits=0, feeds_head=True)
DRAFTS = TrunkRows([21, 22], 5, [6, 3], num_logits=2, feeds_head=True)
LAST = TrunkRows([31, 32, 33], 2, [8, 9], num_logits=1, feeds_head=False)


def test_rows_of_all_requests_lie_one_after_another() -> None:
    batch = TrunkBatch.of([PROMPT, DRAFTS, LAST], SIZE, to_device)
    assert batch.ids == [11, 12, 13, 21, 22, 31, 32, 33]
    assert batch.positions == [0, 1, 2, 5, 6, 2, 3, 4]
    assert [(span.start, span.stop) for span in batch.spans] == [(0, 3), (3, 5), (5, 8)]
    assert [numbers(span.new) for span in batch.spans] == [[4, 5, 6], [13, 14], [34, 35, 36]]
    assert numbers(batch.spans[1].context) == [24, 25, 26, 27, 12, 13, 14]
    assert batch.logits == [3, 4, 7]
    assert batch.state_spans == []


def test_only_states_that_feed_a_head_or_logits_are_wanted() -> None:
    batch = TrunkBatch.of([PROMPT, LAST, DRAFTS], SIZE, to_device)
    assert batch.wanted == [0, 1, 2, 5, 6, 7]
    assert [batch.wanted[i] for i in batch.logits_among] == batch.logits == [5, 6, 7]
    assert [batch.wanted[part] for part in batch.parts] == [[0, 1, 2], [], [6, 7]]


def test_states_are_given_back_by_request_from_all_rows_and_from_those_wanted() -> None:
    batch = TrunkBatch.of([PROMPT, LAST, DRAFTS], SIZE, to_device)
    whole = torch.arange(8.0)[:, None]
    for states in (whole, whole[batch.wanted]):
        prompt, _, drafts = batch.by_request(states)
        assert prompt.flatten().tolist() == [0, 1, 2] and drafts.flatten().tolist() == [6, 7]


def test_recurrent_states_are_kept_where_a_request_may_go_on_from() -> None:
    own = StateRows(source=4, chain=((1, 7), (2, 5)), snapshots=((1, 9),))
    rows = TrunkRows([1, 2], 6, [0, 1], 2, True, own)
    batch = TrunkBatch.of([PROMPT, rows], SIZE, to_device)
    assert batch.state_spans == [StateSpan(3, 5, 4, ((1, 7), (1, 9), (2, 5)))]


@pytest.mark.parametrize("module", [0, 2])
def test_module_j_is_rotated_as_if_its_text_began_at_slot_j_plus_one(module: int) -> None:
    states = torch.arange(10.0).view(5, 2)
    requests = [
        HeadRows([11, 12, 13], 5, [6, 3], states[:3]), HeadRows([21, 22], 3, [1, 2], states[3:]),
    ]  # fmt: skip
    batch = HeadBatch.of(module, requests, SIZE, to_device)
    assert batch.ids.tolist() == [11, 12, 13, 21, 22]
    assert torch.equal(batch.hidden, states)
    first = 5 - module - 1
    assert batch.positions.tolist() == [first, first + 1, first + 2, 2 - module, 3 - module]
    context = [24, 25, 26, 27, 12, 13, 14, 15]
    assert numbers(batch.spans[0].context) == context[module + 1 :], "slots 0 to j are empty"
    assert numbers(batch.spans[0].new) == [13, 14, 15]


def test_states_of_one_request_are_not_copied() -> None:
    states = torch.zeros(2, 3)
    batch = HeadBatch.of(0, [HeadRows([1, 2], 1, [0], states)], SIZE, to_device)
    assert batch.hidden is states
