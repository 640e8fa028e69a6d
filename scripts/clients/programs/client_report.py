"""What the programs share: a tool, a schema, and one line of JSON at the end."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

PARAMETERS: dict[str, Any] = {
    "type": "object", "properties": {"size": {"type": "integer", "enum": [1, 2]}},
    "required": ["size"], "additionalProperties": False,
}  # fmt: skip
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "pick", "description": "Pick a size.", "parameters": PARAMETERS},
}
SCHEMA = {"name": "answer", "schema": PARAMETERS, "strict": True}
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


def report(features: dict[str, Callable[[], Any]]) -> None:
    """Try each feature; a program never ends before the last one."""
    found = {}
    for name, work in features.items():
        try:
            found[name] = "yes" if work() else "no: an empty answer"
        except Exception as error:
            said = str(error).splitlines() or [""]
            found[name] = f"no: {type(error).__name__}: {said[0][:100]}"
    print(json.dumps(found))
