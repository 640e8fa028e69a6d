"""instructor with its default mode, which calls a tool."""

from __future__ import annotations

import sys
from typing import Literal

import instructor
import openai
from client_report import HELLO, report
from pydantic import BaseModel

URL = sys.argv[1]
client = instructor.from_openai(
    openai.OpenAI(base_url=f"{URL}/v1", api_key="x", max_retries=0), mode=instructor.Mode.TOOLS
)


class Size(BaseModel):
    size: Literal[1, 2]


def ask(**fields: object) -> object:
    return client.chat.completions.create(
        model="default", response_model=Size, messages=HELLO, max_tokens=200, max_retries=0,
        **fields,
    )  # fmt: skip


report({"tools": lambda: ask().size, "schema": lambda: ask().size})
