"""OpenAI's client, /v1/responses."""

from __future__ import annotations

import sys

import openai
from client_report import PARAMETERS, report

URL = sys.argv[1]
client = openai.OpenAI(base_url=f"{URL}/v1", api_key="x", max_retries=0)
ask = client.responses.create
SMALL = {"model": "default", "max_output_tokens": 8}
TOOL = {"type": "function", "name": "pick", "parameters": PARAMETERS, "strict": True}


def tools() -> object:
    answer = ask(model="default", input="hello", tools=[TOOL], tool_choice="required")
    calls = [item for item in answer.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": calls[0].call_id, "output": "done"}
    history = [{"role": "user", "content": "hello"}, *answer.output, result]
    return calls and ask(input=history, tools=[TOOL], **SMALL)


def second_turn() -> object:
    said = ask(input="hello", **SMALL).output
    history = [{"role": "user", "content": "hello"}, *said, {"role": "user", "content": "go on"}]
    return ask(input=history, **SMALL).output


def schema() -> object:
    form = {"format": {"type": "json_schema", "name": "a", "schema": PARAMETERS, "strict": True}}
    return "size" in ask(model="default", input="hello", text=form).output_text


def logprobs() -> object:
    wanted = ["message.output_text.logprobs"]
    return ask(input="hello", include=wanted, **SMALL).output[0].content[0].logprobs


report(
    {
        "text": lambda: ask(input="hello", **SMALL).output,
        "stream": lambda: list(ask(input="hello", stream=True, **SMALL)),
        "second turn": second_turn, "tools": tools, "schema": schema,
        "log-probabilities": logprobs,
    }
)  # fmt: skip
