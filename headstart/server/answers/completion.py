"""Answers of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headstart.engine.output import Completion
from headstart.sampling.params import TokenLogprob
from headstart.server.answers.logprobs import TextOffsets, completion_logprobs
from headstart.server.answers.writer import Writer
from headstart.server.protocol.completion import CompletionRequest
from headstart.server.worker import Event

_LONG_ECHO = 1 << 18  # characters that take a while to write


class CompletionWriter(Writer):
    request: CompletionRequest
    kind = chunk_kind = "text_completion"

    def __init__(self, *args: Any, echoed: Sequence[str], **options: Any):
        """`echoed` are the prompts' texts, where they are to be repeated."""
        super().__init__(*args, **options)
        self._echoed = echoed
        self._offsets: dict[int, TextOffsets] = {}  # by choice

    @property
    def is_large(self) -> bool:
        return super().is_large or self._num_samples * sum(map(len, self._echoed)) > _LONG_ECHO

    def first_chunks(self) -> list[dict[str, Any]]:
        if not self.request.echo:
            return []
        samples = self._num_samples
        return [
            self.chunk(_choice(number * samples + sample, self._echoed[number], None, None))
            for number in range(len(self.jobs))
            for sample in range(samples)
        ]

    def chunks(self, event: Event) -> list[dict[str, Any]]:
        update, index = event.update, self.index(event)
        if not update.text and update.finish_reason is None and not self._shows_tokens:
            return []
        logprobs = self._logprobs(index, update.logprobs) if update.logprobs else None
        choice = _choice(index, update.text, logprobs, update.finish_reason)
        return [self.chunk({**choice, **self.extras(index, update)})]

    @property
    def _shows_tokens(self) -> bool:
        """Whether a chunk without text still says something."""
        asked = self.request
        return asked.num_logprobs is not None or asked.return_token_ids or asked.headstart.origins

    def whole_choice(self, index: int, number: int, output: Completion) -> dict[str, Any]:
        text = (self._echoed[number] if self.request.echo else "") + output.text
        logprobs = None
        if output.logprobs is not None:
            logprobs = self._logprobs(index, output.logprobs)
        choice = _choice(index, text, logprobs, output.finish_reason)
        extra = self.extras(index, output)
        if self.request.return_token_ids:
            extra["prompt_token_ids"] = self.results[number].prompt_token_ids
        return {**choice, **extra}

    def _logprobs(self, index: int, entries: list[TokenLogprob]) -> dict[str, Any]:
        if index not in self._offsets:
            skip = self.request.skip_special_tokens is not False
            self._offsets[index] = TextOffsets(self.model.pieces, skip_special=skip)
        return completion_logprobs(entries, self.model.pieces, self._offsets[index])


def _choice(
    index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
