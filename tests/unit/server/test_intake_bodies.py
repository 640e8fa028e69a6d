"""Bodies are read within limits, and refusals name the field."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from starlette.requests import Request

from headstart.errors import RequestError
from headstart.server.completions import CompletionRequest
from headstart.server.intake import BodyReader, parse
from headstart.server.protocol.base import HARMLESS, NEUTRAL, REFUSED
from headstart.server.protocol.requests import ChatRequest
from headstart.server.refusals import Refusal

POOL = ThreadPoolExecutor(1)


def request_of(*chunks: bytes, headers: dict[str, str] | None = None) -> Request:
    waiting = [
        {"type": "http.request", "body": chunk, "more_body": at < len(chunks) - 1}
        for at, chunk in enumerate(chunks)
    ]

    async def receive() -> Any:
        return waiting.pop(0)

    raw = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    return Request({"type": "http", "method": "POST", "headers": raw}, receive)


def read(reader: BodyReader, *chunks: bytes, **options: Any) -> CompletionRequest:
    return asyncio.run(reader.read(request_of(*chunks, **options), CompletionRequest))


def test_a_large_body_is_parsed_in_a_thread_and_nothing_is_held_afterwards() -> None:
    reader = BodyReader(1 << 20, POOL)
    text = "x" * 100_000
    body = f'{{"prompt": "{text}"}}'.encode()
    assert read(reader, body[:50_000], body[50_000:]).prompt == text
    assert reader._num_held == 0


def test_too_many_bytes_are_refused_as_they_come_or_before() -> None:
    reader = BodyReader(1000, POOL)
    with pytest.raises(Refusal, match="larger than 1,000 bytes") as refused:
        read(reader, b"x" * 600, b"x" * 600)
    assert refused.value.status == 413 and reader._num_held == 0
    with pytest.raises(Refusal, match="larger than 1,000 bytes"):
        read(reader, headers={"content-length": "1001"})


def test_all_bodies_together_are_bounded() -> None:
    reader = BodyReader(1000, POOL)
    reader._num_held = 31_900  # of others
    with pytest.raises(Refusal, match="too many large requests") as refused:
        read(reader, b"x" * 600)
    assert refused.value.status == 503 and reader._num_held == 31_900


def test_a_body_counts_as_long_as_what_was_made_of_it() -> None:
    reader = BodyReader(1 << 20, POOL)
    body = read(reader, b'{"prompt": [1, 2, 3], "n": 2}')
    assert reader._num_held > 3 * 40
    del body
    assert reader._num_held == 0
    with pytest.raises(Refusal, match="'n'"):
        read(reader, b'{"prompt": "a", "n": "b"}')
    assert reader._num_held == 0


def test_many_small_values_are_refused_before_they_are_made() -> None:
    reader = BodyReader(100_000, POOL)
    many = b'{"prompt": "a", "metadata": {"x": [' + b"[]," * 20_000 + b"0]}}"
    with pytest.raises(Refusal, match="too many small values") as refused:
        read(reader, many)
    assert refused.value.status == 413 and reader._num_held == 0
    assert read(reader, b'{"prompt": "' + b"ab," * 10_000 + b'"}').prompt  # the control


def test_a_page_must_say_what_it_sends() -> None:
    reader = BodyReader(1000, POOL)
    origin = {"origin": "http://page"}
    with pytest.raises(Refusal, match="content type is ''") as refused:
        read(reader, b'{"prompt": "a"}', headers=origin)
    assert refused.value.status == 415
    assert read(reader, b'{"prompt": "a"}').prompt == "a"
    named = {**origin, "content-type": "application/json"}
    assert read(reader, b'{"prompt": "a"}', headers=named).prompt == "a"


def test_nulls_inside_of_parts_are_left_out() -> None:
    data = b'{"prompt": "a", "stream": true, "stream_options": {"include_usage": null}, '
    data += b'"headstart": {"statistics": null, "speculate": null}}'
    parsed = parse(data, CompletionRequest)
    assert parsed.stream_options is not None and not parsed.stream_options.include_usage
    assert not parsed.headstart.statistics


def test_fields_of_messages_go_to_the_template_whatever_it_reads() -> None:
    known = b'"name": "a", "provider_specific_fields": {}, "annotations": [], "reasoning": "d"'
    data = b'{"messages": [{"role": "user", "content": "x", %s, "mood": "e", "audio": null}]}'
    (message,) = parse(data % known, ChatRequest).messages
    shown = message.for_template()
    assert shown["mood"] == "e" and shown["name"] == "a" and "audio" not in shown
    assert shown["annotations"] == [] and shown["reasoning"] == "d"


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_fields_that_are_known_and_not_implemented_say_what_to_do(name: str) -> None:
    is_chat = name in CompletionRequest.model_fields
    needed = '"messages": [{"role": "user"}]' if is_chat else '"prompt": "x"'
    data = f'{{{needed}, "{name}": "?"}}'.encode()
    with pytest.raises(Refusal, match=name) as refused:
        parse(data, ChatRequest if is_chat else CompletionRequest)
    assert refused.value.param == name
    assert refused.value.message.endswith(f"is not implemented: {REFUSED[name]}.")


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_values_that_ask_for_what_happens_anyway_pass(name: str) -> None:
    for value in NEUTRAL[name]:
        body = {"messages": [{"role": "user"}], name: value}
        assert name not in parse(json.dumps(body).encode(), ChatRequest).model_fields_set
    with pytest.raises(Refusal, match=name):
        parse(json.dumps({**body, name: 7}).encode(), ChatRequest)
    if name in ("echo", "use_beam_search"):
        with pytest.raises(Refusal, match=name):  # 0 is no truth value
            parse(json.dumps({**body, name: 0}).encode(), ChatRequest)


def test_harmless_fields_are_not_fields_of_requests() -> None:
    assert not set(HARMLESS) & set(ChatRequest.model_fields)
    both = set(ChatRequest.model_fields) & set(CompletionRequest.model_fields)
    assert not set(REFUSED) & both and set(NEUTRAL) <= set(REFUSED)


def test_a_list_of_nonsense_is_one_complaint() -> None:
    data = b'{"prompt": [' + b"null," * 200_000 + b"null]}"
    with pytest.raises(Refusal, match="'prompt"):
        parse(data, CompletionRequest)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ('"a"', ["a"]),
        ('["a", "b"]', ["a", "b"]),
        ("[1, 2]", [[1, 2]]),
        ("[[1], [2]]", [[1], [2]]),
        ("[]", [[]]),
    ],
    ids=["text", "texts", "tokens", "lists", "empty"],
)
def test_prompts_are_told_apart_by_what_is_inside(prompt: str, expected: Any) -> None:
    parsed = parse(f'{{"prompt": {prompt}}}'.encode(), CompletionRequest)
    assert parsed.prompts == expected


def test_numbers_that_are_none_are_refused() -> None:
    for value in ("NaN", "Infinity", "1e999", '"1"', "true", "[1]"):
        with pytest.raises((Refusal, RequestError)):
            parse(f'{{"prompt": "x", "temperature": {value}}}'.encode(), CompletionRequest)
