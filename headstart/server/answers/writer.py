"""OpenAI's answer objects, made of what the engine hands back: chunks of a stream, whole answers.

`Writer` has what both APIs share, `ChatWriter` the answers of /v1/chat/completions; those of
/v1/completions are in `completions.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from headstart.engine.output import Completion, Result, Update
from headstart.sampling.choose import TokenLogprob
from headstart.server.answers.chat_text import ChatText
from headstart.server.answers.logprobs import chat_logprobs, prompt_logprobs
from headstart.server.answers.statistics import OriginText, statistics_of
from headstart.server.channels import Event, Job
from headstart.server.model import ServedModel
from headstart.server.protocol.requests import ChatRequest, SamplingFields
from headstart.server.reasoning import Start
from headstart.server.refusals import Refusal, unanswerable

_LARGE = 2000  # tokens and alternatives in one answer


class Writer:
    """Makes chunks of events while they come, or a whole answer of their results."""

    kind = ""  # `object` of a whole answer
    chunk_kind = ""
    names_events = False  # whether events of a stream have names, and no [DONE] behind them

    def __init__(
        self, request: SamplingFields, jobs: Sequence[Job], *, model: ServedModel, answer_id: str,
        limited_by: str | None,
    ):  # fmt: skip
        """`limited_by`: the request's field that may leave no token to choose from."""
        self.request, self.jobs, self.model = request, jobs, model
        self._limited_by = limited_by
        self.answer_id, self.created = answer_id, int(time.time())
        self.name = request.model if request.model is not None else model.names[0]
        self._num_samples = request.n or 1
        self._results: dict[int, Result] = {}
        self.num_output = 0  # tokens so far
        self._has_shown_prompt = False
        self._origins: dict[int, OriginText] = {}

    @property
    def results(self) -> list[Result]:
        """Results of all prompts that have ended, in order."""
        return [self._results[number] for number in sorted(self._results)]

    def note(self, event: Event) -> None:
        """Keep what the end of the answer needs; raises for a sample that failed."""
        if event.update.finish_reason == "error":
            said = event.update.error or "the request failed in the engine."
            raise unanswerable(said, self._limited_by)
        self.num_output += len(event.update.token_ids)
        if event.result is not None:
            self._results[event.number] = event.result

    @property
    def is_large(self) -> bool:
        """Whether writing the whole answer would hold up the event loop."""
        number = self.num_output * (1 + (self.request.num_logprobs or 0))
        if self.request.num_prompt_logprobs is not None:
            read = sum(len(job.asked.ids) for job in self.jobs)
            number += read * (1 + self.request.num_prompt_logprobs) * self._num_samples
        return number > _LARGE

    def first_chunks(self) -> list[dict[str, Any]]:
        return []

    def chunks(self, event: Event) -> list[dict[str, Any]]:
        raise NotImplementedError

    def error(self, refusal: Refusal) -> dict[str, Any]:
        """The last event of a stream that breaks off."""
        return refusal.body

    def last_chunks(self) -> list[dict[str, Any]]:
        """Usage and statistics, if asked for, in one chunk without choices."""
        options = self.request.stream_options
        extra: dict[str, Any] = {}
        if options is not None and options.include_usage:
            extra["usage"] = self.usage()
        if self.request.headstart.statistics:
            extra["headstart"] = self.statistics()
        return [{**self.head(self.chunk_kind), "choices": [], **extra}] if extra else []

    def whole(self) -> dict[str, Any]:
        choices = [
            self.whole_choice(number * self._num_samples + output.index, number, output)
            for number, result in enumerate(self.results)
            for output in result.outputs
        ]
        answer = {**self.head(self.kind), "choices": choices, "usage": self.usage()}
        if self.request.headstart.statistics:
            answer["headstart"] = self.statistics()
        if self.request.return_token_ids and len(self.results) == 1:
            answer["prompt_token_ids"] = self.results[0].prompt_token_ids
        return answer

    def statistics(self) -> dict[str, Any]:
        return {"statistics": statistics_of(self.results)}

    def usage(self) -> dict[str, Any]:
        return usage_of(self.results)

    def whole_choice(self, index: int, number: int, output: Completion) -> dict[str, Any]:
        raise NotImplementedError

    def head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.answer_id, "object": kind, "created": self.created, "model": self.name,
            "system_fingerprint": self.model.fingerprint,
        }  # fmt: skip

    def chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        options = self.request.stream_options
        extra: dict[str, Any] = {}
        if options is not None and options.continuous_usage_stats:
            prompt = sum(len(job.asked.ids) for job in self.jobs)
            extra["usage"] = usage(prompt, self.num_output)
        elif options is not None and options.include_usage:
            extra["usage"] = None  # it comes at the end
        if self.request.return_token_ids and not self._has_shown_prompt and len(self.jobs) == 1:
            extra["prompt_token_ids"] = self.jobs[0].asked.ids
            self._has_shown_prompt = True
        return {**self.head(self.chunk_kind), "choices": [choice], **extra}

    def index(self, event: Event) -> int:
        """A choice's number: all samples of the first prompt, then those of the next."""
        return event.number * self._num_samples + event.update.sample

    def extras(self, index: int, update: Update | Completion) -> dict[str, Any]:
        """What is in a choice beside OpenAI's fields, only where it was asked for."""
        extra: dict[str, Any] = {}
        if self.request.return_token_ids:
            extra["token_ids"] = update.token_ids
        if self.request.headstart.origins and self.model.tokenizer is not None:
            skip = self.request.skip_special_tokens is not False
            text = self._origins.setdefault(
                index, OriginText(self.model.tokenizer, skip_special=skip)
            )
            extra["headstart"] = text.of(update)
        if update.finish_reason is not None:
            ends = self.model.engine.prompts.end_ids - set(self.request.stop_token_ids or ())
            is_end = update.stop_reason in ends  # the usual one, which needs no name
            extra["stop_reason"] = None if is_end else update.stop_reason
        return extra


