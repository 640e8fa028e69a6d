"""smolagents: its model class for servers of this kind, and an agent that calls tools."""

from __future__ import annotations

import sys

from client_report import HELLO, SCHEMA, report
from smolagents import OpenAIModel, tool

URL = sys.argv[1]


@tool
def pick(size: int) -> str:
    """Pick a size.

    Args:
        size: The size.
    """
    return "done"


def model(**fields: object) -> OpenAIModel:
    own = {"model_id": "default", "api_base": f"{URL}/v1", "api_key": "x", "max_tokens": 8}
    return OpenAIModel(**{**own, **fields})


def second_turn() -> object:
    said = model().generate(HELLO).dict()
    kept = {"role": said["role"], "content": said["content"]}
    return model().generate([*HELLO, kept, *HELLO])


def tools() -> object:
    return model(max_tokens=200).generate(HELLO, tools_to_call_from=[pick]).tool_calls


def schema() -> object:
    form = {"type": "json_schema", "json_schema": SCHEMA}
    return "size" in model(max_tokens=200).generate(HELLO, response_format=form).content


report(
    {
        "text": lambda: model().generate(HELLO),
        "stream": lambda: list(model().generate_stream(HELLO)), "second turn": second_turn,
        "tools": tools, "schema": schema,
    }
)  # fmt: skip
