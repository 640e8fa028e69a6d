"""openai-agents over /v1/responses: an agent with a tool and an output type."""

from __future__ import annotations

import sys
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from client_report import SCHEMA, report
from openai import AsyncOpenAI
from pydantic import BaseModel

URL = sys.argv[1]
set_tracing_disabled(True)
# The client takes an answer that max_tokens cut for a failure; one by a schema ends by itself.
SMALL = ModelSettings(
    max_tokens=200, extra_body={"text": {"format": {"type": "json_schema", **SCHEMA}}}
)
CALLED = []


class Size(BaseModel):
    size: Literal[1, 2]


@function_tool
def pick(size: Literal[1, 2]) -> str:
    """Pick a size."""
    CALLED.append(size)
    return "done"


def agent(**fields: object) -> Agent:
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="x", max_retries=0)  # of one event loop
    model = OpenAIResponsesModel("default", openai_client=client)
    return Agent(name="a", model=model, **{"model_settings": SMALL, **fields})


def second_turn() -> object:
    first = Runner.run_sync(agent(), "hello")
    return Runner.run_sync(agent(), [*first.to_input_list(), {"role": "user", "content": "go on"}])


def tools() -> object:
    settings = ModelSettings(max_tokens=200, tool_choice="required", parallel_tool_calls=False)
    own = agent(tools=[pick], model_settings=settings, tool_use_behavior="stop_on_first_tool")
    return Runner.run_sync(own, "hello") and CALLED


def schema() -> object:
    own = agent(output_type=Size, model_settings=ModelSettings(max_tokens=200))
    return Runner.run_sync(own, "hello").final_output.size


def stream() -> object:
    import asyncio

    # With an output type: the client takes a streamed answer that max_tokens cut for a failure.
    own = agent(output_type=Size, model_settings=ModelSettings(max_tokens=200))

    async def go() -> list:
        return [event async for event in Runner.run_streamed(own, "hello").stream_events()]

    return asyncio.run(go())


report(
    {
        "text": lambda: Runner.run_sync(agent(), "hello").final_output is not None,
        "stream": stream, "second turn": second_turn, "tools": tools, "schema": schema,
    }
)  # fmt: skip