class ChatWriter(Writer):
    request: ChatRequest
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(
        self, *args: Any, new_text: Callable[[], ChatText] | None, start: Start, **options: Any
    ):
        """`new_text`: for a sample whose text is more than content; `start`: of reasoning."""
        super().__init__(*args, **options)
        self._start = start
        self._texts = [new_text() if new_text else None for _ in range(self._num_samples)]

    def first_chunks(self) -> list[dict[str, Any]]:
        role = {"role": "assistant", "content": ""}
        return [self.chunk(_delta(index, role)) for index in range(self._num_samples)]

    def chunks(self, event: Event) -> list[dict[str, Any]]:
        """Chunks of one event; none while text waits, several where one part follows another."""
        update, index = event.update, self.index(event)
        text = self._texts[index]
        choices = [_delta(index, delta) for delta in self.deltas(event)]
        extra = self.extras(index, update)
        if update.logprobs:
            extra["logprobs"] = self.logprobs(update.logprobs)
        if update.finish_reason is not None:
            choices.append(_delta(index, {}))
            choices[-1]["finish_reason"] = _finish_reason(text, update.finish_reason)
            choices[-1]["stop_reason"] = extra.pop("stop_reason")
        if extra:  # of all tokens of the step, beside its first text
            choices = choices or [_delta(index, {})]
            choices[0] |= extra
        return [self.chunk(choice) for choice in choices]

    def deltas(self, event: Event) -> list[dict[str, Any]]:
        """What an event adds to a message."""
        update, text = event.update, self._texts[self.index(event)]
        if text is not None:
            is_last = update.finish_reason is not None
            return text.feed(update.token_ids, update.text, is_last=is_last)
        return [{"content": update.text}] if update.text else []

    def message(self, index: int, output: Completion) -> dict[str, Any]:
        """The whole message of an answer that has ended."""
        text = self._texts[index]
        if text is not None:
            return text.message(output.token_ids, output.text)
        return {"role": "assistant", "content": output.text, "refusal": None}

    def finish_reason(self, index: int, output: Completion) -> str:
        return _finish_reason(self._texts[index], output.finish_reason or "stop")

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
        choice: dict[str, Any] = {
            "index": index,
            "message": self.message(index, output),
            "logprobs": None,
            "finish_reason": self.finish_reason(index, output),
            **self.extras(index, output),
        }
        if output.logprobs is not None:
            choice["logprobs"] = self.logprobs(output.logprobs)
        return choice

    def logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        as_ids = self.request.return_tokens_as_token_ids
        return chat_logprobs(entries, self.model.pieces, as_ids=as_ids)

    def whole(self) -> dict[str, Any]:
        answer = super().whole()
        scores = self.results[0].prompt_logprobs
        if scores is not None:
            answer["prompt_logprobs"] = prompt_logprobs(scores, self.model.pieces)
        return answer


def _finish_reason(text: ChatText | None, reason: str) -> str:
    return reason if text is None else text.finish_reason(reason)


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def usage(prompt_tokens: int, completion_tokens: int, num_cached: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def usage_of(results: Sequence[Result]) -> dict[str, Any]:
    prompt = sum(len(result.prompt_token_ids) for result in results)
    completion = sum(len(output.token_ids) for result in results for output in result.outputs)
    return usage(prompt, completion, sum(result.num_cached_tokens for result in results))
