"""Work between products, one program per row: sums of splits, residual, norm, rotary, cache.

M rows, N width, S splits, H query heads, G key/value heads, D head size, V that of values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.eight_bits import Fp8Rows, store_fp8
from headstart.backends.cuda.kernels.gates import gated
from headstart.backends.cuda.kernels.jit import jit
from headstart.backends.cuda.kernels.kv_fp8 import keep_fp8


def add_norm(stream: Tensor, partial: Tensor, weight: Tensor, eps: float) -> Tensor:
    """stream [M, N] += sum of partial [S, M, N], in place; returns its RMS norm times weight."""
    return _sum_norm(stream, partial, weight, eps, has_stream=True)


def add_norm_fp8(
    stream: Tensor, partial: Tensor, weight: Tensor, eps: float, group: int
) -> Fp8Rows:
    """The same with the norm as `fp8_rows` would round it; group 0: one scale per row."""
    rows, width = stream.shape
    values = torch.empty_like(stream, dtype=torch.float8_e4m3fn)
    groups = triton.cdiv(width, group) if group else 1
    scales = torch.empty(groups, rows, dtype=torch.float32, device=stream.device)
    block = max(triton.next_power_of_2(width), group)
    _add_norm[(rows,)](
        stream, partial, weight, values, scales, rows, width, eps, SPLITS=partial.shape[0],
        HAS_STREAM=True, GROUP=group or block, BLOCK=block, num_warps=8,
    )  # fmt: skip
    return Fp8Rows(values, scales, group)


def begin_norm(
    partial: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The same for a stream that begins with the sum: that stream and its norm."""
    stream = torch.empty(partial.shape[1:], dtype=dtype, device=partial.device)
    return stream, _sum_norm(stream, partial, weight, eps, has_stream=False)


def _sum_norm(
    stream: Tensor, partial: Tensor, weight: Tensor, eps: float, *, has_stream: bool
) -> Tensor:
    rows, width = stream.shape
    normed = torch.empty_like(stream)
    _add_norm[(rows,)](
        stream, partial, weight, normed, None, rows, width, eps, SPLITS=partial.shape[0],
        HAS_STREAM=has_stream, GROUP=0, BLOCK=triton.next_power_of_2(width), num_warps=8,
    )  # fmt: skip
    return normed


