"""Which requests have their text indexed, and how much of it at a time."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.text_copies import scanned_copy, texts_with_answers

from headstart.engine import copies
from headstart.engine.copies import _NEW, INDEXED_AT_ONCE, ContextDrafter
from headstart.engine.options import EngineOptions
from headstart.engine.request import Request
from headstart.sampling.params import SamplingParams


def request(tokens: list[int], max_tokens: int = 100, *, name: str = "a", **fields: Any) -> Request:
    return Request(name, tokens, SamplingParams(**fields), 0, max_tokens, frozenset(), 0)


LONG = 100_000
SPAN = range(70, 90)  # of such a prompt, whose first tokens it ends with


def long_request(name: str = "a") -> Request:
    """No other three tokens of it come twice."""
    return request([*range(LONG - 8), *SPAN[:8]], name=name)


def test_the_beginning_of_a_long_prompt_is_copied_from_as_soon_as_the_prompt_was_read() -> None:
    """Regression: only the last 32,768 tokens were indexed, and those later than they were read."""
    own, one = ContextDrafter(EngineOptions(speculate="auto")), long_request()
    for done in range(0, LONG, 8192):
        own.read(one, min(8192, LONG - done))
    found = own.find(one, 12)
    assert found is not None and (found.tokens, found.length) == ([*SPAN[8:]], 8)


def test_after_a_prefix_hit_so_many_tokens_are_indexed_in_a_step_and_all_are_copied_from() -> None:
    own, one = ContextDrafter(EngineOptions(speculate="auto")), long_request()
    own.read(one, 10)  # behind a hit on all other tokens
    steps = -(-(LONG - 10) // INDEXED_AT_ONCE)
    found = [own.find(one, 12) for _ in range(steps)]
    assert steps == 25 and found[:-1] == [None] * (steps - 1)
    assert found[-1] is not None and found[-1].tokens == [*SPAN[8:]]


def test_a_step_indexes_no_more_of_many_texts_than_of_one() -> None:
    """Regression: each text had its own share of a step."""
    own = ContextDrafter(EngineOptions(speculate="auto"))
    first, second = (request([*range(INDEXED_AT_ONCE + 50), 7, 8, 9], name=n) for n in "ab")
    short = request([1, 2, 3] * 4, name="c")
    found = own.find_all([first, second, short], lambda _: 2)
    assert list(found) == [short], "what a round gives is indexed in any case"
    assert [own._texts[name].end for name in "ab"] == [INDEXED_AT_ONCE, _NEW]
    found = own.find_all([first, second, short], lambda _: 2)
    assert set(found) == {first, short} and found[first].tokens == [10, 11]
    assert own._texts["b"].end == _NEW + INDEXED_AT_ONCE - 53


def test_indices_of_all_texts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "ALL_INDEXED", 100)
    monkeypatch.setattr(copies, "LEAST_INDEXED", 10)
    own = ContextDrafter(EngineOptions(speculate="auto"))
    texts = [request([*range(size)], name=name) for size, name in zip((70, 50, 40, 5), "abcd",
                                                                      strict=True)]  # fmt: skip
    for one in texts:
        own.read(one, len(one.tokens))
    assert [own._texts[one.id].begin for one in texts] == [0, 20, 30, 0]
    assert [len(own._texts[one.id].index) for one in texts] == [70, 30, 10, 5]
    own.forget(texts[0])
    again = request([*range(60)], name="e")
    own.read(again, 1)
    assert own._texts["e"].begin == 5, "there is room for 55 again"


def test_the_last_tokens_of_a_very_long_prompt_are_indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "MOST_INDEXED", 20)
    own = ContextDrafter(EngineOptions(speculate="auto"))
    early, late = (request([*range(50), *end]) for end in ([5, 6, 7, 8], [40, 41, 42, 43]))
    for count in (10, 44):  # as chunks of the prompt are read
        own.read(early, count)
    assert own._texts["a"].begin == 34 and own.find(early, 2) is None
    own.forget(early)
    found = own.find(late, 2)
    assert found is not None and (found.tokens, found.length) == ([44, 45], 4)
    late.tokens += found.tokens
    again = own.find(late, 2)
    assert again is not None and again.tokens == [46, 47]


@given(st.data(), texts_with_answers(), st.integers(4, 40), st.integers(1, 9))
def test_what_is_found_is_what_looking_through_the_texts_finds(
    data: st.DataObject, given_texts: tuple[list[int], list[list[int]]], most: int, at_once: int
) -> None:
    """However prompts are read and tokens come; of long prompts in what is indexed of them."""
    text, answers = given_texts
    own = ContextDrafter(EngineOptions(speculate="auto", draft_from_answers=4))
    for number, answer in enumerate(answers):
        ended = request([9], name=f"before {number}")
        ended.tokens += answer
        ended.finish_reason = "length"
        own.forget(ended)
    num_prompt = data.draw(st.integers(1, len(text)))
    one, coming, indexed = request(text[:num_prompt]), text[num_prompt:], max(0, num_prompt - most)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "MOST_INDEXED", most)
        patch.setattr(copies, "INDEXED_AT_ONCE", at_once)
        patch.setattr(copies, "_NEW", 1)
        begin = indexed
        for _ in range(data.draw(st.integers(0, 4))):  # chunks of the prompt
            read = data.draw(st.integers(0, num_prompt))
            own.read(one, read)
            indexed = min(num_prompt, indexed + read)
        while True:
            count = data.draw(st.integers(1, 34))
            found = own.find(one, count)
            indexed = min(len(one.tokens), indexed + at_once)
            if indexed < len(one.tokens):
                assert found is None, "as long as the text is not indexed to its end"
                continue
            assert found == scanned_copy(one.tokens[begin:], answers, count) == own.found(one)
            if not coming:
                return
            new = data.draw(st.integers(1, len(coming)))  # of a round
            one.tokens, coming = [*one.tokens, *coming[:new]], coming[new:]


def test_a_request_that_asks_for_something_else_meanwhile_copies_no_more() -> None:
    own, one = ContextDrafter(EngineOptions(speculate="auto")), request([1, 2, 3] * 4)
    sources: tuple[Literal["auto", "head", "context"], ...] = ("auto", "head", "context")
    for source in sources:
        one.params = SamplingParams(draft_from=source)
        found = own.find(one, 2)
        assert (found is None) == (source == "head") == (own.found(one) is None)


def test_how_many_tokens_is_asked_only_of_requests_that_could_copy() -> None:
    own, asked = ContextDrafter(EngineOptions(speculate="auto")), list[str]()
    same, new = request([1, 2, 3] * 4), request([*range(12)], name="b")

    def count(one: Request) -> int:
        asked.append(one.id)
        return 2

    found = own.find_all([same, new], count)
    assert asked == ["a"] and found == {same: own.found(same)} and found[same].tokens == [1, 2]


CASES: list[tuple[Any, dict[str, Any], bool]] = [
    ("auto", {}, True),
    ("auto", {"max_tokens": 1}, False),
    ("auto", {"speculate": 0}, False),
    ("auto", {"speculate": 0, "draft_from": "context"}, False),
    ("auto", {"speculate": 3}, False),  # of the head
    ("auto", {"speculate": 3, "draft_from": "context"}, True),
    ("auto", {"draft_from": "head"}, False),
    (3, {}, False),
    (3, {"draft_from": "context"}, True),
    ("context", {}, True),
    ("context", {"speculate": 3}, True),
    ("context", {"speculate": 0}, False),
]


@pytest.mark.parametrize(("speculate", "fields", "takes"), CASES)
def test_nothing_is_indexed_that_could_not_be_copied(
    speculate: Any, fields: dict[str, Any], takes: bool
) -> None:
    own, one = ContextDrafter(EngineOptions(speculate=speculate)), request([1, 2, 3], **fields)
    own.read(one, 3)
    assert own.takes(one) == takes == bool(own._texts)
