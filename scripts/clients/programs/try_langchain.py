"""langchain's ChatOpenAI: chats, a bound tool, structured output by its default way."""

from __future__ import annotations

import sys
from typing import Literal

from client_report import report
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL = sys.argv[1]


class Size(BaseModel):
    size: Literal[1, 2]


@tool
def pick(size: Literal[1, 2]) -> str:
    """Pick a size."""
    return "done"


def chat(**fields: object) -> ChatOpenAI:
    own = {"model": "default", "base_url": f"{URL}/v1", "api_key": "x", "max_retries": 0}
    return ChatOpenAI(**{**own, "max_tokens": 8, **fields})


def second_turn() -> object:
    hello = HumanMessage("hello")
    return chat().invoke([hello, chat().invoke([hello]), hello])


def tools() -> object:
    bound = chat(max_tokens=200).bind_tools([pick], tool_choice="required")
    asked = HumanMessage("hello")
    said = bound.invoke([asked])
    return bound.invoke([asked, said, *(pick.invoke(call) for call in said.tool_calls)]).tool_calls


report(
    {
        "text": lambda: chat().invoke("hello"), "stream": lambda: list(chat().stream("hello")),
        "second turn": second_turn, "tools": tools,
        "schema": lambda: chat(max_tokens=200).with_structured_output(Size).invoke("hi").size,
        "log-probabilities": lambda: chat(logprobs=True)
        .invoke("hello").response_metadata["logprobs"]["content"],
    }
)  # fmt: skip
