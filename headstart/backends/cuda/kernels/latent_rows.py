"""Rows of latent attention: latents normed and kept, queries turned.

M rows, S splits, H heads; Q numbers of the queries' latent, C of the kept latent, P of the rotated
key and of the rotated part of a query, whose other part has N.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.jit import jit

_HEADS_EACH = 8  # of a program that turns queries


@dataclass(frozen=True)
class Turn:
    """How rows are rotated: tables [positions, P], `sin` signed as `place_qkv` has it."""

    cos: Tensor
    sin: Tensor
    is_interleaved: bool
    positions: Tensor  # [M]


def keep_latents(
    partial: Tensor, q_norm: Tensor | None, kv_norm: Tensor, eps: float, turn: Turn, slots: Tensor,
    entries: Tensor,
) -> Tensor | None:  # fmt: skip
    """Finish the product of what is kept: its latent is normed, its key turned.

    partial [S, M, ... + C + P] begins with the queries' latent where there is a `q_norm` [Q], which
    is returned normed; else with queries, which are left alone. entries [slots, C + P]; a slot
    below 0 is not written.
    """
    splits, rows, width = partial.shape
    rank, rope = kv_norm.shape[0], turn.cos.shape[1]
    q_rank = 0 if q_norm is None else q_norm.shape[0]
    latent = torch.empty(rows, q_rank, dtype=entries.dtype, device=partial.device)
    _keep_latents[(rows, 1 if q_norm is None else 2)](
        partial, kv_norm if q_norm is None else q_norm, kv_norm, turn.cos, turn.sin,
        turn.positions, slots, latent, entries, rows, width, eps,
        SPLITS=splits, Q_RANK=q_rank, RANK=rank, ROPE=rope,
        IS_INTERLEAVED=turn.is_interleaved, BLOCK_Q=triton.next_power_of_2(max(q_rank, 1)),
        BLOCK_R=triton.next_power_of_2(rank), BLOCK_P=triton.next_power_of_2(rope // 2),
        num_warps=4,
    )  # fmt: skip
    return None if q_norm is None else latent


def turn_queries(partial: Tensor, heads: int, dim: int, turn: Turn, dtype: torch.dtype) -> Tensor:
    """partial [S, M, H (N + P) ...] -> queries [M, H, N + P], their last P numbers turned."""
    splits, rows, width = partial.shape
    rope = turn.cos.shape[1]
    q = torch.empty(rows, heads, dim, dtype=dtype, device=partial.device)
    _turn_queries[(rows, triton.cdiv(heads, _HEADS_EACH))](
        partial, turn.cos, turn.sin, turn.positions, q, rows, width,
        SPLITS=splits, HEADS=heads, DIM=dim, ROPE=rope, IS_INTERLEAVED=turn.is_interleaved,
        EACH=_HEADS_EACH, BLOCK_N=triton.next_power_of_2(max(dim - rope, 1)),
        BLOCK_P=triton.next_power_of_2(rope // 2), num_warps=4,
    )  # fmt: skip
    return q


@jit
def summed(partial, where, mask, step, SPLITS: tl.constexpr):
    """Numbers of a product, its splits added up."""
    sums = tl.load(partial + where, mask, 0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        sums += tl.load(partial + split * step + where, mask, 0.0).to(tl.float32)
    return sums


@jit
def places_of(pair, ROPE: tl.constexpr, IS_INTERLEAVED: tl.constexpr):
    """Where the two numbers of each pair lie: half of all apart, or side by side."""
    first_at = pair
    second_at = pair + ROPE // 2
    if IS_INTERLEAVED:
        first_at = 2 * pair
        second_at = 2 * pair + 1
    return first_at, second_at


@jit
def rotated(low, high, cos, sin, first_at, second_at, mask):
    """Pairs of numbers, turned; cos and sin are the row's."""
    cos_low = tl.load(cos + first_at, mask, 1.0).to(tl.float32)
    cos_high = tl.load(cos + second_at, mask, 1.0).to(tl.float32)
    sin_low = tl.load(sin + first_at, mask, 0.0).to(tl.float32)
    sin_high = tl.load(sin + second_at, mask, 0.0).to(tl.float32)
    return low * cos_low + high * sin_low, high * cos_high + low * sin_high


