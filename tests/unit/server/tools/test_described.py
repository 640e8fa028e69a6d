"""Conversations for templates without a place for tools."""

from __future__ import annotations

from headstart.server.tools.described import USUAL, described


def test_results_and_what_the_user_says_next_are_one_turn() -> None:
    """Templates that want turns of user and assistant by turns refuse two of the user's."""
    call = {"function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "user", "content": "b"},
    ]
    found = described(messages, [], USUAL, None)
    assert [own["role"] for own in found] == ["user", "assistant", "user"]
    assert found[2]["content"] == (
        "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>\nb"
    )
