"""Rows of an indexer: queries turned, keys normed, turned and kept, weights of heads in fp32.

M rows, S splits, H index heads, D their size, P numbers of them that are rotated.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.jit import jit
from headstart.backends.cuda.kernels.latent_rows import Turn, places_of, rotated, summed

_HEADS_EACH = 8  # of a program that turns queries


def keep_index(
    key: Tensor, norm: tuple[Tensor, Tensor], eps: float, turn: Turn, slots: Tensor, keys: Tensor,
    *, is_interleaved: bool, rotates_last: bool,
) -> None:  # fmt: skip
    """Finish a product of keys [S, M, D]: layer norm (weight and bias), rotation, their slots.

    keys [slots, D]; a slot below 0 is not written. `is_interleaved`: how pairs lie in a key, which
    may differ from the tables of `turn`.
    """
    splits, rows, dim = key.shape
    rope = turn.cos.shape[1]
    _keep_index[(rows,)](
        key, *norm, turn.cos, turn.sin, turn.positions, slots, keys, rows, eps, SPLITS=splits,
        DIM=dim, ROPE=rope, FIRST=dim - rope if rotates_last else 0,
        IS_INTERLEAVED=is_interleaved, TABLE_INTERLEAVED=turn.is_interleaved,
        BLOCK=triton.next_power_of_2(dim), BLOCK_P=triton.next_power_of_2(rope // 2), num_warps=1,
    )  # fmt: skip


def index_queries(
    queries: Tensor, weights: Tensor, heads: int, turn: Turn, dtype: torch.dtype, *,
    is_interleaved: bool, rotates_last: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Finish products [S, M, H D] and [S, M, H]: queries [M, H, D], and weights [M, H] in fp32.

    The weights contain the scale of scores.
    """
    splits, rows, width = queries.shape
    dim, rope = width // heads, turn.cos.shape[1]
    q = torch.empty(rows, heads, dim, dtype=dtype, device=queries.device)
    shares = torch.empty(rows, heads, dtype=torch.float32, device=queries.device)
    _index_queries[(rows, triton.cdiv(heads, _HEADS_EACH))](
        queries, weights, turn.cos, turn.sin, turn.positions, q, shares, rows,
        (heads * dim) ** -0.5, SPLITS=splits, WEIGHT_SPLITS=weights.shape[0], HEADS=heads,
        DIM=dim, ROPE=rope, FIRST=dim - rope if rotates_last else 0,
        IS_INTERLEAVED=is_interleaved, TABLE_INTERLEAVED=turn.is_interleaved, EACH=_HEADS_EACH,
        BLOCK=triton.next_power_of_2(dim), BLOCK_P=triton.next_power_of_2(rope // 2), num_warps=4,
    )  # fmt: skip
    return q, shares


@jit(do_not_specialize=["rows"])
def _keep_index(key, weight, bias, cos, sin, positions, slots, keys, rows, eps,
                SPLITS: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr, FIRST: tl.constexpr,
                IS_INTERLEAVED: tl.constexpr, TABLE_INTERLEAVED: tl.constexpr,
                BLOCK: tl.constexpr, BLOCK_P: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        kind = keys.dtype.element_ty
        step = rows.to(tl.int64) * DIM
        at = tl.arange(0, BLOCK)
        mask = at < DIM
        # Rounded here, where a plain product would have rounded.
        x = summed(key, row * DIM + at, mask, step, SPLITS).to(kind).to(tl.float32)
        mean = tl.sum(x, 0) / DIM
        apart = tl.where(mask, x - mean, 0.0)
        scale = tl.rsqrt(tl.sum(apart * apart, 0) / DIM + eps)
        target = keys + slot * DIM
        is_passed = mask & ((at < FIRST) | (at >= FIRST + ROPE))
        gain = tl.load(weight + at, mask, 0.0).to(tl.float32)
        more = tl.load(bias + at, mask, 0.0).to(tl.float32)
        tl.store(target + at, (apart * scale * gain + more).to(kind), is_passed)
        pair = tl.arange(0, BLOCK_P)
        is_pair = pair < ROPE // 2
        low_at, high_at = places_of(pair, ROPE, IS_INTERLEAVED)
        low = _normed(key, row * DIM, FIRST + low_at, is_pair, step, mean, scale, weight, bias,
                      kind, SPLITS)  # fmt: skip
        high = _normed(key, row * DIM, FIRST + high_at, is_pair, step, mean, scale, weight, bias,
                       kind, SPLITS)  # fmt: skip
        first_at, second_at = places_of(pair, ROPE, TABLE_INTERLEAVED)
        position = tl.load(positions + row).to(tl.int64) * ROPE
        low, high = rotated(low, high, cos + position, sin + position, first_at, second_at, is_pair)
        tl.store(target + FIRST + low_at, low.to(kind), is_pair)
        tl.store(target + FIRST + high_at, high.to(kind), is_pair)


@jit
def _normed(key, begin, at, mask, step, mean, scale, weight, bias, kind: tl.constexpr,
            SPLITS: tl.constexpr):  # fmt: skip
    """Some numbers of a key after its norm, rounded."""
    x = summed(key, begin + at, mask, step, SPLITS).to(kind).to(tl.float32)
    gain = tl.load(weight + at, mask, 0.0).to(tl.float32)
    more = tl.load(bias + at, mask, 0.0).to(tl.float32)
    return ((x - mean) * scale * gain + more).to(kind).to(tl.float32)


@jit(do_not_specialize=["rows"])
def _index_queries(queries, weights, cos, sin, positions, q, shares, rows, scale,
                   SPLITS: tl.constexpr, WEIGHT_SPLITS: tl.constexpr, HEADS: tl.constexpr,
                   DIM: tl.constexpr, ROPE: tl.constexpr, FIRST: tl.constexpr,
                   IS_INTERLEAVED: tl.constexpr, TABLE_INTERLEAVED: tl.constexpr,
                   EACH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    own = tl.program_id(1) * EACH + tl.arange(0, EACH)
    kind = q.dtype.element_ty
    share = summed(weights, row * HEADS + own, own < HEADS, rows.to(tl.int64) * HEADS,
                   WEIGHT_SPLITS)  # fmt: skip
    tl.store(shares + row * HEADS + own, share.to(kind).to(tl.float32) * scale, own < HEADS)
    head = own[:, None]
    step = rows.to(tl.int64) * HEADS * DIM
    source = (row * HEADS + head) * DIM
    at = tl.arange(0, BLOCK)[None, :]
    is_passed = (head < HEADS) & (at < DIM) & ((at < FIRST) | (at >= FIRST + ROPE))
    tl.store(q + source + at, summed(queries, source + at, is_passed, step, SPLITS).to(kind),
             is_passed)  # fmt: skip
    pair = tl.arange(0, BLOCK_P)[None, :]
    is_pair = (head < HEADS) & (pair < ROPE // 2)
    low_at, high_at = places_of(pair, ROPE, IS_INTERLEAVED)
    low = summed(queries, source + FIRST + low_at, is_pair, step, SPLITS)
    high = summed(queries, source + FIRST + high_at, is_pair, step, SPLITS)
    first_at, second_at = places_of(pair, ROPE, TABLE_INTERLEAVED)
    position = tl.load(positions + row).to(tl.int64) * ROPE
    low, high = rotated(
        low.to(kind).to(tl.float32), high.to(kind).to(tl.float32), cos + position, sin + position,
        first_at, second_at, pair < ROPE // 2,
    )  # fmt: skip
    tl.store(q + source + FIRST + low_at, low.to(kind), is_pair)
    tl.store(q + source + FIRST + high_at, high.to(kind), is_pair)
