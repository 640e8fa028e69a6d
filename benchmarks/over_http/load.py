"""What is asked: kinds of requests, and a mix of lengths that every engine gets alike.

Lengths and the last token of prompts depend on the number of streams alone: a kind can be held
against greedy requests of the same lengths, and a calibrated trunk, which goes on from the last
token, accepts the same drafts. All other tokens differ from kind to kind, so that no prefix cache
helps a row because of another one.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MODEL = "default"
_SPREAD = 0.7  # of the logarithm of lengths
_LEAST_TOKENS = 4
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 60},
        "state": {"enum": ["open", "closed", "unknown"]},
        "items": {
            "type": "array",
            "minItems": 4,
            "maxItems": 6,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 24},
                    "count": {"type": "integer", "minimum": 0, "maximum": 999},
                    "is_new": {"type": "boolean"},
                },
                "required": ["name", "count", "is_new"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["title", "state", "items"],
    "additionalProperties": False,
}
_TOOLS = [
    {
        "type": "function",
        "function": {"name": "store", "description": "Store a list.", "parameters": SCHEMA},
    }
]


@dataclass(frozen=True)
class Sizes:
    """Tokens: medians and limits of the mix, and the fixed lengths of some kinds."""

    prompt: int = 450
    most_prompt: int = 3000
    answer: int = 180
    most_answer: int = 800
    shared: int = 2000
    own: int = 100
    prefix_answer: int = 128
    long: int = 24000
    long_answer: int = 600
    turns: int = 4
    later_turn: int = 64


@dataclass(frozen=True)
class Job:
    """A request, and what its user says in later turns of the same chat."""

    path: str
    fields: dict[str, Any]
    later: tuple[str, ...] = ()

    @property
    def body(self) -> bytes:
        return json.dumps(self.fields).encode()

    def next_turn(self, answer: str) -> Job:
        said = [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": self.later[0]},
        ]
        fields = {**self.fields, "messages": [*self.fields["messages"], *said]}
        return replace(self, fields=fields, later=self.later[1:])


@dataclass(frozen=True)
class Kind:
    """Fields that make a request one of its kind."""

    fields: dict[str, Any]
    is_chat: bool = False
    ends_itself: bool = False  # a grammar ends the answer; else its length is fixed


def kinds(temperature: float, any_text: str) -> dict[str, Kind]:
    """Kinds of single requests by name; sampled ones at `temperature`."""
    sampled = {"temperature": temperature, "top_k": 0}
    greedy = {"temperature": 0}
    schema = {"name": "list", "schema": SCHEMA, "strict": True}
    return {
        "greedy": Kind(greedy),
        "top_p": Kind({**sampled, "top_p": 0.95}),
        "temperature": Kind({**sampled, "top_p": 1.0}),
        "frequency": Kind({**greedy, "frequency_penalty": 0.5}),
        "repetition": Kind({**greedy, "repetition_penalty": 1.1}),
        "logprobs": Kind({**greedy, "logprobs": 0}),
        "logprobs5": Kind({**greedy, "logprobs": 5}),
        "json": Kind(
            {**greedy, "response_format": {"type": "json_schema", "json_schema": schema}},
            ends_itself=True,
        ),
        "tools": Kind(
            {**greedy, "tools": _TOOLS, "tool_choice": "required"}, is_chat=True, ends_itself=True
        ),
        "regex": Kind({**greedy, "structured_outputs": {"regex": any_text}}),
    }


SINGLE = tuple(kinds(0.0, ""))
KINDS = (*SINGLE, "mixture", "prefix", "long", "turns", "arrivals")


class Workload:
    """Makes the requests of a row; `decode` gives the text of tokens, for chats."""

    def __init__(
        self, tokens: Sequence[int], decode: Callable[[list[int]], str], sizes: Sizes,
        *, temperature: float, any_text: str,
    ):  # fmt: skip
        self._tokens, self._decode, self.sizes = tokens, decode, sizes
        self._kinds = kinds(temperature, any_text)

    def jobs(self, kind: str, streams: float, repeat: int, count: int) -> list[Job]:
        """`count` requests of a row (turns: conversations that have so many together)."""
        draw = random.Random(f"{kind} {streams} {repeat}")
        if kind == "turns":
            count = max(1, math.ceil(count / self.sizes.turns))
        pairs = lengths(count, f"{streams} {repeat}", self.sizes)
        if kind == "prefix":
            shared = self._ids(draw, self.sizes.shared)
            return [
                self._single("greedy", [*shared, *self._ids(draw, self.sizes.own)],
                             self.sizes.prefix_answer)
                for _ in pairs
            ]  # fmt: skip
        if kind == "long":
            return [
                self._single("greedy", self._ids(draw, self.sizes.long), self.sizes.long_answer)
                for _ in pairs
            ]
        if kind == "turns":
            return [self._conversation(draw, *pair) for pair in pairs]
        lasts = self._ids(random.Random(f"last {streams} {repeat}"), len(pairs))
        names = {"mixture": SINGLE, "arrivals": ("greedy",)}.get(kind, (kind,))
        return [
            self._single(names[number % len(names)], [*self._ids(draw, prompt - 1), last], answer)
            for number, ((prompt, answer), last) in enumerate(zip(pairs, lasts, strict=True))
        ]

    def _ids(self, draw: random.Random, count: int) -> list[int]:
        return draw.choices(self._tokens, k=count)

    def _single(self, name: str, prompt: list[int], answer: int) -> Job:
        kind = self._kinds[name]
        fields = {**_common(answer), **kind.fields}
        if not kind.ends_itself:
            fields["ignore_eos"] = True
        if kind.is_chat:
            fields["messages"] = [{"role": "user", "content": self._decode(prompt)}]
            return Job(CHAT, fields)
        return Job(COMPLETIONS, {**fields, "prompt": prompt})

    def _conversation(self, draw: random.Random, prompt: int, answer: int) -> Job:
        first, *later = (
            self._decode(self._ids(draw, count))
            for count in (prompt, *[self.sizes.later_turn] * (self.sizes.turns - 1))
        )
        fields = {**_common(answer), "temperature": 0, "ignore_eos": True}
        messages = [{"role": "user", "content": first}]
        return Job(CHAT, {**fields, "messages": messages}, tuple(later))


def _common(answer: int) -> dict[str, Any]:
    return {
        "model": MODEL, "max_tokens": answer, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip


def lengths(count: int, seed: str, sizes: Sizes) -> list[tuple[int, int]]:
    """Tokens of prompts and answers: log-normal around their medians, within their limits."""
    draw = random.Random(f"lengths {seed}")

    def one(median: int, most: int) -> int:
        found = round(draw.lognormvariate(math.log(median), _SPREAD))
        return min(most, max(_LEAST_TOKENS, found))

    return [
        (one(sizes.prompt, sizes.most_prompt), one(sizes.answer, sizes.most_answer))
        for _ in range(count)
    ]


def num_requests(streams: int) -> int:
    """Enough for seconds at few streams, and for several rounds of answers at many."""
    return max(16, min(8 * streams, 4 * streams + 64))
