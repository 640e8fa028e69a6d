"""Answers of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headstart.engine.outputs import Completion
from headstart.server.answers.chat_text import ChatText
from headstart.server.answers.logprobs import chat_logprobs
from headstart.server.answers.special import WithoutSpecial
from headstart.server.answers.writer import Writer
from headstart.server.jobs import Event
from headstart.server.protocol.chat import ChatRequest
from headstart.server.reasoning import Start


class ChatWriter(Writer):
    request: ChatRequest
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(
        self, *args: Any, new_text: Callable[[], ChatText], start: Start,
        special: Mapping[int, str], **options: Any,
    ):  # fmt: skip
        """`special` are texts of tokens that the engine left in and nobody is to see, by id."""
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
