"""Answers of /v1/chat/completions; text is split into reasoning, content and calls as it comes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from headstart.engine.output import Completion
from headstart.server.answers.logprobs import chat_logprobs
from headstart.server.answers.writer import Writer
from headstart.server.protocol.chat import ChatRequest
from headstart.server.reasoning import ReasoningFormat, ReasoningSplitter, Start
from headstart.server.tools.calls import PreparedChat
from headstart.server.tools.parsing import CallStarted, ContentDelta, ToolEvent, num_held
from headstart.server.worker import Event


class ChatWriter(Writer):
    request: ChatRequest
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(
        self, *args: Any, new_text: Callable[[], ChatText], start: Start,
        special: Mapping[int, str], **options: Any,
    ):  # fmt: skip
        """`special`: texts, by id, of tokens that stay in the engine's text and are taken out."""
        super().__init__(*args, **options)
        self._start = start
        self._texts = [new_text() for _ in range(self._num_samples)]
        self._special = [WithoutSpecial(special) for _ in range(self._num_samples)]

    def first_chunks(self) -> list[dict[str, Any]]:
        role = {"role": "assistant", "content": ""}
        return [self.chunk(_delta(index, role)) for index in range(self._num_samples)]

    def chunks(self, event: Event) -> list[dict[str, Any]]:
        """Usually one; none while text waits, more where one part ends and another begins."""
        update, index = event.update, self.index(event)
        text = self._texts[index]
        visible = self._special[index].feed(update.token_ids, update.text)
        if update.finish_reason is not None:
            visible += self._special[index].finish()
        deltas = text.feed(visible) if visible else []
        if update.finish_reason is not None:
            deltas += text.finish()
        choices = [_delta(index, delta) for delta in deltas]
        extra = self.extras(index, update)
        if update.logprobs:
            extra["logprobs"] = chat_logprobs(update.logprobs, self.model.pieces)
        if update.finish_reason is not None:
            choices.append(_delta(index, {}))
            choices[-1]["finish_reason"] = text.finish_reason(update.finish_reason)
            choices[-1]["stop_reason"] = extra.pop("stop_reason")
        if extra:  # of all tokens of the step, beside its first text
            choices = choices or [_delta(index, {})]
            choices[0] |= extra
        return [self.chunk(choice) for choice in choices]

    def usage(self) -> dict[str, Any]:
        thought = 0
        if self.model.reasoning_format is not None:
            thought = sum(
                self.model.num_reasoning_tokens(output.token_ids, self._start)
                for result in self.results
                for output in result.outputs
            )
        return {**super().usage(), "completion_tokens_details": {"reasoning_tokens": thought}}

    def whole_choice(self, index: int, number: int, output: Completion) -> dict[str, Any]:
        text, special = self._texts[index], self._special[index]
        visible = special.feed(output.token_ids, output.text) + special.finish()
        choice: dict[str, Any] = {
            "index": index,
            "message": text.message(visible),
            "logprobs": None,
            "finish_reason": text.finish_reason(output.finish_reason or "stop"),
            **self.extras(index, output),
        }
        if output.logprobs is not None:
            choice["logprobs"] = chat_logprobs(output.logprobs, self.model.pieces)
        return choice


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


class ChatText:
    """One sample's text."""

    def __init__(self, chat: PreparedChat, reasoning: ReasoningFormat | None, start: Start):
        # Most answers are content and nothing else: then there is nothing to take apart.
        self._splitter = ReasoningSplitter(reasoning, start) if reasoning is not None else None
        self._parser = chat.new_parser() if chat.format is not None else None

    def feed(self, text: str) -> list[dict[str, Any]]:
        """Deltas of a message; none while text waits for what comes next."""
        return _deltas(*self._split(text))

    def finish(self) -> list[dict[str, Any]]:
        """What still waited when the answer ended."""
        return _deltas(*self._rest())

    def finish_reason(self, reason: str) -> str:
        has_calls = self._parser is not None and self._parser.num_calls > 0
        return "tool_calls" if has_calls and reason == "stop" else reason

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
    content, calls = "", []
    for event in events:
        if isinstance(event, ContentDelta):
            content += event.text
        elif isinstance(event, CallStarted):
            function = {"name": event.name, "arguments": ""}
            calls.append({"id": event.id, "type": "function", "function": function})
        else:
            calls[event.index]["function"]["arguments"] += event.text  # type: ignore[index]
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
