"""The text of one chat answer, split into reasoning, content and tool calls while it comes."""

from __future__ import annotations

from typing import Any

from headstart.server.reasoning import ReasoningFormat, ReasoningSplitter, Start
from headstart.server.tool_calls import PreparedChat
from headstart.server.tool_parsing import ToolEvent, assembled, delta


class ChatText:
    """One sample's text."""

    def __init__(self, chat: PreparedChat, reasoning: ReasoningFormat | None, start: Start):
        self._splitter = ReasoningSplitter(reasoning, start)
        self._parser = chat.new_parser()

    def feed(self, text: str) -> list[dict[str, Any]]:
        """Deltas of a message; none while text waits for what comes next."""
        return _deltas(*self._split(text))

    def finish(self) -> list[dict[str, Any]]:
        """What still waited when the answer ended."""
        return _deltas(*self._rest())

    def finish_reason(self, reason: str) -> str:
        return "tool_calls" if self._parser.num_calls and reason == "stop" else reason

    def message(self, text: str) -> dict[str, Any]:
        """The whole message of an answer that has ended."""
        thought, events = self._split(text)
        more, last = self._rest()
        content, calls = assembled([*events, *last])
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if thought + more:
            message["reasoning_content"] = thought + more
        if calls:
            message["tool_calls"] = calls
        return message

    def _split(self, text: str) -> tuple[str, list[ToolEvent]]:
        reasoning, content = self._splitter.feed(text)
        return reasoning, self._parser.feed(content) if content else []

    def _rest(self) -> tuple[str, list[ToolEvent]]:
        reasoning, content = self._splitter.finish()
        return reasoning, self._parser.feed(content) + self._parser.finish()


def _deltas(reasoning: str, events: list[ToolEvent]) -> list[dict[str, Any]]:
    first = [{"reasoning_content": reasoning}] if reasoning else []
    return first + [delta(event) for event in events]