def silu_product(rows: Tensor, dtype: torch.dtype | None = None, *, limit: float = 0) -> Tensor:
    """silu(gate) * up [M, N / 2] of rows [M, N]: gate, then up; in `dtype`, else in theirs.

    limit: what both are cut off at; 0: nothing is.
    """
    count, width = rows.shape
    result = torch.empty(count, width // 2, dtype=dtype or rows.dtype, device=rows.device)
    grid = (count, triton.cdiv(width // 2, 1024))  # the first axis may be long
    _silu_product[grid](rows, result, width // 2, LIMIT=limit, BLOCK=1024, num_warps=4)
    return result


def place_qkv(
    partial: Tensor, bias: Tensor | None, norms: tuple[Tensor, Tensor] | None, eps: float,
    cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor,
    heads: int, *, each: int | None = None, is_interleaved: bool = False, is_gated: bool = False,
    sizes: Tensor | None = None, dtype: torch.dtype | None = None, v_scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """Finish a q, k, v product: bias, norms, rotation; keys and values go to their slots.

    partial [S, M, (H + G) D + G V], V being D at most; cos and sin [positions, R], sin with the
    sign of the first of each pair: the first R dimensions are rotated, a pair lies R / 2 apart or
    side by side (`is_interleaved`); positions and slots [M] (a slot below 0 is not written); caches
    [slots, G, D or V]; returns q [M, H, D]. `v_scale`: of all values. With `is_gated` every query
    is followed by its gate, which is left to `gates.py`. sizes [slots, G, 2] int16: of 8-bit
    floats, of which caches hold words [slots, G, D / 2]; `dtype` is then the type of q.
    """
    splits, rows, _ = partial.shape
    kv_heads, dim = k_cache.shape[1:]
    v_dim = v_cache.shape[2]
    caches = k_cache, v_cache
    own_sizes: tuple[Tensor | None, ...] = (None, None)
    if sizes is not None:
        dim, v_dim = 2 * dim, 2 * v_dim
        caches = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
        own_sizes = sizes, sizes.flatten()[1:]  # an exponent of values follows one of keys
    assert v_dim == dim or (v_dim < dim and sizes is None)
    q = torch.empty(rows, heads, dim, dtype=dtype or k_cache.dtype, device=partial.device)
    q_norm, k_norm = norms if norms is not None else (partial, partial)
    # Few rows must fill the GPU with programs; of many rows a program takes several heads.
    each = each or (2 if rows <= 16 else 16)
    _place_qkv[(rows, triton.cdiv(heads + 2 * kv_heads, each))](
        partial, partial if bias is None else bias, q_norm, k_norm, cos, sin, positions, slots,
        q, *caches, *own_sizes, rows, eps, v_scale,
        SPLITS=splits, HEADS=heads, KV_HEADS=kv_heads, EACH=each, DIM=dim, HALF=dim // 2,
        VALUE=v_dim, IS_SCALED=v_scale != 1,
        ROTATED=cos.shape[1], IS_INTERLEAVED=is_interleaved, IS_GATED=is_gated,
        BLOCK=triton.next_power_of_2(dim // 2), HAS_BIAS=bias is not None,
        HAS_NORMS=norms is not None, num_warps=1 if each == 2 else 4,
    )  # fmt: skip
    return q


@jit(do_not_specialize=["rows"])
def _add_norm(stream, partial, weight, normed, scales, rows, width, eps, SPLITS: tl.constexpr,
              HAS_STREAM: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < width
    kind = stream.dtype.element_ty
    gain = tl.load(weight + at, mask, 0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partial + (split * rows + row) * width + at, mask, 0.0).to(tl.float32)
    # Rounded where a plain product and a plain sum would round.
    x = total.to(kind)
    if HAS_STREAM:
        before = tl.load(stream + row * width + at, mask, 0.0)
        x = (before.to(tl.float32) + x.to(tl.float32)).to(kind)
    tl.store(stream + row * width + at, x, mask)
    value = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    result = (value * scale * gain).to(kind)
    if GROUP:
        store_fp8(result.to(tl.float32), normed, scales, row, rows, width, 0, GROUP, BLOCK)
    else:
        tl.store(normed + row * width + at, result, mask)


@jit
def _silu_product(rows, result, width, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    mask = at < width
    gate = tl.load(rows + row * 2 * width + at, mask, 0.0).to(tl.float32)
    up = tl.load(rows + row * 2 * width + width + at, mask, 0.0).to(tl.float32)
    value = gated(gate, up, LIMIT)
    tl.store(result + row * width + at, value.to(result.dtype.element_ty), mask)


@jit(do_not_specialize=["rows"])
def _place_qkv(partial, bias, q_norm, k_norm, cos, sin, positions, slots, q, k_cache, v_cache,
               k_sizes, v_sizes, rows, eps, v_scale, SPLITS: tl.constexpr, HEADS: tl.constexpr,
               KV_HEADS: tl.constexpr, EACH: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
               VALUE: tl.constexpr, IS_SCALED: tl.constexpr,
               ROTATED: tl.constexpr, IS_INTERLEAVED: tl.constexpr, IS_GATED: tl.constexpr,
               BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
               HAS_NORMS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * EACH + tl.arange(0, EACH)[:, None]  # queries, then keys, values
    at = tl.arange(0, BLOCK)[None, :]
    is_query = head < HEADS
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_value = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    is_half = at < HALF
    # Of each pair of dimensions the first and the second; those that are not rotated come last.
    first_at = at
    second_at = HALF + at
    if IS_INTERLEAVED:
        first_at = 2 * at
        second_at = 2 * at + 1
    elif ROTATED < DIM:
        first_at = tl.where(at < ROTATED // 2, at, at + ROTATED // 2)
        second_at = tl.where(at < ROTATED // 2, at + ROTATED // 2, at + HALF)
    mask = (is_query | is_key | is_value) & is_half
    low_mask = mask
    high_mask = mask
    width = (HEADS + KV_HEADS) * DIM + KV_HEADS * VALUE
    source = head * DIM  # where it stands in the product
    if IS_GATED:
        width += HEADS * DIM
        source = tl.where(is_query, 2 * head, head + HEADS) * DIM
    if VALUE < DIM:
        source -= tl.where(is_value, (head - HEADS - KV_HEADS) * (DIM - VALUE), 0)
        low_mask = mask & (~is_value | (first_at < VALUE))
        high_mask = mask & (~is_value | (second_at < VALUE))
    low = tl.zeros((EACH, BLOCK), dtype=tl.float32)
    high = tl.zeros((EACH, BLOCK), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        base = partial + (split * rows + row) * width + source
        low += tl.load(base + first_at, low_mask, 0.0).to(tl.float32)
        high += tl.load(base + second_at, high_mask, 0.0).to(tl.float32)
    if HAS_BIAS:
        low += tl.load(bias + source + first_at, low_mask, 0.0).to(tl.float32)
        high += tl.load(bias + source + second_at, high_mask, 0.0).to(tl.float32)
    # Rounded here, where a plain product would have rounded.
    kind = q.dtype.element_ty
    low = low.to(kind).to(tl.float32)
    high = high.to(kind).to(tl.float32)
    slot = tl.load(slots + row).to(tl.int64)
    is_kept = slot + head * 0 >= 0
    value_slot = slot * KV_HEADS + head - HEADS - KV_HEADS
    values_low = low
    values_high = high
    if IS_SCALED:
        values_low = low * v_scale
        values_high = high * v_scale
    _keep(values_low, values_high, v_cache, v_sizes, value_slot, first_at, second_at,
          is_value & is_kept, low_mask, high_mask, VALUE)  # fmt: skip
    if HAS_NORMS:
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
        gain_low = _gain(q_norm, k_norm, first_at, is_query, is_half)
        gain_high = _gain(q_norm, k_norm, second_at, is_query, is_half)
        low = (low * scale * gain_low).to(kind).to(tl.float32)
        high = (high * scale * gain_high).to(kind).to(tl.float32)
    position = tl.load(positions + row).to(tl.int64) * ROTATED
    is_turned = at < ROTATED // 2
    cos_low = tl.load(cos + position + first_at, is_turned, 1.0).to(tl.float32)
    cos_high = tl.load(cos + position + second_at, is_turned, 1.0).to(tl.float32)
    sin_low = tl.load(sin + position + first_at, is_turned, 0.0).to(tl.float32)
    sin_high = tl.load(sin + position + second_at, is_turned, 0.0).to(tl.float32)
    first = (low * cos_low + high * sin_low).to(kind)
    second = (high * cos_high + low * sin_high).to(kind)
    query_at = q + (row * HEADS + head) * DIM
    tl.store(query_at + first_at, first, is_query & is_half)
    tl.store(query_at + second_at, second, is_query & is_half)
    key_slot = slot * KV_HEADS + head - HEADS
    _keep(first.to(tl.float32), second.to(tl.float32), k_cache, k_sizes, key_slot, first_at,
          second_at, is_key & is_kept, is_half, is_half, DIM)  # fmt: skip


@jit
def _keep(first, second, cache, sizes, slot, first_at, second_at, is_own, is_first, is_second,
          DIM: tl.constexpr):  # fmt: skip
    """Both halves of keys or values go to their slots, as they are or in 8-bit floats."""
    if sizes is None:
        target = cache + slot * DIM
        kind = cache.dtype.element_ty
        tl.store(target + first_at, first.to(kind), is_own & is_first)
        tl.store(target + second_at, second.to(kind), is_own & is_second)
    else:
        keep_fp8(first, second, cache, sizes, slot, first_at, second_at, is_own, is_first, DIM // 2)


@jit
def _gain(q_norm, k_norm, at, is_query, is_half):
    of_query = tl.load(q_norm + at, is_half, 0.0).to(tl.float32)
    of_key = tl.load(k_norm + at, is_half, 0.0).to(tl.float32)
    return tl.where(is_query, of_query, of_key)
