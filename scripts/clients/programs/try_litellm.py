"""litellm: chats, and its bridges to /v1/responses and /v1/messages."""

from __future__ import annotations

import sys

import litellm
from client_report import HELLO, SCHEMA, TOOL, report

URL = sys.argv[1]
OWN = {"model": "openai/default", "api_base": f"{URL}/v1", "api_key": "x", "num_retries": 0}


def ask(**fields: object) -> object:
    return litellm.completion(**{**OWN, "messages": HELLO, "max_tokens": 8, **fields})


def second_turn() -> object:
    said = ask().choices[0].message.model_dump()
    return ask(messages=[*HELLO, said, *HELLO])


def text() -> object:
    bridged = litellm.responses(input="hello", max_output_tokens=8, **OWN)
    there = {**OWN, "model": "anthropic/default", "api_base": URL}
    spoken = litellm.completion(messages=HELLO, max_tokens=8, **there)
    return ask() and bridged.output and spoken.choices


def tools() -> object:
    answer = ask(tools=[TOOL], tool_choice="required", max_tokens=200)
    return answer.choices[0].message.tool_calls


def schema() -> object:
    form = {"type": "json_schema", "json_schema": SCHEMA}
    return "size" in ask(response_format=form, max_tokens=200).choices[0].message.content


report(
    {
        "text": text, "stream": lambda: list(ask(stream=True)), "second turn": second_turn,
        "tools": tools, "schema": schema,
        "log-probabilities": lambda: ask(logprobs=True).choices[0].logprobs,
    }
)  # fmt: skip
