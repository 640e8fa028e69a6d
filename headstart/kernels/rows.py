"""Work between products, one program per row: sums of splits, residual, norm, rotary, cache.

M rows, N width, S splits, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def add_norm(stream: Tensor, partial: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """stream [M, N] += sum of partial [S, M, N], in place; returns its RMS norm times weight.

    Without `partial` the stream is only read.
    """
    rows, width = stream.shape
    normed = torch.empty_like(stream)
    splits = 0 if partial is None else partial.shape[0]
    _add_norm[(rows,)](
        stream, stream if partial is None else partial, weight, normed, rows, width, eps,
        SPLITS=splits, BLOCK=triton.next_power_of_2(width), num_warps=8,
    )  # fmt: skip
    return normed


def silu_product(rows: Tensor) -> Tensor:
    """silu(gate) * up [M, N / 2] of rows [M, N] that hold gate, then up."""
    count, width = rows.shape
    result = torch.empty(count, width // 2, dtype=rows.dtype, device=rows.device)
    grid = (triton.cdiv(width // 2, 1024), count)
    _silu_product[grid](rows, result, width // 2, BLOCK=1024, num_warps=4)
    return result


def place_qkv(
    partial: Tensor, bias: Tensor | None, norms: tuple[Tensor, Tensor] | None, eps: float,
    cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor,
    heads: int,
) -> Tensor:  # fmt: skip
    """Finish a q, k, v product: bias, norms, rotation; keys and values go to their slots.

    partial [S, M, (H + 2 G) D]; cos and sin [positions, D], sin with the sign of its first half;
    positions and slots [M] (a slot below 0 is not written); caches [slots, G, D]; returns q
    [M, H, D].
    """
    splits, rows, _ = partial.shape
    kv_heads, dim = k_cache.shape[1:]
    q = torch.empty(rows, heads, dim, dtype=k_cache.dtype, device=partial.device)
    has_norms = norms is not None
    q_norm, k_norm = norms if norms is not None else (partial, partial)
    _place_qkv[(rows, heads + 2 * kv_heads)](
        partial, partial if bias is None else bias, q_norm, k_norm, cos, sin, positions, slots,
        q, k_cache, v_cache, rows, eps,
        SPLITS=splits, HEADS=heads, KV_HEADS=kv_heads, DIM=dim, HALF=dim // 2,
        BLOCK=triton.next_power_of_2(dim // 2),
        HAS_BIAS=bias is not None, HAS_NORMS=has_norms, num_warps=1,
    )  # fmt: skip
    return q


@triton.jit
def _add_norm(stream, partial, weight, normed, rows, width, eps, SPLITS: tl.constexpr,
              BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < width
    gain = tl.load(weight + at, mask, 0.0).to(tl.float32)
    x = tl.load(stream + row * width + at, mask, 0.0)
    kind = x.dtype
    if SPLITS > 0:
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for split in tl.static_range(SPLITS):
            total += tl.load(partial + (split * rows + row) * width + at, mask, 0.0).to(tl.float32)
        # Rounded where a plain product and a plain sum would round.
        x = (x.to(tl.float32) + total.to(kind).to(tl.float32)).to(kind)
        tl.store(stream + row * width + at, x, mask)
    value = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    tl.store(normed + row * width + at, (value * scale * gain).to(kind), mask)


@triton.jit
def _silu_product(rows, result, width, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    mask = at < width
    gate = tl.load(rows + row * 2 * width + at, mask, 0.0).to(tl.float32)
    up = tl.load(rows + row * 2 * width + width + at, mask, 0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(result + row * width + at, value.to(result.dtype.element_ty), mask)


@triton.jit
def _place_qkv(partial, bias, q_norm, k_norm, cos, sin, positions, slots, q, k_cache, v_cache,
               rows, eps, SPLITS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
               DIM: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
               HAS_BIAS: tl.constexpr, HAS_NORMS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    mask = at < HALF
    width = (HEADS + 2 * KV_HEADS) * DIM
    low = tl.zeros((BLOCK,), dtype=tl.float32)
    high = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        base = partial + (split * rows + row) * width + head * DIM
        low += tl.load(base + at, mask, 0.0).to(tl.float32)
        high += tl.load(base + HALF + at, mask, 0.0).to(tl.float32)
    if HAS_BIAS:
        low += tl.load(bias + head * DIM + at, mask, 0.0).to(tl.float32)
        high += tl.load(bias + head * DIM + HALF + at, mask, 0.0).to(tl.float32)
    kind = q.dtype.element_ty
    if head >= HEADS + KV_HEADS:
        slot = tl.load(slots + row).to(tl.int64)
        place = v_cache + (slot * KV_HEADS + head - HEADS - KV_HEADS) * DIM
        if slot >= 0:
            tl.store(place + at, low.to(kind), mask)
            tl.store(place + HALF + at, high.to(kind), mask)
    else:
        # Rounded here, where a plain product would have rounded.
        low = low.to(kind).to(tl.float32)
        high = high.to(kind).to(tl.float32)
        if HAS_NORMS:
            scale = tl.rsqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / DIM + eps)
            gain = k_norm if head >= HEADS else q_norm
            low = (low * scale * tl.load(gain + at, mask, 0.0).to(tl.float32)).to(kind)
            high = (high * scale * tl.load(gain + HALF + at, mask, 0.0).to(tl.float32)).to(kind)
            low = low.to(tl.float32)
            high = high.to(tl.float32)
        position = tl.load(positions + row).to(tl.int64)
        cos_low = tl.load(cos + position * DIM + at, mask, 0.0).to(tl.float32)
        cos_high = tl.load(cos + position * DIM + HALF + at, mask, 0.0).to(tl.float32)
        sin_low = tl.load(sin + position * DIM + at, mask, 0.0).to(tl.float32)
        sin_high = tl.load(sin + position * DIM + HALF + at, mask, 0.0).to(tl.float32)
        first = low * cos_low + high * sin_low
        second = high * cos_high + low * sin_high
        if head < HEADS:
            place = q + (row * HEADS + head) * DIM
            tl.store(place + at, first.to(kind), mask)
            tl.store(place + HALF + at, second.to(kind), mask)
        else:
            slot = tl.load(slots + row).to(tl.int64)
            place = k_cache + (slot * KV_HEADS + head - HEADS) * DIM
            if slot >= 0:
                tl.store(place + at, first.to(kind), mask)
                tl.store(place + HALF + at, second.to(kind), mask)
