"""A text's own tokens against the rule said plainly, over texts drawn at random."""

from __future__ import annotations

import random

import pytest

from headstart.errors import ConfigError
from headstart.vocab.own_tokens import MAX_OWN, OwnRule

VOCAB = 40


def plain(text: list[int], listed: set[int], limit: int) -> set[int]:
    """Tokens outside the list, from the text's end on, until there are enough."""
    found: list[int] = []
    for token in reversed(text):
        if token not in listed and token not in found:
            found.append(token)
    return set(found[:limit])


@pytest.mark.parametrize("seed", range(20))
def test_own_tokens_are_the_last_ones_outside_the_list_at_every_place(seed: int) -> None:
    draw = random.Random(seed)
    listed, limit = set(draw.sample(range(VOCAB), 15)), draw.choice([1, 2, 5, 12, 30])
    text = [draw.randrange(VOCAB) for _ in range(120)]
    rule = OwnRule.of(listed, VOCAB, limit)
    by_span: list[set[int]] = [set() for _ in text]
    for span in rule.spans(text):
        for place in range(span.begin, span.end):
            assert span.token not in by_span[place]
            by_span[place].add(span.token)
    grown, place = rule.start(), 0
    assert grown.ids == []
    while place < len(text):
        place = min(len(text), place + draw.choice([1, 1, 2, 7]))  # as rounds emit them
        grown.read(text[:place])
        assert set(grown.ids) == by_span[place - 1] == plain(text[:place], listed, limit)
        assert len(grown.ids) == len(set(grown.ids)) <= limit
        for token, last in zip(grown.ids, grown.last, strict=True):
            assert text[last] == token and token not in text[last + 1 : place]
    again = rule.start()
    again.read(text)  # at once, as after a preemption
    assert (again.ids, again.last) == (grown.ids, grown.last)


def test_what_can_be_drafted_is_counted_with_the_text_up_to_the_token_before() -> None:
    rule = OwnRule.of([0, 1], 10, limit=1)
    text, mask = [5, 0, 5, 6, 6, 5, 1], [False, True, True, True, True, True, True]
    assert rule.num_inside(text, mask) == 4  # 0, the second 5, the second 6, 1
    assert rule.num_inside(text, [False] * 7) == 0


def test_a_token_keeps_its_slot_and_only_new_ones_are_written() -> None:
    own = OwnRule.of([0, 1], 10, limit=2).start()
    own.read([5, 0, 6, 5, 1])
    assert (own.ids, own.last, own.written) == ([5, 6], [3, 2], [0, 1])
    own.read([5, 0, 6, 5, 1, 7])  # 6 was there longest ago
    assert (own.ids, own.last, own.written) == ([5, 7], [3, 5], [0, 1, 1])


@pytest.mark.parametrize("limit", [0, -1, MAX_OWN + 1, 2.5])
def test_a_limit_that_kernels_have_no_room_for_is_refused(limit: int) -> None:
    with pytest.raises(ConfigError, match="give a whole number from 1 to 1024, or 0 for none"):
        OwnRule.of([1], 10, limit)
