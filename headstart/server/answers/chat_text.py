"""The text of one chat answer that is more than content: reasoning, tool calls, special tokens.

It is taken apart while it arrives. An answer of a model that does not think, to a request without
tools, is content as it is and needs nothing of this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headstart.server.reasoning import ReasoningFormat, ReasoningSplitter, Start
from headstart.server.tools.calls import PreparedChat
from headstart.server.tools.parsing import CallStarted, ContentDelta, ToolEvent, num_held


class ChatText:
    """One sample's text."""

    def __init__(
        self, chat: PreparedChat, reasoning: ReasoningFormat | None, start: Start,
        special: Mapping[int, str],
    ):  # fmt: skip
        """`special`: texts, by id, of tokens that stay in the engine's text and are taken out."""
        self._special = WithoutSpecial(special)
        self._splitter = ReasoningSplitter(reasoning, start) if reasoning is not None else None
        self._parser = chat.new_parser() if chat.format is not None else None

    def feed(self, token_ids: Sequence[int], text: str, *, is_last: bool) -> list[dict[str, Any]]:
        """Deltas of a message; none while text waits for what comes next."""
        visible = self._visible(token_ids, text, is_last=is_last)
        deltas = _deltas(*self._split(visible)) if visible else []
        return deltas + _deltas(*self._rest()) if is_last else deltas

    def finish_reason(self, reason: str) -> str:
        """The engine's, unless the answer ends with whole calls."""
        if self._parser is None or not self._parser.num_calls or self._parser.is_in_call:
            return reason
        return "tool_calls" if reason == "stop" else reason

    def message(self, token_ids: Sequence[int], text: str) -> dict[str, Any]:
        """The whole message of an answer that has ended."""
        thought, events = self._split(self._visible(token_ids, text, is_last=True))
        more, last = self._rest()
        content, calls = assembled([*events, *last])
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if thought + more:
            message["reasoning_content"] = thought + more
        if calls:
            message["tool_calls"] = calls
        return message

    def _visible(self, token_ids: Sequence[int], text: str, *, is_last: bool) -> str:
        visible = self._special.feed(token_ids, text)
        return visible + self._special.finish() if is_last else visible

    def _split(self, text: str) -> tuple[str, list[ToolEvent]]:
        reasoning, content = ("", text) if self._splitter is None else self._splitter.feed(text)
        return reasoning, self._parsed(content)

    def _rest(self) -> tuple[str, list[ToolEvent]]:
        reasoning, content = ("", "") if self._splitter is None else self._splitter.finish()
        last = self._parser.finish() if self._parser is not None else []
        return reasoning, self._parsed(content) + last

    def _parsed(self, content: str) -> list[ToolEvent]:
        if not content:
            return []
        return [ContentDelta(content)] if self._parser is None else self._parser.feed(content)


def _deltas(reasoning: str, events: list[ToolEvent]) -> list[dict[str, Any]]:
    first = [{"reasoning_content": reasoning}] if reasoning else []
    return first + [delta(event) for event in events]


def delta(event: ToolEvent) -> dict[str, Any]:
    """The event as OpenAI's stream spells it: name and id first, then pieces of arguments."""
    if isinstance(event, ContentDelta):
        return {"content": event.text}
    if isinstance(event, CallStarted):
        function = {"name": event.name, "arguments": ""}
        call = {"index": event.index, "id": event.id, "type": "function", "function": function}
        return {"tool_calls": [call]}
    return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}


def assembled(events: Iterable[ToolEvent]) -> tuple[str | None, list[dict[str, Any]]]:
    """(content, tool_calls) of a whole message; content is None where there are only calls."""
    content = ""
    calls: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, ContentDelta):
            content += event.text
        elif isinstance(event, CallStarted):
            function = {"name": event.name, "arguments": ""}
            calls.append({"id": event.id, "type": "function", "function": function})
        else:
            calls[event.index]["function"]["arguments"] += event.text
    return (content or None) if calls else content, calls


class WithoutSpecial:
    """One sample's text; only what came from a special token goes, not the same words as text."""

    def __init__(self, texts: Mapping[int, str]):
        self._texts = texts  # of the tokens to take out, by id
        self._due: Counter[str] = Counter()  # seen as tokens, and not yet in the text
        self._waiting = ""

    def feed(self, token_ids: Sequence[int], text: str) -> str:
        """The text that stays; text comes with its tokens or after them, never before."""
        self._due.update(self._texts[token] for token in token_ids if token in self._texts)
        if not self._due:
            return text
        self._waiting += text
        kept = ""
        while found := [
            (self._waiting.find(due), due) for due in self._due if due in self._waiting
        ]:
            at, due = min(found)
            kept, self._waiting = kept + self._waiting[:at], self._waiting[at + len(due) :]
            self._due -= Counter([due])
        stop = len(self._waiting) - num_held(self._waiting, self._due)
        kept, self._waiting = kept + self._waiting[:stop], self._waiting[stop:]
        return kept

    def finish(self) -> str:
        rest, self._waiting = self._waiting, ""
        return rest
