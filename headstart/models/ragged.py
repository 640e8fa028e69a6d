"""Causal attention inside documents of different lengths, with gradients; fused where possible.

`chained_attention` adds a few keys per row that only this row sees. A fused kernel gives the
result over the shared keys and its log-sum-exp; the row's own keys are merged in by that. Going
back, the kernel gets the merged result and the merged log-sum-exp, which makes its probabilities
those of the whole row (as ring attention does), so nothing of size T x T is ever kept.

T rows, H query heads, G key/value heads, D head size, C own keys per row.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from headstart.models.dense_attention import (
    Lengths,
    all_rows,
    distance,
    one_document,
    some_rows,
    split,
)
from headstart.models.stacked_attention import rows_backward, rows_forward

_MOST_SCORES = 1 << 26  # that some rows keep; of more, all rows are computed, which keeps none


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    window: int | None = None,
    sinks: Tensor | None = None,
    *,
    rows: Tensor | None = None,
) -> Tensor:
    """q [T, H, D], k and v [T, G, D] -> [T, H, D]; row t sees rows up to t of its document.

    sinks [H]: a further score of each head, with nothing behind it. rows [N], ascending: the only
    ones whose results are wanted, [N, H, D].
    """
    if rows is not None:
        if window is None and sinks is None and v.shape == k.shape and _is_stacked(q):
            none = k.new_empty(0, len(rows), *k.shape[1:])
            return _merged(q[rows], k, v, none, none, lengths, rows)
        if not _is_fused(q) and len(rows) * max(lengths) * q.shape[1] <= _MOST_SCORES:
            q = q[rows]
            none = k.new_empty(0, *q.shape[:1], *k.shape[1:])
            return some_rows(q, k, v, none, none[..., : v.shape[-1]], lengths, window, sinks, rows)
        return causal_attention(q, k, v, lengths, window, sinks)[rows]
    none = k.new_empty(0, *k.shape)
    if sinks is not None:
        return all_rows(q, k, v, none, none[..., : v.shape[-1]], lengths, window, sinks)
    if window is None and _is_fused(q) and v.shape == k.shape:
        return _apply(q, k, v, none, none, lengths)
    return torch.cat([_plain(*part, window=window) for part in split(lengths, q, k, v)])


def chained_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own_k: Tensor,
    own_v: Tensor,
    lengths: Lengths,
    window: int | None = None,
    sinks: Tensor | None = None,
    *,
    rows: Tensor | None = None,
) -> Tensor:
    """The same, plus C keys and values of each row's own: own_k and own_v [C, T, G, D].

    They come after what the row sees of the document, its query beside the last of them. With
    `rows` q, own_k and own_v have these N rows.
    """
    if window is None and sinks is None and v.shape == k.shape and _is_stacked(q):
        return _merged(q, k, v, own_k, own_v, lengths, rows)
    if rows is not None:
        if not _is_fused(q):
            return some_rows(q, k, v, own_k, own_v, lengths, window, sinks, rows)
        size = len(k)
        q, own_k, own_v = (
            x.new_zeros(*x.shape[:at], size, *x.shape[at + 1 :]).index_copy(at, rows, x)
            for x, at in ((q, 0), (own_k, 1), (own_v, 1))
        )
        return chained_attention(q, k, v, own_k, own_v, lengths, window, sinks)[rows]
    if window is not None or sinks is not None or v.shape != k.shape:
        return all_rows(q, k, v, own_k, own_v, lengths, window, sinks)
    return _apply(q, k, v, own_k, own_v, lengths)


def _apply(q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, n: Lengths) -> Tensor:
    if _is_fused(q):
        return _merged(q, k, v, own_k, own_v, n, None)
    return all_rows(q, k, v, own_k, own_v, n, None, None)


def _merged(
    q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, n: Lengths, rows: Tensor | None
) -> Tensor:
    result: Tensor = _Merged.apply(q, k, v, own_k, own_v, n, rows)
    return result


def _is_fused(q: Tensor) -> bool:
    """Whether the kernels below take this; a GPU's want half precision and sizes in eights."""
    if q.is_cuda:
        size = q.shape[-1]
        return q.dtype in (torch.bfloat16, torch.float16) and size % 8 == 0 and size <= 256
    return q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64)


def _is_stacked(q: Tensor) -> bool:
    """Whether `stacked_attention` takes this: no fused kernel of CPUs takes half precision and
    returns the log-sum-exp."""
    return q.device.type == "cpu" and q.dtype in (torch.bfloat16, torch.float16)


def _plain(q: Tensor, k: Tensor, v: Tensor, *, window: int | None) -> Tensor:
    """One document, by PyTorch's own choice of kernel."""
    mask = None
    if window is not None:
        back = distance(q.shape[0], q.device)
        mask = (back >= 0) & (back < window)
    result = scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1),
        attn_mask=mask, is_causal=mask is None, enable_gqa=True,
    )  # fmt: skip
    return result.transpose(0, 1)


