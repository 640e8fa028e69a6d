"""Tools for models whose chat template has no place for them.

They are described in the system turn, in words that most models have read; earlier calls and their
results become text. The model need not understand any of it where a grammar forces the call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headstart.server.tools.formats import TOOL_FORMATS, ToolFormat
from headstart.server.tools.requests import Tool

USUAL = TOOL_FORMATS["hermes"]  # what most models were trained on


def has_place(chat_template: str | None) -> bool:
    return "tools" in (chat_template or "")


def described(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], format: ToolFormat,
    chat_template: str | None,
) -> list[dict[str, Any]]:  # fmt: skip
    """The messages for a template that knows neither tools, nor calls, nor their results."""
    ready = _joined([_as_text(message, format) for message in messages])
    if not tools:
        return ready
    text = _description(tools, format)
    role = "system" if "system" in (chat_template or "") else "user"
    if ready and ready[0]["role"] == role:
        before = ready[0].get("content") or ""
        first = {**ready[0], "content": f"{before}\n\n{text}" if before else text}
        return [first, *ready[1:]]
    return [{"role": role, "content": text}, *ready]


def _joined(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbouring turns of the user as one: many templates refuse two in a row."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        before = joined[-1] if joined else {}
        if message["role"] == before.get("role") == "user":
            texts = [own["content"] for own in (before, message) if own.get("content")]
            joined[-1] = {**before, "content": "\n".join(texts)}
        else:
            joined.append(message)
    return joined


def _description(tools: Sequence[Tool], format: ToolFormat) -> str:
    shown = "\n".join(json.dumps(tool.shown["function"], ensure_ascii=False) for tool in tools)
    return (
        "You may call these functions, each given by its JSON schema:\n"
        f"{shown}\n"
        "To call one, write nothing but this:\n"
        + _spelled("NAME", json.dumps({"ARGUMENT": "VALUE"}), format)
    )


def _spelled(name: str, arguments: str, format: ToolFormat) -> str:
    return format.prefix.format(name=name, json_name=json.dumps(name)) + arguments + format.suffix


def _as_text(message: Mapping[str, Any], format: ToolFormat) -> dict[str, Any]:
    result = dict(message)
    if message.get("role") == "tool":
        said = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
        return {"role": "user", "content": said}
    calls = result.pop("tool_calls", None)
    if calls:
        texts = [
            _spelled(call["function"]["name"], _json(call["function"]["arguments"]), format)
            for call in calls
        ]
        result["content"] = "\n".join([*filter(None, [result.get("content")]), *texts])
    return result


def _json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
