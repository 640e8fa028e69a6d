"""What both APIs have in common: ids and times of an answer, usage, statistics, the last chunk."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from headstart.engine.output import Completion, Detokenizer, Result, Update
from headstart.server.model import ServedModel
from headstart.server.protocol.sampling import SamplingFields
from headstart.server.refusals import unanswerable
from headstart.server.worker import Event, Job
from headstart.simulate.acceptance import Acceptance

if TYPE_CHECKING:
    from headstart.engine.output import Completion, Result

_LARGE = 2000  # tokens and alternatives in one answer


class Writer:
    """Makes chunks of events while they come, or a whole answer of their results."""

    kind = ""  # `object` of a whole answer
    chunk_kind = ""
    limited_by: str | None = None  # the request's field that may leave nothing to choose from

    def __init__(
        self, request: SamplingFields, jobs: Sequence[Job], *, model: ServedModel, answer_id: str
    ):
        self.request, self.jobs, self.model = request, jobs, model
        self._id, self._created = answer_id, int(time.time())
        self._name = request.model if request.model is not None else model.names[0]
        self._num_samples = request.n or 1
        self._results: dict[int, Result] = {}
        self._num_output = 0
        self._has_shown_prompt = False
        self._origins: dict[int, OriginText] = {}

    @property
    def results(self) -> list[Result]:
        """Of all prompts that have ended, in order."""
        return [self._results[number] for number in sorted(self._results)]

    def note(self, event: Event) -> None:
        """Keep what the end of the answer needs; raises for a sample that failed."""
        if event.update.finish_reason == "error":
            said = event.update.error or "the request failed in the engine."
            raise unanswerable(said, self.limited_by)
        self._num_output += len(event.update.token_ids)
        if event.result is not None:
            self._results[event.number] = event.result

    @property
    def is_large(self) -> bool:
        """Whether writing the whole answer would hold up the event loop."""
        return self._num_output * (1 + (self.request.num_logprobs or 0)) > _LARGE

    def first_chunks(self) -> list[dict[str, Any]]:
        return []

    def chunks(self, event: Event) -> list[dict[str, Any]]:
        raise NotImplementedError

    def last_chunks(self) -> list[dict[str, Any]]:
        """Usage and statistics, if asked for, in one chunk without choices."""
        options = self.request.stream_options
        extra: dict[str, Any] = {}
        if options is not None and options.include_usage:
            extra["usage"] = self.usage()
        if self.request.headstart.statistics:
            extra["headstart"] = {"statistics": statistics_of(self.results)}
        return [{**self.head(self.chunk_kind), "choices": [], **extra}] if extra else []

    def whole(self) -> dict[str, Any]:
        choices = [
            self.whole_choice(number * self._num_samples + output.index, number, output)
            for number, result in enumerate(self.results)
            for output in result.outputs
        ]
        answer = {**self.head(self.kind), "choices": choices, "usage": self.usage()}
        if self.request.headstart.statistics:
            answer["headstart"] = {"statistics": statistics_of(self.results)}
        if self.request.return_token_ids and len(self.results) == 1:
            answer["prompt_token_ids"] = self.results[0].prompt_token_ids
        return answer

    def usage(self) -> dict[str, Any]:
        return usage_of(self.results)

    def whole_choice(self, index: int, number: int, output: Completion) -> dict[str, Any]:
        raise NotImplementedError

    def head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id, "object": kind, "created": self._created, "model": self._name,
            "system_fingerprint": self.model.fingerprint,
        }  # fmt: skip

    def chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        options = self.request.stream_options
        extra: dict[str, Any] = {}
        if options is not None and options.continuous_usage_stats:
            prompt = sum(len(job.asked.ids) for job in self.jobs)
            extra["usage"] = usage(prompt, self._num_output)
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


class OriginText:
    """Splits the text of one sample by tokens.

    Text that waits (it may begin a stop string) belongs to tokens of an earlier chunk: such
    chunks carry origins only.
    """

    def __init__(self, tokenizer: Any, *, skip_special: bool):
        self._text = Detokenizer(tokenizer, (), skip_special=skip_special, keep_stop=True)

    def of(self, update: Update | Completion) -> dict[str, Any]:
        texts = []
        for token in update.token_ids:
            before = len(self._text.text)
            self._text.add(token)
            texts.append(self._text.text[before:])
        shown: dict[str, Any] = {"origins": list(update.origins)}
        if "".join(texts) == update.text:
            shown["token_texts"] = texts
        return shown


def usage(prompt_tokens: int, completion_tokens: int, num_cached: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def usage_of(results: Sequence[Result]) -> dict[str, Any]:
    prompt = sum(len(result.prompt_token_ids) for result in results)
    completion = sum(len(output.token_ids) for output in _outputs(results))
    return usage(prompt, completion, cached_tokens(results))


def statistics_of(results: Sequence[Result]) -> dict[str, Any]:
    """What drafting gave, all samples together; the words of the engine's own counters."""
    outputs = _outputs(results)
    total = Acceptance()
    for output in outputs:
        total.add(output.stats.acceptance)
    firsts = [o.stats.first_token_seconds for o in outputs if o.stats.first_token_seconds]
    return {
        "draft_tokens": sum(total.drafted),
        "accepted_tokens": sum(total.accepted),
        "draft_tokens_per_depth": list(total.drafted),
        "accepted_per_depth": list(total.accepted),
        "tried_per_depth": list(total.tried),  # of the drafts: all before them were accepted
        "rounds": total.rounds,
        "acceptance_length": total.length,
        "chosen_k": _usual_k(total),
        "time_to_first_token_seconds": min(firsts, default=None),
        "tokens_per_second": _speed(outputs),
        "cached_tokens": cached_tokens(results),
        "seed": results[0].stats.seed,
        "seeds": [result.stats.seed for result in results],  # of each prompt's first answer
        "draft_vocab": results[0].stats.draft_vocab,
    }


def _outputs(results: Sequence[Result]) -> list[Completion]:
    return [output for result in results for output in result.outputs]


def cached_tokens(results: Sequence[Result]) -> int:
    """Prompt tokens that were not computed; a preempted request may have found them twice."""
    return sum(
        min(result.stats.num_cached_tokens, len(result.prompt_token_ids)) for result in results
    )


def _usual_k(acceptance: Acceptance) -> int:
    """The number of drafts that most rounds had."""
    at_least = [acceptance.rounds, *acceptance.drafted, 0]
    rounds = [more - fewer for more, fewer in pairwise(at_least)]
    return max(range(len(rounds)), key=lambda k: rounds[k])


def _speed(outputs: Sequence[Completion]) -> float | None:
    """Tokens per second behind the first ones; None where nothing came behind them."""
    ended = [o for o in outputs if o.stats.first_token_seconds and o.stats.total_seconds]
    more = sum(len(output.token_ids) - 1 for output in ended)
    seconds = max((o.stats.total_seconds or 0.0 for o in ended), default=0.0) - min(
        (o.stats.first_token_seconds or 0.0 for o in ended), default=0.0
    )
    return more / seconds if more > 0 and seconds > 0 else None
