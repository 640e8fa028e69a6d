"""What an engine hands back: tokens as they are emitted, their text, results and counters.

Tokens of a verdict are appended one by one until something ends the answer. Whatever lies behind a
stop is neither emitted nor kept, so an answer ends at the same token whether that token came alone
or in the middle of a verified chunk.

A token may end in the middle of a character, and several tokens may arrive at once. Text is handed
out only as far as it cannot change any more and cannot become part of a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headstart.engine.request import FinishReason, Request, RequestStats, TokenLogprob
from headstart.engine.verifier import Verdict
from headstart.sampling.acceptance import Origin
from headstart.simulate.acceptance import Acceptance


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

    @property
    def stats(self) -> RequestStats:
        """Of the first sample; every sample has its own."""
        return self.outputs[0].stats


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


@dataclass
class EngineStats:
    """Counters of a whole engine since it started."""

    acceptance: Acceptance = field(default_factory=Acceptance)
    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0  # finished with an error of their own
    trunk_seconds: float = 0.0
    draft_seconds: float = 0.0
    chosen_drafts: dict[int, int] = field(default_factory=dict)  # K -> rounds
    draft_reason: str = ""  # why the last K was chosen


def emit(request: Request, verdict: Verdict) -> None:
    """Append what was decided and set `finish_reason` if the answer ends with it."""
    for index, token in enumerate(verdict.tokens):
        if token < 0:  # nothing was allowed
            _end_of_choices(request)
            return
        request.tokens.append(token)
        request.origins.append(verdict.origins[index])
        if verdict.logprobs:
            request.logprobs.append(verdict.logprobs[index])
        if request.grammar is not None:
            request.grammar.accept(token)
        _check_end(request, token)
        if request.finish_reason is not None:
            return


def update_since(request: Request, num_before: int) -> Update:
    """What was added to a request that had `num_before` tokens of output."""
    is_last = request.finish_reason is not None
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
    )


def _end_of_choices(request: Request) -> None:
    """No token may come next: the grammar is at its end, or what else was asked left none over."""
    request.finish_reason = "stop"
    # The row was judged by a copy of the grammar: a failure shows again here.
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


def _check_end(request: Request, token: int) -> None:
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
    else:
        _check_grammar(request)
    if request.finish_reason is not None and request.text is not None and stopped is None:
        request.text.finish()


def _check_grammar(request: Request) -> None:
    """A grammar that failed ends its own request, and no other."""
    if request.grammar is not None and request.grammar.error is not None:
        request.finish_reason, request.error = "error", request.grammar.error


_BROKEN = "\ufffd"  # what decoders put for bytes that are not yet a character


class Decoder(Protocol):
    """What turns tokens into text: a tokenizer of transformers or tokenizers."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


def _decoder(tokenizer: Decoder) -> Callable[..., str]:
    """The tokenizer's `decode`, or what it calls: every token of every answer goes this way."""
    inner: Decoder | None = getattr(tokenizer, "backend_tokenizer", None)
    is_plain = inner is not None and not getattr(tokenizer, "clean_up_tokenization_spaces", False)
    return inner.decode if inner is not None and is_plain else tokenizer.decode


class Detokenizer:
    """The text of one growing sequence."""

    def __init__(
        self,
        tokenizer: Decoder,
        stops: Sequence[str],
        *,
        skip_special: bool,
        keep_stop: bool,
        min_tokens: int = 0,
    ):
        self._decoded, self._stops = _decoder(tokenizer), tuple(stops)
        self._skip_special, self._keep_stop = skip_special, keep_stop
        self._min_tokens = min_tokens  # no stop string ends before the token after these
        self._tokens: list[int] = []
        self._prefix = 0  # decoding starts here, so that a word keeps its leading space
        self._read = 0
        self.text = ""
        self._given = 0

    def add(self, token: int) -> str | None:
        """Take one token; returns the stop string that is now complete, if any."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._prefix : self._read])
        after = self._decode(self._tokens[self._prefix :])
        if after.endswith(_BROKEN) or len(after) <= len(before):
            return None
        self._prefix, self._read = self._read, len(self._tokens)
        scanned = len(self.text)
        self.text += after[len(before) :]
        return self._find_stop(scanned) if len(self._tokens) > self._min_tokens else None

    def finish(self) -> None:
        """No more tokens: what is still held back is text as it is."""
        before = self._decode(self._tokens[self._prefix : self._read])
        self.text += self._decode(self._tokens[self._prefix :])[len(before) :]
        self._prefix = self._read = len(self._tokens)

    def take(self, *, is_last: bool) -> str:
        """The part of the text that is safe to show and was not shown yet."""
        end = len(self.text) if is_last else len(self.text) - self._held_back()
        part = self.text[self._given : max(end, self._given)]
        self._given += len(part)
        return part

    def _decode(self, tokens: list[int]) -> str:
        return str(self._decoded(tokens, skip_special_tokens=self._skip_special))

    def _find_stop(self, scanned: int) -> str | None:
        """The stop string that completes first; the text is cut there."""
        found = [
            (at + len(stop), at, stop)
            for stop in self._stops
            if (at := self.text.find(stop, max(0, scanned - len(stop) + 1))) >= 0
        ]
        if not found:
            return None
        end, at, stop = min(found)
        self.text = self.text[: end if self._keep_stop else at]
        return stop

    def _held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = 0
        for stop in self._stops:
            tail = self.text[-(len(stop) - 1) :] if len(stop) > 1 else ""
            at = tail.find(stop[0])
            while 0 <= at < len(tail) - longest:
                if stop.startswith(tail[at:]):
                    longest = len(tail) - at
                    break
                at = tail.find(stop[0], at + 1)
        return longest
