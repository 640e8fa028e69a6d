"""What an engine hands back: emitted tokens, results, counters, and updates that wait.

Tokens of a verdict are appended one by one until something ends the answer. Whatever comes after a
stop is neither emitted nor kept, so an answer ends at the same token whether that token came alone
or in the middle of a verified chunk.

n samples share an id. A step advances all requests, whatever called it, so an update waits in its
group for the stream it belongs to, or for the next call of `step`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from headstart.engine.request import FinishReason, Origin, Request, RequestStats
from headstart.engine.verifier import Verdict
from headstart.errors import RequestError
from headstart.sampling.acceptance import Acceptance
from headstart.sampling.choose import TokenLogprob


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


@dataclass
class EngineStats:
    """Counters of a whole engine since it started."""

    # Verification rounds of requests, by their numbers of drafts and of accepted drafts.
    rounds: Counter[tuple[int, int]] = field(default_factory=Counter)
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0  # finished with an error of their own
    trunk_seconds: float = 0.0
    draft_seconds: float = 0.0
    draft_reason: str = ""  # why the last K was chosen
    # Of each request: rounds in which the host chose nothing (masks of grammars it gives), others.
    fast_rounds: int = 0
    slow_rounds: dict[str, int] = field(default_factory=dict)

    def observe(self, num_drafts: int, num_accepted: int, why_slow: str | None) -> None:
        """Count one round of one request; `why_slow`: why the host had to choose."""
        self.rounds[num_drafts, num_accepted] += 1
        if why_slow is None:
            self.fast_rounds += 1
        else:
            self.slow_rounds[why_slow] = self.slow_rounds.get(why_slow, 0) + 1

    @property
    def acceptance(self) -> Acceptance:
        return Acceptance.of(self.rounds.copy())  # the engine may be counting meanwhile

    @property
    def chosen_drafts(self) -> Counter[int]:
        """Rounds by their number of drafts."""
        chosen: Counter[int] = Counter()
        for (drafts, _), count in self.rounds.copy().items():
            chosen[drafts] += count
        return chosen

    def clear(self) -> None:
        """Count from here on."""
        vars(self).update(vars(EngineStats()))


def emit(request: Request, verdict: Verdict) -> None:
    """Append what was decided and set `finish_reason` if the answer ends with it."""
    if request.room <= 0:  # only the prompt was to be read
        request.finish_reason = "length"
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


_ABORTED_KEPT = 256  # results of aborted requests that were not collected yet


@dataclass
class Group:
    """The requests of one id."""

    requests: list[Request]
    is_claimed: bool  # by a stream or `generate`: its updates are not for `step`
    is_aborted: bool = False
    is_quiet: bool = False  # only the whole result is wanted: updates are not kept
    updates: list[Update] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        return all(request.finish_reason is not None for request in self.requests)

    def take(self) -> list[Update]:
        """What was made since the last time."""
        taken, self.updates = self.updates, []
        return taken


class Groups:
    """What users have submitted, by id: open requests, updates not taken, results not collected."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}
        self._aborted: dict[str, None] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, name: str) -> bool:
        """Whether an id is in use; one that was aborted may be used again."""
        return name in self._groups and not self._groups[name].is_aborted

    @property
    def names(self) -> list[str]:
        return list(self._groups)

    def open(self, name: str, requests: list[Request], *, is_claimed: bool) -> None:
        self.forget(name)
        self._groups[name] = Group(requests, is_claimed)

    def requests(self, name: str) -> list[Request]:
        """All samples; none of an unknown id."""
        return self._groups[name].requests if name in self._groups else []

    def is_finished(self, name: str) -> bool:
        return name not in self._groups or self._groups[name].is_finished

    def put(self, updates: Iterable[Update]) -> None:
        for update in updates:
            group = self._groups[update.request_id]
            if not group.is_quiet:
                group.updates.append(update)

    def discard_updates(self, names: Iterable[str]) -> None:
        """Updates of these will not be taken: kept, each round's would wait for the last one."""
        for name in names:
            self._groups[name].is_quiet = True

    @property
    def has_updates(self) -> bool:
        """Whether `step` has something to hand out that was made before."""
        return any(group.updates for group in self._groups.values() if not group.is_claimed)

    def take(self) -> list[Update]:
        """All updates that belong to no stream."""
        groups = [group for group in self._groups.values() if not group.is_claimed]
        return [update for group in groups for update in group.take()]

    def find(self, name: str) -> Group | None:
        return self._groups.get(name)

    def abandon(self, name: str) -> None:
        """Keep an aborted group for its collector, but not for ever."""
        self._groups[name].is_aborted = True
        self._aborted[name] = None
        if len(self._aborted) > _ABORTED_KEPT:
            self.forget(next(iter(self._aborted)))

    def forget(self, name: str) -> None:
        self._groups.pop(name, None)
        self._aborted.pop(name, None)

    def collect(self, name: str) -> Result:
        """The result of a finished group, which is forgotten."""
        if name not in self._groups:
            raise RequestError(
                f"no request is called {name!r}; it was never added, or its result was collected."
            )
        group = self._groups[name]
        if not group.is_finished:
            raise RequestError(
                f"request {name!r} is still running; step until it is finished, or abort it."
            )
        self.forget(name)
        first, outputs = group.requests[0], [_completion(r) for r in group.requests]
        scores = first.prompt_scores
        return Result(
            name, first.prompt_ids, outputs, scores.entries() if scores is not None else None
        )


def _completion(request: Request) -> Completion:
    return Completion(
        index=request.sample,
        token_ids=request.output_ids,
        text=request.text.text if request.text is not None else "",
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        origins=request.origins,
        logprobs=request.logprobs if request.params.logprobs is not None else None,
        stats=request.stats,
        error=request.error,
    )
