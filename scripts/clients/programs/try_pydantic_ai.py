"""pydantic-ai with its defaults: an output type is a tool that must be called."""

from __future__ import annotations

import sys
from typing import Literal

from client_report import report
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

URL = sys.argv[1]
MODEL = OpenAIChatModel("default", provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="x"))
SMALL = {"max_tokens": 8}


class Size(BaseModel):
    size: Literal[1, 2]


def second_turn() -> object:
    agent = Agent(MODEL, model_settings=SMALL)
    first = agent.run_sync("hello")
    return agent.run_sync("go on", message_history=first.all_messages())


def stream() -> object:
    import asyncio

    async def go() -> list:
        async with Agent(MODEL, model_settings=SMALL).run_stream("hello") as answer:
            return [text async for text in answer.stream_text()]

    return asyncio.run(go()) is not None


def typed() -> object:
    return Agent(MODEL, output_type=Size, model_settings={"max_tokens": 200}).run_sync("hi").output


report(
    {
        "text": lambda: Agent(MODEL, model_settings=SMALL).run_sync("hello"), "stream": stream,
        "second turn": second_turn, "tools": typed, "schema": typed,
    }
)  # fmt: skip
