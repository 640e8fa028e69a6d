"""What each request's step comes to: how many drafts were right, and the token the trunk adds.

The trunk's choice at a row is a function of that row's logits and history alone, so what is
emitted does not depend on what was drafted; drafts only decide how many rows count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headstart.engine.outputs import TokenLogprob
from headstart.engine.request import Origin, Request
from headstart.engine.scheduler import Work
from headstart.sampling.acceptance import origins, reject
from headstart.sampling.choose import NOTHING_ALLOWED, choose, logprobs, target_probs
from headstart.sampling.rows import Row


@dataclass(frozen=True)
class Verdict:
    """The outcome for one request: tokens to emit, in order, with where they came from."""

    tokens: list[int]
    origins: list[Origin]
    num_accepted: int
    num_drafts: int  # those that counted: a grammar may have cut the chain
    logprobs: list[TokenLogprob]


def verify(
    works: Sequence[Work], logits: torch.Tensor, *, one_by_one: bool = False
) -> dict[str, Verdict]:
    """Decide every work that has logits; rows of `logits` follow one another in that order.

    `one_by_one` processes each row in tensors of its own, whose shape is always the same.
    """
    deciding = [work for work in works if work.needs_logits]
    rows: list[Row] = []
    limits: list[int] = []
    for work in deciding:
        limit = _build_rows(work, rows)
        limits.append(limit)
    if not deciding:
        return {}
    if one_by_one:
        chosen = [int(choose(logits[i : i + 1].clone(), [row])) for i, row in enumerate(rows)]
    else:
        chosen = choose(logits, rows).tolist()
    result: dict[str, Verdict] = {}
    start = 0
    for work, limit in zip(deciding, limits, strict=True):
        request, drafts = work.request, list(work.drafts[:limit])
        own = chosen[start : start + work.num_logits]
        if drafts and request.params.acceptance == "rejection":
            accepted, following = _reject(work, limit, logits[start:], rows[start:])
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
            _logprobs(request, logits, rows, start, emitted),
        )
        start += work.num_logits
    return result


def _build_rows(work: Work, rows: list[Row]) -> int:
    """Append the rows of one work; returns how many of its drafts the grammar lets through."""
    request, params = work.request, work.request.params
    history = params.has_penalties
    output = request.output_ids if history else []
    grammar = request.grammar.fork() if request.grammar is not None else None
    limit = len(work.drafts)
    for depth in range(work.num_logits):
        mask = grammar.allowed() if grammar is not None and depth <= limit else None
        rows.append(
            Row(
                params=params,
                seed=request.seed,
                position=len(request.tokens) + depth,
                prompt_ids=request.prompt_ids if history else (),
                output_ids=[*output, *work.drafts[:depth]] if history else (),
                num_output=request.num_output + depth,
                end_ids=request.end_ids,
                mask=mask,
            )
        )
        if grammar is not None and depth < limit and not grammar.accept(work.drafts[depth]):
            limit = depth  # rows behind a refused draft are dead
    return limit


def _reject(work: Work, limit: int, logits: torch.Tensor, rows: Sequence[Row]) -> tuple[int, int]:
    """The classical rule: exact in distribution, but the text depends on what was drafted."""
    request = work.request
    target = target_probs(logits[: limit + 1], rows[: limit + 1])
    assert request.draft_probs is not None
    accepted, following = reject(
        torch.tensor([work.drafts[:limit]], device=logits.device),
        request.draft_probs[:limit].unsqueeze(0).to(target.dtype),
        target.unsqueeze(0),
        torch.tensor([limit], device=logits.device),
        [request.seed],
        [len(request.tokens)],
    )
    return int(accepted[0]), int(following[0])


def _logprobs(
    request: Request, logits: torch.Tensor, rows: Sequence[Row], start: int, emitted: list[int]
) -> list[TokenLogprob]:
    top = request.params.logprobs
    if top is None:
        return []
    stop = start + len(emitted)
    ids = torch.tensor(emitted, device=logits.device)
    mode = request.params.logprobs_mode
    chosen, best, values = logprobs(logits[start:stop], ids, top, mode, rows[start:stop])
    return [
        TokenLogprob(token, value, dict(zip(names, numbers, strict=True)))
        for token, value, names, numbers in zip(
            emitted, chosen.tolist(), best.tolist(), values.tolist(), strict=True
        )
    ]
