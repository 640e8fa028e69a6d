"""POST /v1/completions: its body, its prompts, its answers.

What it shares with chats is in `protocol/requests.py`, `answering.py` and `answers/writer.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Annotated, Any, ClassVar

from pydantic import Field

from headstart.engine.output import Completion
from headstart.errors import RequestError
from headstart.sampling.choose import TokenLogprob
from headstart.server.answers.logprobs import (
    TextOffsets,
    check_prompt_entries,
    completion_logprobs,
    prompt_logprobs,
)
from headstart.server.answers.writer import Writer
from headstart.server.channels import Event, Job
from headstart.server.model import ServedModel
from headstart.server.options import ServerOptions
from headstart.server.preparation import Prepared, check_length, grammar_of, limiting_field, seeded
from headstart.server.protocol.base import Texts, TokenIds, Whole
from headstart.server.protocol.requests import SamplingFields
from headstart.server.refusals import about

_LONG_ECHO = 1 << 18  # characters that take a while to write


class CompletionRequest(SamplingFields):
    default_max_tokens: ClassVar[int | None] = 16  # OpenAI's
    prompt: (
        str
        | Annotated[Texts, Field(min_length=1)]
        | TokenIds
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1)]
    )
    logprobs: Whole | None = None
    echo: bool = False
    add_special_tokens: bool = True

    @property
    def prompts(self) -> list[str | list[int]]:
        """One prompt or several, by what the list holds; one of no tokens is refused later on."""
        given: Any = self.prompt
        is_one = isinstance(given, str) or not given or isinstance(given[0], int)
        return [given] if is_one else list(given)

    @property
    def num_answers(self) -> int:
        return len(self.prompts) * (self.n or 1)

    @property
    def answers_field(self) -> str:
        return "prompt" if (self.n or 1) == 1 else "n"

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        both = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((number for number in both if number is not None), default=None)

    @property
    def scores_echo(self) -> bool:
        """Whether the repeated prompt comes with its log-probabilities."""
        return self.echo and self.logprobs is not None

    def check(self, limits: ServerOptions) -> None:
        super().check(limits)
        if self.num_answers > limits.max_n:
            raise RequestError(
                f"prompt holds {len(self.prompts)} prompts of {self.n or 1} answers each; this "
                f"server gives at most {limits.max_n} answers per request (--max-n).",
                field="prompt",
            )


def prepare_completion(
    request: CompletionRequest, answer_id: str, model: ServedModel, limits: ServerOptions
) -> Prepared:
    engine = model.engine
    params = request.params(engine.prompts)
    spec = grammar_of(request)
    jobs = []
    for prompt in request.prompts:
        if isinstance(prompt, str) and not request.add_special_tokens:
            prompt = engine.prompts.encode(prompt, add_special_tokens=False)
        asked = engine.read(prompt, seeded(params))
        check_length(asked.ids, request, model, limits.max_prompt_tokens)
        jobs.append(Job(asked, request.priority))
    check_prompt_entries(
        sum(len(job.asked.ids) for job in jobs), request.num_prompt_logprobs, request.n or 1,
        "prompt_logprobs" if request.prompt_logprobs is not None else "logprobs",
    )  # fmt: skip
    # Decoded once and here: a long prompt would hold up the event loop, once for every sample.
    echoed = [_echo(prompt, model) for prompt in request.prompts] if request.echo else []
    writer = CompletionWriter(
        request, jobs, model=model, answer_id=answer_id, echoed=echoed,
        limited_by=limiting_field(request, spec),
    )  # fmt: skip
    return Prepared(jobs, spec, writer, request.prompt)


def _echo(prompt: str | list[int], model: ServedModel) -> str:
    with about("echo"):
        return prompt if isinstance(prompt, str) else model.decode(prompt)


class CompletionWriter(Writer):
    request: CompletionRequest
    kind = chunk_kind = "text_completion"

    def __init__(self, *args: Any, echoed: Sequence[str], **options: Any):
        """`echoed` are the prompts' texts, where they are to be repeated."""
        super().__init__(*args, **options)
        self._echoed = echoed
        self._offsets: dict[int, TextOffsets] = {}  # by choice
        self._echo_scores: dict[int, tuple[dict[str, Any], TextOffsets]] = {}  # by prompt
        self._prompt_scores: dict[int, list[Any]] = {}
        self._held: dict[int, list[dict[str, Any]]] = {}  # chunks that wait for a prompt's scores

    @property
    def is_large(self) -> bool:
        return super().is_large or self._num_samples * sum(map(len, self._echoed)) > _LONG_ECHO

    def first_chunks(self) -> list[dict[str, Any]]:
        """The prompts, unless their log-probabilities come with them."""
        if not self.request.echo:
            return []
        numbers = range(len(self.jobs))
        if self.request.scores_echo:
            self._held = {number: [] for number in numbers}
            return []
        return [chunk for number in numbers for chunk in self._echoes(number, None)]

    def _echoes(self, number: int, entries: list[TokenLogprob] | None) -> list[dict[str, Any]]:
        first = number * self._num_samples
        return [
            self.chunk(
                _choice(
                    index, self._echoed[number],
                    None if entries is None else self._echo_logprobs(index, entries),
                    None,
                )
            )
            for index in range(first, first + self._num_samples)
        ]  # fmt: skip

    def chunks(self, event: Event) -> list[dict[str, Any]]:
        """Other samples' chunks wait for the one that brings the prompt's log-probabilities."""
        scores, before = event.update.prompt_logprobs, []
        if event.number in self._held:
            if scores is None:
                self._held[event.number] += self._chunks(event)
                return []
            before = self._echoes(event.number, scores) + self._held.pop(event.number)
        return before + self._chunks(event)

    def _chunks(self, event: Event) -> list[dict[str, Any]]:
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
        scores, logprobs = self.results[number].prompt_logprobs, None
        if output.logprobs is not None:
            before = None
            if self.request.scores_echo:
                before = self._echo_logprobs(index, scores or [])
            logprobs = self._logprobs(index, output.logprobs)
            if before is not None:
                logprobs = {name: before[name] + logprobs[name] for name in logprobs}
        choice = _choice(index, text, logprobs, output.finish_reason)
        extra = self.extras(index, output)
        if self.request.return_token_ids:
            extra["prompt_token_ids"] = self.results[number].prompt_token_ids
        if self.request.prompt_logprobs is not None:
            if number not in self._prompt_scores:
                self._prompt_scores[number] = prompt_logprobs(scores or [], self.model.pieces)
            extra["prompt_logprobs"] = self._prompt_scores[number]
        return {**choice, **extra}

    def _echo_logprobs(self, index: int, entries: list[TokenLogprob]) -> dict[str, Any]:
        """Of a choice's prompt: made once for all its samples, whose offsets go on behind it."""
        number, top = index // self._num_samples, self.request.logprobs or 0
        if number not in self._echo_scores:
            offsets = self._new_offsets()
            shown = completion_logprobs(
                [entry._replace(top=dict(islice(entry.top.items(), top))) for entry in entries],
                self.model.pieces, offsets, first=self.jobs[number].asked.ids[0],
                as_ids=self.request.return_tokens_as_token_ids,
            )  # fmt: skip
            self._echo_scores[number] = shown, offsets
        shown, offsets = self._echo_scores[number]
        self._offsets[index] = offsets.copy()
        return shown

    def _logprobs(self, index: int, entries: list[TokenLogprob]) -> dict[str, Any]:
        """Of a part of a choice's text."""
        if index not in self._offsets:
            self._offsets[index] = self._new_offsets()
        return completion_logprobs(
            entries, self.model.pieces, self._offsets[index],
            as_ids=self.request.return_tokens_as_token_ids,
        )  # fmt: skip

    def _new_offsets(self) -> TextOffsets:
        skip = self.request.skip_special_tokens is not False
        return TextOffsets(self.model.pieces, skip_special=skip)


def _choice(
    index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
