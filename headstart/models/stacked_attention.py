"""Causal attention of some rows inside their documents, forwards and back, in products of matrices.

For half precision on CPUs, where no fused kernel returns the log-sum-exp that a row's own keys are
merged in by. Rows of all heads that share keys are stacked to one matrix, so that a document takes
one batched product for its scores and one for what they give. Scores are formed again on the way
back.

T rows, of which N are queries; H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

_MOST_SCORES = 1 << 24  # in memory at a time


@dataclass(frozen=True)
class _Part:
    """Query rows of one document, and the keys that the last of them sees."""

    queries: slice  # of the N rows
    keys: slice  # of the T rows
    masked: Tensor  # [queries, keys] bool: keys that lie behind a query


def rows_forward(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], rows: Tensor | None
) -> tuple[Tensor, Tensor]:
    """q [N, H, D] of `rows` [N], ascending (None: all T); k and v [T, G, D].

    What they see [N, H, D], and the log of the sum of their scores' exponents [N, H], at least
    fp32.
    """
    result, sums = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=_wide(q))
    for own in _parts(lengths, rows, q.shape[1]):
        scores = _scores(q[own.queries], k[own.keys], own.masked)
        total = torch.logsumexp(scores, -1, keepdim=True)
        weights = scores.sub_(total).exp_().to(v.dtype)
        found = weights @ v[own.keys].transpose(0, 1)
        result[own.queries] = _apart(found, q.shape[1])
        sums[own.queries] = _apart(total, q.shape[1])[..., 0]
    return result, sums


def rows_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Tensor, sums: Tensor,
    lengths: Sequence[int], rows: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v for that of the result.

    `result` and `sums` may be of more scores than these: the weights are then those among all.
    """
    d_q = torch.empty_like(q)
    d_k, d_v = (torch.zeros_like(each, dtype=_wide(each)) for each in (k, v))  # sums over parts
    groups, scale = k.shape[1], q.shape[-1] ** -0.5
    deltas = (grad * result).sum(-1, dtype=_wide(q))
    for own in _parts(lengths, rows, q.shape[1]):
        queries, keys, values = q[own.queries], k[own.keys], v[own.keys].transpose(0, 1)
        together, given = _together(queries, groups), _together(grad[own.queries], groups)
        total, delta = (_together(each[own.queries][..., None], groups) for each in (sums, deltas))
        weights = _scores(queries, keys, own.masked).sub_(total).exp_()
        slopes = (given @ values.transpose(1, 2)).to(_wide(q)).sub_(delta).mul_(weights).mul_(scale)
        slopes, narrow = slopes.to(q.dtype), weights.to(v.dtype)
        d_q[own.queries] = _apart(slopes @ keys.transpose(0, 1), q.shape[1])
        d_k[own.keys] += (slopes.transpose(1, 2) @ together).transpose(0, 1)
        d_v[own.keys] += (narrow.transpose(1, 2) @ given).transpose(0, 1)
    return d_q, d_k.to(k.dtype), d_v.to(v.dtype)


def _parts(lengths: Sequence[int], rows: Tensor | None, heads: int) -> Iterator[_Part]:
    starts = [0, *accumulate(lengths)]
    if rows is None:
        rows = torch.arange(starts[-1])
    edges = torch.searchsorted(rows, torch.tensor(starts)).tolist()
    for start, length, begin, end in zip(starts, lengths, edges, edges[1:], strict=False):
        most = max(1, _MOST_SCORES // max(1, length * heads))
        for first in range(begin, end, most):
            queries = slice(first, min(first + most, end))
            places = rows[queries] - start
            size = int(places[-1]) + 1
            masked = torch.arange(size) > places[:, None]
            yield _Part(queries, slice(start, start + size), masked)


def _scores(q: Tensor, k: Tensor, masked: Tensor) -> Tensor:
    """[G, H / G * n, s] at least fp32, of n rows and s keys of one document."""
    together = _together(q, k.shape[1])
    scores = (together @ k.permute(1, 2, 0)).to(_wide(q)).mul_(q.shape[-1] ** -0.5)
    by_row = scores.view(-1, len(q), k.shape[0])
    by_row.masked_fill_(masked, -torch.inf)
    return scores


def _wide(numbers: Tensor) -> torch.dtype:
    return torch.promote_types(numbers.dtype, torch.float32)


def _together(rows: Tensor, groups: int) -> Tensor:
    """[n, H, D] -> [G, H / G * n, D]: heads that share keys, one below the other."""
    return rows.transpose(0, 1).reshape(groups, -1, rows.shape[-1])


def _apart(stacked: Tensor, heads: int) -> Tensor:
    """The way back, [n, H, D]."""
    return stacked.view(heads, -1, stacked.shape[-1]).transpose(0, 1)
