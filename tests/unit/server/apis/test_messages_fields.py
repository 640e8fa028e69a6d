"""Fields of /v1/messages that are of another kind than they should be: refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from headstart.errors import RequestError
from headstart.server.apis.messages_request import MessagesRequest

ASKED: dict[str, Any] = {"max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}


def result(**fields: Any) -> dict[str, Any]:
    block = {"type": "tool_result", "tool_use_id": "1", **fields}
    return {"messages": [{"role": "user", "content": [block]}]}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        (result(content=5), "messages[0].tool_result.content"),
        (result(content={"type": "text"}), "messages[0].tool_result.content"),
        (result(content="a", is_error="no"), "messages[0].is_error"),
        ({"tool_choice": {"type": []}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": 5}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any", "name": "a"}}, "tool_choice.name"),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": "no"}},
            "tool_choice.disable_parallel_tool_use",
        ),
        ({"output_config": {"format": "json"}}, "output_config.format"),
    ],
)
def test_a_field_of_another_kind_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        MessagesRequest.model_validate({**ASKED, **fields}).as_chat()
    assert caught.value.field == field


def test_a_tool_that_failed_says_so() -> None:
    asked = MessagesRequest.model_validate({**ASKED, **result(content="gone", is_error=True)})
    assert asked.chat_fields()["messages"][0]["content"] == "Error: gone"
