"""How an answer is put together, and how its tokens are counted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.bench.chunks import AnswerReader, BrokenStream, spread_over


def event(text: str = "", *, usage: int | None = None, **choice: Any) -> bytes:
    document: dict[str, Any] = {"choices": [{"index": 0, "delta": {"content": text}, **choice}]}
    if usage is not None:
        document["usage"] = {"completion_tokens": usage, "prompt_tokens": 9}
    return json.dumps(document).encode()


def final(total: int) -> bytes:
    return json.dumps({"choices": [], "usage": {"completion_tokens": total}}).encode()


def read(*events: bytes) -> AnswerReader:
    reader = AnswerReader()
    for number, data in enumerate(events):
        reader.take(float(number), data)
    return reader


ROLE = json.dumps({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})


def test_token_ids_are_the_best_count_and_pieces_without_tokens_are_no_chunks() -> None:
    reader = read(
        ROLE.encode(), event("ab", token_ids=[1, 2]), event("c"), event("", token_ids=[3]), final(3)
    )
    assert reader.timeline(lambda text: 99) == ("token_ids", [1.0, 3.0], [2, 1])
    assert (reader.text, reader.token_ids) == ("abc", (1, 2, 3))


def test_usage_of_every_chunk_is_taken_apart() -> None:
    reader = read(event("a", usage=1), event("bcd", usage=4), event("", usage=4))
    assert reader.timeline(None) == ("usage", [0.0, 1.0], [1, 3])
    assert reader.prompt_tokens == 9


def test_an_end_token_that_writes_nothing_counts_where_usage_tells_of_it() -> None:
    """As the ids of a server that sends them would have it: beside the chunk that ends."""
    role = event("", usage=0, role="assistant")
    last = event("", usage=4, finish_reason="stop")
    reader = read(role, event("a", usage=1), event("bc", usage=3), last, final(4))
    assert reader.timeline(None) == ("usage", [1.0, 2.0, 3.0], [1, 2, 1])
    with_ids = read(event("a", token_ids=[5]), event("", token_ids=[0], finish_reason="stop"))
    assert with_ids.timeline(None) == ("token_ids", [0.0, 1.0], [1, 1])
    # Only the event behind the answer tells of it: the last chunk has it.
    late = read(event("a", usage=1), event("bc", usage=3), final(4))
    assert late.timeline(None) == ("usage", [0.0, 1.0], [1, 3])
    # A total in the last chunk alone says nothing about chunks, and makes none.
    once = read(event("a"), event("b" * 30), event("", usage=11, finish_reason="stop"))
    assert once.timeline(None) == ("spread", [0.0, 1.0], [1, 10]) and once.num_chunks == 2
    assert read(last).num_chunks == 0 and read(last).timeline(None)[0] == "none"


def test_origins_count_tokens() -> None:
    origins = {"origins": ["accepted", "bonus"]}
    reader = read(event("a", headstart={"origins": ["bonus"]}), event("b", headstart=origins))
    assert reader.timeline(None) == ("origins", [0.0, 1.0], [1, 2])


def test_a_tokenizer_shares_out_the_total_of_the_server() -> None:
    reader = read(event("one"), event("two words"), final(6))
    assert reader.timeline(lambda text: len(text.split()))[::2] == ("tokenizer", [2, 4])


def test_without_a_tokenizer_the_total_is_spread_by_length() -> None:
    reader = read(event("a"), event("b" * 30), final(11))
    assert reader.timeline(None)[::2] == ("spread", [1, 10])


def test_with_nothing_known_a_chunk_is_a_token() -> None:
    assert read(event("a"), event("b")).timeline(None)[::2] == ("chunks", [1, 1])


def test_reasoning_is_written_but_is_no_history() -> None:
    thought = {"choices": [{"index": 0, "delta": {"reasoning_content": "hm "}}]}
    reader = read(json.dumps(thought).encode(), event("yes"))
    assert (reader.text, reader.content, reader.num_chunks) == ("hm yes", "yes", 2)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b'{"choices": [', "malformed"),
        (b"[1]", "malformed"),
        (b'{"id": "x"}', "malformed"),
        (b'{"choices": [3]}', "malformed"),
        (b'{"choices": [{"text": 3}]}', "malformed"),
        (b'{"error": {"message": "no memory"}}', "stream_error"),
        (b'{"object": "error", "message": "no memory"}', "stream_error"),
    ],
)
def test_what_is_no_chunk_is_named(data: bytes, kind: str) -> None:
    with pytest.raises(BrokenStream) as caught:
        AnswerReader().take(0.0, data)
    assert caught.value.failure.kind == kind


@given(st.integers(0, 500), st.lists(st.integers(1, 50), min_size=1, max_size=40))
def test_a_total_is_spread_whole(total: int, weights: list[int]) -> None:
    parts = spread_over(total, weights)
    assert sum(parts) == total and min(parts) >= (1 if total >= len(weights) else 0)
    assert spread_over(sum(weights), weights) == weights