@jit(do_not_specialize=["rows"])
def _keep_latents(partial, q_norm, kv_norm, cos, sin, positions, slots, latent, entries, rows,
                  width, eps, SPLITS: tl.constexpr, Q_RANK: tl.constexpr, RANK: tl.constexpr,
                  ROPE: tl.constexpr, IS_INTERLEAVED: tl.constexpr, BLOCK_Q: tl.constexpr,
                  BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    kind = entries.dtype.element_ty
    step = rows.to(tl.int64) * width
    if tl.program_id(1) == 1:
        at = tl.arange(0, BLOCK_Q)
        mask = at < Q_RANK
        # Rounded here, where a plain product would have rounded.
        x = summed(partial, row * width + at, mask, step, SPLITS).to(kind).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 0) / Q_RANK + eps)
        gain = tl.load(q_norm + at, mask, 0.0).to(tl.float32)
        tl.store(latent + row * Q_RANK + at, (x * scale * gain).to(kind), mask)
    else:
        slot = tl.load(slots + row).to(tl.int64)
        if slot >= 0:
            begin = row * width + width - RANK - ROPE
            target = entries + slot * (RANK + ROPE)
            at = tl.arange(0, BLOCK_R)
            mask = at < RANK
            x = summed(partial, begin + at, mask, step, SPLITS).to(kind).to(tl.float32)
            scale = tl.rsqrt(tl.sum(x * x, 0) / RANK + eps)
            gain = tl.load(kv_norm + at, mask, 0.0).to(tl.float32)
            tl.store(target + at, (x * scale * gain).to(kind), mask)
            pair = tl.arange(0, BLOCK_P)
            is_pair = pair < ROPE // 2
            first_at, second_at = places_of(pair, ROPE, IS_INTERLEAVED)
            low = summed(partial, begin + RANK + first_at, is_pair, step, SPLITS)
            high = summed(partial, begin + RANK + second_at, is_pair, step, SPLITS)
            position = tl.load(positions + row).to(tl.int64) * ROPE
            low, high = rotated(
                low.to(kind).to(tl.float32), high.to(kind).to(tl.float32), cos + position,
                sin + position, first_at, second_at, is_pair,
            )  # fmt: skip
            tl.store(target + RANK + first_at, low.to(kind), is_pair)
            tl.store(target + RANK + second_at, high.to(kind), is_pair)


@jit(do_not_specialize=["rows"])
def _turn_queries(partial, cos, sin, positions, q, rows, width, SPLITS: tl.constexpr,
                  HEADS: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr,
                  IS_INTERLEAVED: tl.constexpr, EACH: tl.constexpr, BLOCK_N: tl.constexpr,
                  BLOCK_P: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * EACH + tl.arange(0, EACH)[:, None]
    kind = q.dtype.element_ty
    step = rows.to(tl.int64) * width
    source = row * width + head * DIM
    target = q + (row * HEADS + head) * DIM
    at = tl.arange(0, BLOCK_N)[None, :]
    mask = (head < HEADS) & (at < DIM - ROPE)
    x = summed(partial, source + at, mask, step, SPLITS)
    tl.store(target + at, x.to(kind), mask)
    pair = tl.arange(0, BLOCK_P)[None, :]
    is_pair = pair < ROPE // 2
    first_at, second_at = places_of(pair, ROPE, IS_INTERLEAVED)
    mask = (head < HEADS) & is_pair
    low = summed(partial, source + (DIM - ROPE) + first_at, mask, step, SPLITS)
    high = summed(partial, source + (DIM - ROPE) + second_at, mask, step, SPLITS)
    position = tl.load(positions + row).to(tl.int64) * ROPE
    low, high = rotated(
        low.to(kind).to(tl.float32), high.to(kind).to(tl.float32), cos + position, sin + position,
        first_at, second_at, is_pair,
    )  # fmt: skip
    tl.store(target + (DIM - ROPE) + first_at, low.to(kind), mask)
    tl.store(target + (DIM - ROPE) + second_at, high.to(kind), mask)
