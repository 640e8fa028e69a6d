"""Anthropic's client."""

from __future__ import annotations

import sys

import anthropic
from client_report import HELLO, PARAMETERS, report

URL = sys.argv[1]
client = anthropic.Anthropic(base_url=URL, api_key="x", max_retries=0)
ask = client.messages.create
SMALL = {"model": "default", "max_tokens": 8}
TOOL = {"name": "pick", "input_schema": PARAMETERS}


def stream() -> object:
    with client.messages.stream(messages=HELLO, **SMALL) as events:
        return events.get_final_message().content


def second_turn() -> object:
    said = {"role": "assistant", "content": ask(messages=HELLO, **SMALL).content}
    return ask(messages=[*HELLO, said, {"role": "user", "content": "go on"}], **SMALL)


def tools() -> object:
    answer = ask(model="default", max_tokens=200, messages=HELLO, tools=[TOOL],
                 tool_choice={"type": "any"})  # fmt: skip
    (call, *_) = [block for block in answer.content if block.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "done"}
    said = {"role": "assistant", "content": answer.content}
    history = [*HELLO, said, {"role": "user", "content": [result]}]
    return ask(messages=history, tools=[TOOL], **SMALL)


def schema() -> object:
    form = {"format": {"type": "json_schema", "schema": PARAMETERS}}
    more = {"output_config": form}
    answer = ask(model="default", max_tokens=200, messages=HELLO, extra_body=more)
    return "size" in answer.content[-1].text


report(
    {
        "text": lambda: ask(messages=HELLO, **SMALL).content, "stream": stream,
        "second turn": second_turn, "tools": tools, "schema": schema,
    }
)  # fmt: skip
