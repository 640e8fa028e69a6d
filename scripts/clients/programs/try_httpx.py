"""No client at all: bodies as curl would send them."""

from __future__ import annotations

import sys

import httpx
from client_report import HELLO, SCHEMA, TOOL, report

URL = sys.argv[1]
client = httpx.Client(base_url=URL, timeout=60)
SMALL = {"messages": HELLO, "max_tokens": 8}


def ask(**fields: object) -> dict:
    answer = client.post("/v1/chat/completions", json={**SMALL, **fields})
    answer.raise_for_status()
    return answer.json()


def stream() -> object:
    body = {**SMALL, "stream": True}
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        return "data: [DONE]" in list(answer.iter_lines())


def second_turn() -> object:
    said = ask()["choices"][0]["message"]
    return ask(messages=[*HELLO, said, *HELLO])


def tools() -> object:
    answer = ask(tools=[TOOL], tool_choice="required", max_tokens=200)
    return answer["choices"][0]["message"]["tool_calls"]


def schema() -> object:
    form = {"type": "json_schema", "json_schema": SCHEMA}
    return "size" in ask(response_format=form, max_tokens=200)["choices"][0]["message"]["content"]


report(
    {
        "text": ask, "stream": stream, "second turn": second_turn, "tools": tools,
        "schema": schema,
        "log-probabilities": lambda: ask(prompt_logprobs=1, max_tokens=0)["prompt_logprobs"],
    }
)  # fmt: skip
