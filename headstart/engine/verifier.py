"""What each request's step comes to: how many drafts were right, and the token the trunk adds.

The trunk's choice at a row is a function of that row's logits and history alone, so what is
emitted does not depend on what was drafted; drafts only decide how many rows count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch

from headstart.backends.base import Chooser
from headstart.engine.request import Origin, Request, origins
from headstart.engine.scheduler import Work
from headstart.sampling.choose import TokenLogprob
from headstart.sampling.params import Row


@dataclass(frozen=True)
class Verdict:
    """The outcome for one request: tokens to emit, in order, with where they came from."""

    tokens: list[int]
    origins: list[Origin]
    num_accepted: int
    num_drafts: int  # those that counted: a grammar may have cut the chain
    logprobs: list[TokenLogprob]
    grammar_tokens: int = 0  # of them, that the grammar has accepted already


DraftProbs = Callable[[Request], torch.Tensor]


@dataclass(frozen=True)
class RequestRows:
    """One request's rows among all that have logits."""

    work: Work
    rows: list[Row]
    drafts: tuple[int, ...]  # those that the grammar lets through
    logits: slice
    tokens: list[int] = field(default_factory=list)  # what is emitted

    @property
    def rejects(self) -> bool:
        return bool(self.drafts) and self.work.request.params.acceptance == "rejection"


def verify(
    works: Sequence[Work],
    logits: torch.Tensor,
    *,
    chooser: Chooser | None = None,
    draft_probs: DraftProbs | None = None,
) -> dict[str, Verdict]:
    """Decide every work that has logits; rows of `logits` follow one another in that order.

    `chooser` is the backend, or the sampling package itself; `draft_probs` gives what a request's
    drafts were drawn from, for the rejection rule.
    """
    parts = _rows_of([work for work in works if work.needs_logits])
    chooser = chooser or Chooser()
    for rejects, group in groupby(parts, lambda each: each.rejects):
        if rejects:
            assert draft_probs is not None
            _reject(list(group), logits, chooser, draft_probs)
        else:
            _match(list(group), logits, chooser)
    logprobs = _logprobs(parts, logits, chooser)
    result = {}
    for each in parts:
        accepted, name = len(each.tokens) - 1, each.work.request.id
        result[name] = Verdict(
            each.tokens,
            list(origins(accepted, len(each.drafts), each.work.request.num_of_head)),
            accepted, len(each.drafts), logprobs.get(name, []),
        )  # fmt: skip
    return result


def _match(parts: Sequence[RequestRows], logits: torch.Tensor, chooser: Chooser) -> None:
    """The usual rule: drafts that the trunk would have chosen, then what it chooses instead.

    Rows of `parts` lie side by side.
    """
    rows = [row for each in parts for row in each.rows]
    chosen = chooser.choose(logits[parts[0].logits.start : parts[-1].logits.stop], rows)
    begin = 0
    for each in parts:
        own = chosen[begin : begin + len(each.rows)]
        begin += len(each.rows)
        accepted = 0
        while accepted < len(each.drafts) and each.drafts[accepted] == own[accepted]:
            accepted += 1
        each.tokens.extend(own[: accepted + 1])


def _reject(
    parts: Sequence[RequestRows], logits: torch.Tensor, chooser: Chooser, draft_probs: DraftProbs
) -> None:
    """The classical rule: exact in distribution, but the text depends on what was drafted."""
    for each in parts:
        count = len(each.drafts)
        accepted, following = chooser.reject(
            logits[each.logits][: count + 1], each.rows[: count + 1], each.drafts,
            draft_probs(each.work.request)[:count],
        )  # fmt: skip
        each.tokens.extend([*each.drafts[:accepted], following])


def _rows_of(works: Sequence[Work]) -> list[RequestRows]:
    parts: list[RequestRows] = []
    begin = 0
    for work in works:
        end = begin + work.num_logits
        parts.append(_request_rows(work, slice(begin, end)))
        begin = end
    return parts


def _request_rows(work: Work, logits: slice) -> RequestRows:
    """The rows of one work, and those of its drafts that the grammar lets through."""
    request = work.request
    # Rows after a draft that the grammar refuses have no mask: they are dead.
    masks = request.grammar.masks(work.drafts) if request.grammar is not None else None
    rows = [
        request.row(
            work.drafts[:depth],
            masks[depth] if masks is not None and depth < len(masks) else None,
        )
        for depth in range(work.num_logits)
    ]
    fitting = work.drafts if masks is None else work.drafts[: len(masks) - 1]
    return RequestRows(work, rows, fitting, logits)


def _logprobs(
    parts: Sequence[RequestRows], logits: torch.Tensor, chooser: Chooser
) -> dict[str, list[TokenLogprob]]:
    """Those of emitted tokens, by request, where they are asked for."""
    asking = [each for each in parts if each.work.request.params.logprobs is not None]
    if not asking:
        return {}
    at = [each.logits.start + i for each in asking for i in range(len(each.tokens))]
    tokens = [token for each in asking for token in each.tokens]
    rows = [row for each in asking for row in each.rows[: len(each.tokens)]]
    found = iter(chooser.logprobs(logits, at, tokens, rows))
    return {
        each.work.request.id: [TokenLogprob(token, *next(found)) for token in each.tokens]
        for each in asking
    }
