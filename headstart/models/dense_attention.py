"""Causal attention inside documents with all scores in memory: for what has no fused kernel.

The results of `ragged.py`, for windows, sinks, values of another size than keys, and keys that are
chosen; gradients are autograd's.

T rows, H query heads, G key/value heads, D head size, C own keys per row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

Lengths = tuple[int, ...]


def split(lengths: Sequence[int], *tensors: Tensor, axis: int = 0) -> Iterator[tuple[Tensor, ...]]:
    """One tuple of parts per document."""
    return zip(*(torch.split(t, list(lengths), axis) for t in tensors), strict=True)


def all_rows(
    q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, n: Lengths,
    window: int | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    shared, own = split(n, q, k, v), split(n, own_k, own_v, axis=1)
    parts = zip(shared, own, strict=True)
    return torch.cat([one_document(*a, *b, window=window, sinks=sinks) for a, b in parts])


def some_rows(
    q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, lengths: Lengths,
    window: int | None, sinks: Tensor | None, rows: Tensor,
) -> Tensor:  # fmt: skip
    """All scores of these rows in memory, and none of others."""
    starts = torch.tensor([0, *accumulate(lengths)])
    counts = torch.searchsorted(rows.cpu(), starts).diff().tolist()
    parts = zip(
        split(lengths, k, v), split(counts, q, rows), split(counts, own_k, own_v, axis=1),
        starts.tolist(), strict=False,
    )  # fmt: skip
    return torch.cat([
        one_document(
            own_q, *keys, *own, window=window, sinks=sinks, at=places - start
        )
        for keys, (own_q, places), own, start in parts
        if len(places)
    ])  # fmt: skip


def one_document(
    q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, *,
    window: int | None = None, sinks: Tensor | None = None, allowed: Tensor | None = None,
    at: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """One document with all scores in memory: for what has no fused kernel.

    at [N]: the rows that q, own_k and own_v are of; all of them where it is not given.
    """
    group, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    own_k, own_v = own_k.repeat_interleave(group, 2), own_v.repeat_interleave(group, 2)
    scores = torch.einsum("thd,shd->hts", q, k)
    back, ahead = distance(k.shape[0], q.device), own_k.shape[0]
    back = back if at is None else back[at]
    unseen = back < 0
    own = torch.einsum("thd,cthd->htc", q, own_k)
    if window is not None:  # a query lies `ahead` places after the row that its chain began at
        unseen |= back >= window - ahead
        own[..., : max(0, ahead - window)] = -torch.inf
    scores = torch.cat([scores.masked_fill(unseen, -torch.inf), own], -1) * scale
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    if sinks is not None:
        sunk = sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, sunk], -1)
    weights = scores.softmax(-1)[..., : k.shape[0] + ahead]
    shared, rest = torch.split(weights, [k.shape[0], ahead], -1)
    return torch.einsum("hts,shd->thd", shared, v) + torch.einsum("htc,cthd->thd", rest, own_v)


def distance(rows: int, device: torch.device) -> Tensor:
    """[rows, rows]: how far back a column lies from a row; negative ahead of it."""
    at = torch.arange(rows, device=device)
    return at[:, None] - at
