"""The choice of a token: the arg-max of processed log-probability plus noise.

What `choose` returns is what is emitted, whatever was drafted. It is a function of a row's logits
and of its `Row`; a result that depended on other rows of the batch would end the promise that
speculation changes nothing.

R rows of the target, B rows of the draft, V tokens, Vd tokens of the draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headstart.sampling import noise
from headstart.sampling.params import LogprobsMode, Row
from headstart.sampling.processors import adjust, finish, process, scale
from headstart.sampling.truncation import Candidates, candidates, ranked, take

# The choice of a row in which no token is allowed: a dead row, or a grammar that has ended.
NOTHING_ALLOWED = -1


class TokenLogprob(NamedTuple):  # one per token: a NamedTuple is cheaper to create than a dataclass
    """Log-probability of an emitted token and of the best alternatives at its place."""

    token: int
    logprob: float
    top: dict[int, float]


def choose(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """The target's choice for each row, LongTensor [R]; logits [R, V].

    Equal sums go to the lowest id. NOTHING_ALLOWED where every token is masked.
    """
    return _choose_each(logits, rows, None, penalties=True)


def choose_drafts(logits: Tensor, rows: Sequence[Row], token_ids: Tensor | None = None) -> Tensor:
    """The draft's choice for each row, as original ids [B]; logits [B, V] or [B, Vd].

    With the target's noise, temperature, truncation and masks, so that the two agree as often as
    they can; without penalties, whose cost per draft step buys little. token_ids [Vd] are the
    original ids of a draft vocabulary. A row without any allowed token gets some token.
    """
    chosen = _choose_each(logits, rows, token_ids, penalties=False).clamp_min(0)
    return chosen if token_ids is None else token_ids[chosen]


def target_probs(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """The distribution that `choose` draws from, [R, V].

    At temperature 0 one-hot, or zeros where no token is allowed.
    """
    return _probs(adjust(logits, rows), rows)


def draft_probs(
    logits: Tensor, rows: Sequence[Row], token_ids: Tensor | None = None, num_tokens: int = 0
) -> Tensor:
    """The distribution that `choose_drafts` draws from, [B, V], over the `num_tokens` originals.

    For the rejection rule, which needs exactly the distribution that the drafts came from.
    """
    probs = _probs(adjust(logits, rows, token_ids, penalties=False), rows)
    if token_ids is None:
        return probs
    return probs.new_zeros(len(rows), num_tokens).index_copy_(-1, token_ids, probs)


def logprobs(
    logits: Tensor, ids: Tensor, top: int, mode: LogprobsMode, rows: Sequence[Row]
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of `ids` [R], and the `top` best ids [R, top] with theirs [R, top].

    raw: of the logits as they are; processed: of what the choice was made from.
    """
    if mode == "processed":
        values = process(logits, rows).log_softmax(-1)
    else:
        values = adjust(logits, ()).log_softmax(-1)
    chosen = values.gather(-1, ids.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    top = min(top, values.shape[-1])
    if top == 0:
        return chosen, ids.new_zeros(len(ids), 0), values[:, :0]
    best, best_ids = ranked(values, top)
    return chosen, best_ids, best


def _choose_each(
    logits: Tensor, rows: Sequence[Row], token_ids: Tensor | None, *, penalties: bool
) -> Tensor:
    """Columns [R] of the choices; only rows that need more than the arg-max are processed."""
    others = [i for i, row in enumerate(rows) if not row.is_plain_greedy]
    own = [rows[i] for i in others]
    if len(own) == len(rows):
        return _choose(adjust(logits, rows, token_ids, penalties=penalties), rows, token_ids)
    chosen = logits.argmax(-1)  # the first of equal values, as torch documents
    if own:
        adjusted = adjust(take(logits, others), own, token_ids, penalties=penalties)
        chosen[others] = _choose(adjusted, own, token_ids)
    return chosen


def _choose(adjusted: Tensor, rows: Sequence[Row], token_ids: Tensor | None) -> Tensor:
    """Columns [R] of the choices, after penalties, bias and masks."""
    result = torch.empty(len(rows), dtype=torch.int64, device=adjusted.device)
    greedy = [i for i, row in enumerate(rows) if row.params.is_greedy]
    if greedy:
        best, where = take(adjusted, greedy).max(-1)
        result[greedy] = where.masked_fill(best == -math.inf, NOTHING_ALLOWED)
    sampled = [i for i, row in enumerate(rows) if not row.params.is_greedy]
    if sampled:
        params = [rows[i].params for i in sampled]
        for part in candidates(scale(take(adjusted, sampled), params), params):
            own = [sampled[i] for i in part.rows]
            result[own] = _draw(part, [rows[i] for i in own], token_ids)
    return result


def _draw(part: Candidates, rows: Sequence[Row], token_ids: Tensor | None) -> Tensor:
    """Columns of the largest sums of value and noise; noise is made for candidates only."""
    num_columns = part.values.shape[-1]
    if part.ids is None:
        tokens = torch.arange(num_columns, device=part.values.device)
    else:
        tokens = part.ids
    if token_ids is not None:
        tokens = token_ids[tokens]
    sums = noise.gumbel([row.seed for row in rows], [row.position for row in rows], tokens)
    sums = sums.to(part.values.dtype).add_(part.values)
    best, where = sums.max(-1, keepdim=True)
    if part.ids is not None:
        # Candidates stand in order of value: the first of equal sums need not be the lowest id.
        never = torch.iinfo(torch.int64).max
        where = part.ids.masked_fill(sums != best, never).amin(-1, keepdim=True)
    return where.masked_fill(best == -math.inf, NOTHING_ALLOWED).squeeze(-1)


def _probs(adjusted: Tensor, rows: Sequence[Row]) -> Tensor:
    probs = finish(adjusted, rows).softmax(-1)
    greedy = [i for i, row in enumerate(rows) if row.params.is_greedy]
    if greedy:
        best, where = take(adjusted, greedy).max(-1, keepdim=True)
        is_any = (best > -math.inf).to(probs.dtype)  # a row without any allowed token has no best
        probs[greedy] = torch.zeros_like(take(probs, greedy)).scatter_(-1, where, is_any)
    return probs
