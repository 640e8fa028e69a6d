"""What each request's step comes to: how many drafts were right, and the token the trunk adds.

The trunk's choice at a row is a function of that row's logits and history alone, so what is
emitted does not depend on what was drafted; drafts only decide how many rows count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from headstart.engine.request import Request
from headstart.engine.scheduler import Work
from headstart.sampling.acceptance import Origin, origins, reject
from headstart.sampling.choose import NOTHING_ALLOWED, logprobs, target_probs
from headstart.sampling.choose import choose as choose_rows
from headstart.sampling.params import Row, TokenLogprob

Chooser = Callable[[torch.Tensor, Sequence[Row]], list[int]]


def choose_all(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    """The reference: the sampling package's own choice at each row."""
    return [int(token) for token in choose_rows(logits, rows).tolist()]


@dataclass(frozen=True)
class Verdict:
    """The outcome for one request: tokens to emit, in order, with where they came from."""

    tokens: list[int]
    origins: list[Origin]
    num_accepted: int
    num_drafts: int  # those that counted: a grammar may have cut the chain
    logprobs: list[TokenLogprob]


DraftProbs = Callable[[Request], torch.Tensor]


def verify(
    works: Sequence[Work],
    logits: torch.Tensor,
    *,
    choose: Chooser = choose_all,
    draft_probs: DraftProbs | None = None,
    one_by_one: bool = False,
) -> dict[str, Verdict]:
    """Decide every work that has logits; rows of `logits` follow one another in that order.

    `choose` is the backend's; `draft_probs` gives what a request's drafts were drawn from, for
    the rejection rule. With `one_by_one` log-probabilities of each row come from tensors of its
    own, whose shape is always the same.
    """
    deciding = [work for work in works if work.needs_logits]
    rows: list[Row] = []
    limits: list[int] = []
    for work in deciding:
        limit = _build_rows(work, rows)
        limits.append(limit)
    if not deciding:
        return {}
    chosen = choose(logits, rows)
    result: dict[str, Verdict] = {}
    start = 0
    for work, limit in zip(deciding, limits, strict=True):
        request, drafts = work.request, list(work.drafts[:limit])
        own = chosen[start : start + work.num_logits]
        if drafts and request.params.acceptance == "rejection":
            assert draft_probs is not None
            probs = draft_probs(request)[:limit]
            accepted, following = _reject(work, probs, logits[start:], rows[start:])
            if own[accepted] == NOTHING_ALLOWED:
                following = NOTHING_ALLOWED
        else:
            accepted = 0
            while accepted < len(drafts) and drafts[accepted] == own[accepted]:
                accepted += 1
            following = own[accepted]
        emitted = [*drafts[:accepted], following]
        result[request.id] = Verdict(
            emitted,
            list(origins(accepted, len(drafts))),
            accepted,
            len(drafts),
            _logprobs(request, logits, rows, start, emitted, one_by_one=one_by_one),
        )
        start += work.num_logits
    return result


def _build_rows(work: Work, rows: list[Row]) -> int:
    """Append the rows of one work; returns how many of its drafts the grammar lets through."""
    request, params = work.request, work.request.params
    history = params.has_penalties
    output = request.output_ids if history else []
    # Rows behind a draft that the grammar refuses have no mask: they are dead.
    masks = request.grammar.masks(work.drafts) if request.grammar is not None else None
    for depth in range(work.num_logits):
        rows.append(
            Row(
                params=params,
                seed=request.seed,
                position=len(request.tokens) + depth,
                prompt_ids=request.prompt_ids if history else (),
                output_ids=[*output, *work.drafts[:depth]] if history else (),
                num_output=request.num_output + depth,
                end_ids=request.end_ids,
                mask=masks[depth] if masks is not None and depth < len(masks) else None,
            )
        )
    return len(work.drafts) if masks is None else len(masks) - 1


def _reject(
    work: Work, draft_probs: torch.Tensor, logits: torch.Tensor, rows: Sequence[Row]
) -> tuple[int, int]:
    """The classical rule: exact in distribution, but the text depends on what was drafted."""
    request, limit = work.request, len(draft_probs)
    target = target_probs(logits[: limit + 1], rows[: limit + 1])
    accepted, following = reject(
        torch.tensor([work.drafts[:limit]], device=logits.device),
        draft_probs.unsqueeze(0).to(target.dtype),
        target.unsqueeze(0),
        torch.tensor([limit], device=logits.device),
        [request.seed],
        [len(request.tokens)],
    )
    return int(accepted[0]), int(following[0])


def _logprobs(
    request: Request, logits: torch.Tensor, rows: Sequence[Row], start: int, emitted: list[int],
    *, one_by_one: bool,
) -> list[TokenLogprob]:  # fmt: skip
    params = request.params
    if params.logprobs is None:
        return []
    result = []
    each = 1 if one_by_one else len(emitted)
    for first in range(0, len(emitted), each):
        tokens, at = emitted[first : first + each], slice(start + first, start + first + each)
        own = logits[at].clone() if one_by_one else logits[at]
        ids = torch.tensor(tokens, device=logits.device)
        found = logprobs(own, ids, params.logprobs, params.logprobs_mode, rows[at])
        result += [
            TokenLogprob(token, value, dict(zip(names, numbers, strict=True)))
            for token, value, names, numbers in zip(
                tokens, *(part.tolist() for part in found), strict=True
            )
        ]
    return result
