"""Top-k, top-p and min-p, which leave few tokens of a row: candidates instead of whole rows.

Each row's result is a function of that row alone, to the last bit: nothing here sums over the
vocabulary with an operator whose order of additions depends on how many rows there are. `sum` and
`logsumexp` do, and would make the text depend on K; `softmax` and `cumsum` go row by row.

R rows, V tokens, c candidates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.sampling.params import SamplingParams

# How many of the most likely tokens top-p looks at before it sorts a whole row.
_PREFIXES = (256, 4096)


@dataclass(frozen=True)
class Candidates:
    """What is left of some rows: values [r, c], -inf where cut, and whose they are."""

    rows: list[int]
    values: Tensor
    ids: Tensor | None  # columns [r, c]; None: all V, in order


def candidates(scaled: Tensor, params: Sequence[SamplingParams]) -> Iterator[Candidates]:
    """The rows of `scaled` [R, V] (after temperature, largest value 0) after truncation.

    Every row comes once. Top-k keeps exactly k tokens, equal ones by lowest id; top-p the fewest
    tokens, in the same order, whose share reaches p, at least one; min-p those with at least that
    share of the most likely one. Each works on what the one before has left.
    """
    groups: dict[int, list[int]] = {}
    for row, p in enumerate(params):
        groups.setdefault(_limit(p, scaled.shape[-1]), []).append(row)
    for limit, rows in groups.items():
        own = [params[row] for row in rows]
        if limit:
            values, ids = ranked(take(scaled, rows), limit)
            shares = values.softmax(-1)
            values = values.masked_fill(~_within(shares, own), -math.inf)
            yield Candidates(rows, _min_p(values, own), ids)
            continue
        nucleus = [row for row in rows if params[row].top_p < 1]
        whole = [row for row in rows if params[row].top_p >= 1]
        if whole:
            values = take(scaled, whole)
            yield Candidates(whole, _min_p(values, [params[row] for row in whole]), None)
        if nucleus:
            yield from _top_p(scaled, nucleus, params)


def ranked(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row and their columns, by value, then by lowest column."""
    best, ids = values.topk(count)
    last = best[:, -1:]
    # topk takes any of the equal values at the edge, and bf16 logits have many of those.
    tied = ((values >= last).count_nonzero(-1) > count) & (last.squeeze(-1) > -math.inf)
    for row in tied.nonzero().squeeze(-1).tolist():
        num_above = int((best[row] > last[row]).count_nonzero())
        equal = (values[row] == last[row]).nonzero().squeeze(-1)
        ids[row, num_above:] = equal[: count - num_above]
    ids = ids.sort(dim=-1).values
    best, order = values.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return best, ids.gather(-1, order)


def take(values: Tensor, rows: Sequence[int]) -> Tensor:
    """Those rows, without a copy when they are all."""
    return values if len(rows) == values.shape[0] else values[list(rows)]


def column(numbers: Sequence[float], like: Tensor) -> Tensor:
    """One number per row, [R, 1]."""
    return torch.tensor(numbers, dtype=like.dtype, device=like.device).unsqueeze(-1)


def _limit(params: SamplingParams, num_tokens: int) -> int:
    return params.top_k if 0 < params.top_k < num_tokens else 0


def _within(shares: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Which of the ranked `shares` belong to the top p: those before which p is not reached."""
    limits = column([p.top_p if p.top_p < 1 else math.inf for p in params], shares.double())
    total = shares.double().cumsum(-1)
    first = torch.zeros_like(total[:, :1])
    return torch.cat((first, total[:, :-1]), -1) < limits


def _top_p(
    scaled: Tensor, rows: list[int], params: Sequence[SamplingParams]
) -> Iterator[Candidates]:
    shares = take(scaled, rows).softmax(-1)
    num_tokens = scaled.shape[-1]
    for count in (*(c for c in _PREFIXES if c < num_tokens), num_tokens):
        # Ranked by value, not by share: far down, different values have the same share.
        values, ids = ranked(take(scaled, rows), count)
        own = [params[row] for row in rows]
        kept = _within(shares.gather(-1, ids), own)
        # The last candidate inside may have successors outside the prefix: a longer one decides.
        open_end = kept[:, -1].tolist() if count < num_tokens else [False] * len(rows)
        done = [i for i, is_open in enumerate(open_end) if not is_open]
        if done:
            values = take(values.masked_fill(~kept, -math.inf), done)
            values = _min_p(values, [own[i] for i in done])
            yield Candidates([rows[i] for i in done], values, take(ids, done))
        left = [i for i, is_open in enumerate(open_end) if is_open]
        if not left:
            return
        shares, rows = take(shares, left), [rows[i] for i in left]


def _min_p(values: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    if not any(p.min_p for p in params):
        return values
    floors = column([math.log(p.min_p) if p.min_p else -math.inf for p in params], values)
    return values.masked_fill(values < floors, -math.inf)
