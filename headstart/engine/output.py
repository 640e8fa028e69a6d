"""What an engine hands back: emitted tokens, updates, results, counters.

Tokens of a verdict are appended one by one until something ends the answer, and all at once where
nothing but their text can end it. Whatever comes after a stop is neither emitted nor kept, so an
answer ends at the same token whether that token came alone or in the middle of a verified chunk.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headstart.engine.kept_states import KeptStates
from headstart.engine.request import FinishReason, Origin, Request
from headstart.engine.stats import EngineStats, RequestStats
from headstart.engine.verifier import Verdict
from headstart.sampling.choose import TokenLogprob

if TYPE_CHECKING:
    from headstart.engine.draft_sources import DraftSources


@dataclass
class Completion:
    """One sample."""

    index: int
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    origins: list[Origin]  # of every token; without drafts all are bonus
    logprobs: list[TokenLogprob] | None
    stats: RequestStats
    error: str | None = None  # of a request that ended with finish_reason "error"
    states: KeptStates | None = None  # the trunk's, where `submit` was asked to keep them


@dataclass
class Result:
    """The answer to one prompt."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[Completion] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] | None = None  # from the second token on

    @property
    def stats(self) -> RequestStats:
        """Of the first sample; every sample has its own."""
        return self.outputs[0].stats

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were not computed; a preempted request may have found them twice."""
        return min(self.stats.num_cached_tokens, len(self.prompt_token_ids))


@dataclass(frozen=True)
class Update:
    """What one step added to one sample."""

    request_id: str
    sample: int
    token_ids: list[int]
    text: str
    origins: list[Origin]
    logprobs: list[TokenLogprob]
    finish_reason: FinishReason | None
    error: str | None = None
    stop_reason: str | int | None = None  # the text or token that ended it
    prompt_logprobs: list[TokenLogprob] | None = None  # with a prompt's first update only


def deliver(
    request: Request, verdict: Verdict, stats: EngineStats, why_slow: str | None,
    sources: DraftSources | None,
) -> Update:  # fmt: skip
    """Take over what was decided for a request, count it, and tell what drafted; what is new.

    `why_slow`: why the host had to choose.
    """
    before = request.num_output
    emit(request, verdict)
    new = request.num_output - before
    stats.output_tokens += new
    if before:
        # Drafts after a stop were right for nothing: they do not count as accepted.
        drafts, accepted = verdict.num_drafts, min(verdict.num_accepted, new)
        request.stats.observe(drafts, accepted, request.num_of_head)
        stats.observe(drafts, accepted, request.num_of_head, why_slow)
    elif new and request.stats.first_token_seconds is None:
        request.stats.first_token_seconds = time.perf_counter() - request.created
    update = update_since(request, before)
    if before and sources is not None:
        accepted = min(verdict.num_accepted, new)
        sources.observe(request, verdict.num_drafts, accepted, update.token_ids)
    return update


def emit(request: Request, verdict: Verdict) -> None:
    """Append what was decided and set `finish_reason` if the answer ends with it."""
    if request.room <= 0:  # only the prompt was to be read
        request.finish_reason = "length"
        return
    if _takes_all(request, verdict):
        _append(request, verdict)
        return
    for index, token in enumerate(verdict.tokens):
        if token < 0:  # nothing was allowed
            _end_of_choices(request)
            return
        request.tokens.append(token)
        request.origins.append(verdict.origins[index])
        if verdict.logprobs:
            request.logprobs.append(verdict.logprobs[index])
        if request.grammar is not None and index >= verdict.grammar_tokens:
            request.grammar.accept(token)
        _check_end(request, token, has_grammar=index + 1 >= verdict.grammar_tokens)
        if request.finish_reason is not None:
            return


def _takes_all(request: Request, verdict: Verdict) -> bool:
    """Whether nothing but its text could end the answer at one of these tokens, as mostly."""
    tokens, text, grammar = verdict.tokens, request.text, request.grammar
    if not tokens or len(tokens) >= request.room or min(tokens) < 0:
        return False
    if text is not None and text.looks_for_stops:
        return False
    if grammar is not None and (verdict.grammar_tokens < len(tokens) or grammar.error is not None):
        return False
    return request.end_ids.isdisjoint(tokens)


def _append(request: Request, verdict: Verdict) -> None:
    """All tokens, up to one whose text cannot be made."""
    tokens, text = verdict.tokens, request.text
    count = len(tokens) if text is None else text.add_all(tokens)
    request.tokens += tokens[:count]
    request.origins += verdict.origins[:count]
    request.logprobs += verdict.logprobs[:count]
    _check_text(request)


def update_since(request: Request, num_before: int) -> Update:
    """What was added to a request that had `num_before` tokens of output."""
    is_last = request.finish_reason is not None
    scores = request.prompt_scores if num_before == 0 else None  # its first update, or its last
    return Update(
        request.group,
        request.sample,
        request.tokens[request.num_prompt + num_before :],
        request.text.take(is_last=is_last) if request.text is not None else "",
        request.origins[num_before:],
        request.logprobs[num_before:],
        request.finish_reason,
        request.error,
        request.stop_reason,
        scores.entries() if scores is not None else None,
    )


def _end_of_choices(request: Request) -> None:
    """No token may come next: the grammar is at its end, or what else was asked left none over."""
    request.finish_reason = "stop"
    # The row was masked by a copy of the grammar: a failure shows again here.
    fitting = request.grammar.allowed() if request.grammar is not None else None
    if fitting is None or (fitting.any() and not fitting[sorted(request.end_ids)].any()):
        request.finish_reason = "error"
        request.error = (
            "no token is left to choose: allowed_token_ids, banned_token_ids or logit_bias forbid "
            f"all that {'the grammar' if request.grammar is not None else 'the model'} allows."
        )
    _check_grammar(request)
    if request.text is not None:
        request.text.finish()
        _check_text(request)


def _check_end(request: Request, token: int, *, has_grammar: bool) -> None:
    """`has_grammar`: whether its grammar has accepted tokens up to this one and none behind it."""
    params = request.params
    is_end = token in request.end_ids and request.num_output > params.min_tokens
    stopped = None
    if request.text is not None and (not is_end or params.include_stop_str_in_output):
        stopped = request.text.add(token)
    stopped = None if is_end else stopped
    if is_end or stopped is not None:
        request.finish_reason = "stop"
        request.stop_reason = stopped if stopped is not None else token
    elif request.room <= 0:
        request.finish_reason = "length"
    elif has_grammar:
        _check_grammar(request)
    if request.text is not None:
        if request.finish_reason is not None and stopped is None:
            request.text.finish()
        _check_text(request)


def _check_grammar(request: Request) -> None:
    """A grammar that failed ends its own request, and no other."""
    if request.grammar is not None and request.grammar.error is not None:
        request.finish_reason, request.error = "error", request.grammar.error


def _check_text(request: Request) -> None:
    """So does a tokenizer that fails with its tokens."""
    if request.text is not None and request.text.error is not None:
        request.finish_reason, request.error = "error", request.text.error
        request.stop_reason = None
