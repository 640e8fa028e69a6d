"""A few requests of our own, one after the other, and what their answers say about drafts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from headstart.bench.asking import Asking, refusal_of
from headstart.bench.chunks import AnswerReader, BrokenStream
from headstart.bench.records import Speculation
from headstart.bench.sse import EventReader
from headstart.bench.target import refusal_words
from headstart.errors import ServerError

_TOKENS = 64
_PIECE = 1 << 16  # bytes
_QUESTIONS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a short Python function that returns the n-th Fibonacci number.",
    "List five things to check before a long bicycle tour.",
    "Summarise the story of Robinson Crusoe in one paragraph.",
    "What is the difference between weather and climate?",
    "Translate into German: The train to the coast leaves at half past nine.",
)
# Fields with which an engine tells about drafts, or how many tokens a chunk has.
_ASKED: dict[str | None, dict[str, Any]] = {
    "headstart": {"headstart": {"statistics": True}},
    "sglang": {"return_spec_tokens_details": True},
    "vllm": {"return_token_ids": True},
    None: {
        "return_token_ids": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    },
}
# Ways in which the tokens of each chunk are known, not estimated.
_COUNTED = ("token_ids", "usage", "origins")


@dataclass(frozen=True)
class Answered:
    """One answer: counters where it had them, and the tokens of its chunks where they are known."""

    speculation: Speculation | None
    sizes: list[int]


def ask_all(asking: Asking, count: int, engine: str | None, seconds: float) -> list[Answered]:
    """Greedy answers to `count` questions; ServerError for a server that refuses them."""
    is_chat = asking.chat_refusal() is None
    extra = _ASKED.get(engine, _ASKED[None])
    answers: list[Answered] = []
    for number in range(count):
        body = _body(asking.model, number, is_chat)
        status, words, answer = _ask(asking, is_chat, body | extra, seconds)
        if status in (400, 422) and extra:  # it may not know the fields
            extra = {}
            status, words, answer = _ask(asking, is_chat, body, seconds)
        if answer is None:
            raise ServerError(refusal_words(_path(is_chat), status, words))
        answers.append(answer)
    return answers


def _path(is_chat: bool) -> str:
    return "/v1/chat/completions" if is_chat else "/v1/completions"


def _body(model: str, number: int, is_chat: bool) -> dict[str, Any]:
    text = _QUESTIONS[number % len(_QUESTIONS)]
    if number >= len(_QUESTIONS):  # no answer comes out of a cache
        text = f"{number}. {text}"
    prompt: dict[str, Any] = {"prompt": text}
    if is_chat:
        prompt = {"messages": [{"role": "user", "content": text}]}
    return {"model": model, **prompt, "max_tokens": _TOKENS, "temperature": 0, "stream": True}


def _ask(
    asking: Asking, is_chat: bool, body: dict[str, Any], seconds: float
) -> tuple[int, str, Answered | None]:
    """Status, and the answer or what was said instead."""
    reader, events = AnswerReader(), EventReader()
    try:
        with asking.answered(_path(is_chat), body, seconds) as (status, response):
            if status != 200:
                return status, refusal_of(response), None
            while not reader.is_done and (received := response.read1(_PIECE)):
                for data in events.feed(received):
                    reader.take(time.perf_counter(), data)
    except BrokenStream as error:
        return 500, error.failure.words, None
    counted_by, _, sizes = reader.timeline(None)
    return 200, "", Answered(reader.speculation, sizes if counted_by in _COUNTED else [])
