"""Bodies are read within limits, and refusals name the field."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import Request

from headstart.errors import RequestError
from headstart.server.bodies import BodyReader, parse
from headstart.server.protocol.base import HARMLESS, REFUSED
from headstart.server.protocol.chat import ChatRequest
from headstart.server.protocol.completion import CompletionRequest
from headstart.server.refusals import Refusal


async def in_thread(function: Any, *arguments: Any) -> Any:
    return await asyncio.to_thread(function, *arguments)


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
    reader = BodyReader(1 << 20, in_thread)
    text = "x" * 100_000
    body = f'{{"prompt": "{text}"}}'.encode()
    assert read(reader, body[:50_000], body[50_000:]).prompt == text
    assert reader._num_held == 0


def test_too_many_bytes_are_refused_as_they_come_or_before() -> None:
    reader = BodyReader(1000, in_thread)
    with pytest.raises(Refusal, match="larger than 1,000 bytes") as refused:
        read(reader, b"x" * 600, b"x" * 600)
    assert refused.value.status == 413 and reader._num_held == 0
    with pytest.raises(Refusal, match="larger than 1,000 bytes"):
        read(reader, headers={"content-length": "1001"})


def test_all_bodies_together_are_bounded() -> None:
    reader = BodyReader(1000, in_thread)
    reader._num_held = 15_900  # of others
    with pytest.raises(Refusal, match="too many large requests") as refused:
        read(reader, b"x" * 600)
    assert refused.value.status == 503 and reader._num_held == 15_900


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_fields_that_are_known_and_not_implemented_say_what_to_do(name: str) -> None:
    data = f'{{"prompt": "x", "{name}": 1}}'.encode()
    with pytest.raises(Refusal, match=name) as refused:
        parse(data, CompletionRequest)
    assert refused.value.param == name and refused.value.message.count(".") == 3


def test_harmless_fields_are_not_fields_of_requests() -> None:
    assert not set(HARMLESS) & set(ChatRequest.model_fields)
    assert not set(REFUSED) & (set(ChatRequest.model_fields) | set(CompletionRequest.model_fields))


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
