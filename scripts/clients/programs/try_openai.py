"""OpenAI's client, chats and completions."""

from __future__ import annotations

import sys

import openai
from client_report import HELLO, SCHEMA, TOOL, report

URL = sys.argv[1]
client = openai.OpenAI(base_url=f"{URL}/v1", api_key="x", max_retries=0)
ask = client.chat.completions.create
SMALL = {"model": "default", "max_tokens": 8}


def second_turn() -> object:
    said = ask(messages=HELLO, **SMALL).choices[0].message
    history = [*HELLO, said, {"role": "user", "content": "go on"}]
    return ask(messages=history, **SMALL).choices


def tools() -> object:
    answer = ask(model="default", messages=HELLO, tools=[TOOL], tool_choice="required",
                 max_tokens=200, parallel_tool_calls=False)  # fmt: skip
    return answer.choices[0].message.tool_calls


def schema() -> object:
    form = {"type": "json_schema", "json_schema": SCHEMA}
    answer = ask(model="default", messages=HELLO, response_format=form, max_tokens=200)
    return "size" in (answer.choices[0].message.content or "")


def logprobs() -> object:
    answer = client.completions.create(model="default", prompt="hello", max_tokens=0, echo=True,
                                       logprobs=1)  # fmt: skip
    return answer.choices[0].logprobs


report(
    {
        "text": lambda: ask(messages=HELLO, **SMALL).choices,
        "stream": lambda: list(ask(messages=HELLO, stream=True, **SMALL)),
        "second turn": second_turn, "tools": tools, "schema": schema,
        "log-probabilities": logprobs,
    }
)  # fmt: skip