def chosen_attention(
    q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, allowed: Tensor,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`chained_attention` of one document, where rows see a choice only: allowed [T, T + C]."""
    return one_document(q, k, v, own_k, own_v, allowed=allowed, sinks=sinks)


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, lengths: Lengths,
        rows: Tensor | None,
    ) -> Tensor:  # fmt: skip
        result, sums, extra = _shared_forward(q, k, v, lengths, rows)
        if own_k.shape[0]:
            group, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
            keys, values = own_k.repeat_interleave(group, 2), own_v.repeat_interleave(group, 2)
            scores = (q * keys).sum(-1, dtype=sums.dtype) * scale  # [C, T, H]
            total = torch.logsumexp(torch.cat([sums[None], scores]), 0)
            merged = result * (sums - total).exp()[..., None]
            merged += (values * (scores - total).exp()[..., None]).sum(0)
            result, sums = merged.to(q.dtype), total
        ctx.save_for_backward(q, k, v, own_k, own_v, result, sums)
        ctx.lengths, ctx.rows, ctx.extra = lengths, rows, extra
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, own_k, own_v, result, sums = ctx.saved_tensors
        grad = grads[0].contiguous()
        d_q, d_k, d_v = _shared_backward(
            grad, q, k, v, result, sums, ctx.lengths, ctx.rows, ctx.extra
        )
        if not own_k.shape[0]:
            return d_q, d_k, d_v, None, None, None, None
        group, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
        keys, values = own_k.repeat_interleave(group, 2), own_v.repeat_interleave(group, 2)
        weights = ((q * keys).sum(-1, dtype=sums.dtype) * scale - sums).exp()  # [C, T, H]
        delta = (grad * result).sum(-1, dtype=sums.dtype)
        slope = weights * ((grad * values).sum(-1, dtype=sums.dtype) - delta) * scale
        d_q = d_q + (slope[..., None] * keys).sum(0).to(q.dtype)
        return (
            d_q, d_k, d_v,
            _grouped(slope[..., None] * q, group).to(k.dtype),
            _grouped(weights[..., None] * grad, group).to(v.dtype),
            None, None,
        )  # fmt: skip


def _grouped(rows: Tensor, group: int) -> Tensor:
    """[C, T, H, D] -> [C, T, G, D]: query heads that share a key head add up."""
    size = (*rows.shape[:2], -1, group, rows.shape[-1])
    return rows.reshape(size).sum(3)


def _shared_forward(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, rows: Tensor | None
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Result [T, H, D], log-sum-exp of its scores [T, H], and what the way back needs; of `rows`
    alone where these are given, which a fused kernel does not take."""
    if _is_stacked(q):
        return *rows_forward(q, k, v, lengths, rows), ()
    assert rows is None
    if q.is_cuda:
        edges, longest = _edges(lengths, q.device), max(lengths)
        result, sums, *random, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, edges, edges, longest, longest, 0.0, True, False
        )
        # One row per head of [H, T], where older kernels pad [documents, H, longest].
        assert sums.shape == (q.shape[1], q.shape[0]), sums.shape
        return result, sums.t(), (edges, *random)
    group = q.shape[1] // k.shape[1]
    results, parts = [], []
    for a, b, c in split(lengths, q, k, v):
        part, part_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            _heads_first(a), _heads_first(b, group), _heads_first(c, group), 0.0, True
        )
        results.append(part[0].transpose(0, 1))
        parts.append(part_sums[0].t())
    return torch.cat(results), torch.cat(parts), ()


@lru_cache(4)
@torch.inference_mode(False)
def _edges(lengths: Lengths, device: torch.device) -> Tensor:
    """Where documents begin and end; made once, because the host waits for a copy of it."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def _shared_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Tensor, sums: Tensor,
    lengths: Lengths, rows: Tensor | None, extra: tuple[Any, ...],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if _is_stacked(q):
        return rows_backward(grad, q, k, v, result, sums, lengths, rows)
    if q.is_cuda:
        edges, *random = extra
        longest = max(lengths)
        d_q, d_k, d_v = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, result, sums.t().contiguous(), edges, edges, longest, longest,
            0.0, True, *random,
        )  # fmt: skip
        return d_q, d_k, d_v
    group = q.shape[1] // k.shape[1]
    parts = []
    for d, a, b, c, r, s in split(lengths, grad, q, k, v, result, sums):
        d_a, d_b, d_c = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _heads_first(d), _heads_first(a), _heads_first(b, group), _heads_first(c, group),
            _heads_first(r), s.t()[None], 0.0, True,
        )  # fmt: skip
        sides = [part[0].transpose(0, 1) for part in (d_a, d_b, d_c)]
        parts.append([sides[0], *(_grouped(x[None], group)[0] for x in sides[1:])])
    d_q, d_k, d_v = (torch.cat(column) for column in zip(*parts, strict=True))
    return d_q, d_k, d_v


def _heads_first(rows: Tensor, repeat: int = 1) -> Tensor:
    """[T, H, D] -> [1, H * repeat, T, D], as the CPU kernel wants it."""
    return rows.repeat_interleave(repeat, 1).transpose(0, 1)[None]
