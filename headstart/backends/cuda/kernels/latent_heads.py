"""Products of every head with a matrix of its own: into the space of latents, and back.

A head's matrices for keys and values lie one after the other in ups [H, N + V, C]. Few rows read
them at memory speed, as in `linear.py`.

M rows, S splits, H heads; C numbers of a latent, N of a query without positions, P of its rotated
part, V of a value.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.jit import jit
from headstart.backends.cuda.kernels.latent_rows import Turn, places_of, rotated, summed
from headstart.backends.cuda.kernels.linear import tile_rows

_COLUMNS = 64  # of a program


def lift_queries(partial: Tensor, ups: Tensor, nope: int, turn: Turn) -> tuple[Tensor, Tensor]:
    """Finish a product of queries, partial [S, M, H (N + P) ...]: what latents and keys meet.

    lifted [M, H, C] are compared with latents, turned [M, H, P] with rotated keys.
    """
    assert partial.is_contiguous() and ups.is_contiguous()
    splits, rows, width = partial.shape
    heads, _, rank = ups.shape
    rope = turn.cos.shape[1]
    lifted, turned = (
        torch.empty(rows, heads, size, dtype=ups.dtype, device=ups.device) for size in (rank, rope)
    )
    tile = tile_rows(rows)
    # The last program of a head turns.
    _lift[(triton.cdiv(rank, _COLUMNS) + 1, heads, triton.cdiv(rows, tile))](
        partial, ups, turn.cos, turn.sin, turn.positions, lifted, turned, rows, width,
        SPLITS=splits, HEADS=heads, MATRIX=ups.stride(0), NOPE=nope, ROPE=rope, RANK=rank,
        IS_INTERLEAVED=turn.is_interleaved, BLOCK_M=tile, BLOCK_N=_COLUMNS,
        BLOCK_K=_block(nope, ups), BLOCK_P=triton.next_power_of_2(rope // 2), num_warps=4,
        num_stages=2,
    )  # fmt: skip
    return lifted, turned


def lower_latents(gathered: Tensor, ups: Tensor, nope: int) -> Tensor:
    """gathered [M, H, C] -> values [M, H, V]."""
    assert gathered.is_contiguous() and ups.is_contiguous()
    rows, heads, rank = gathered.shape
    v_dim = ups.shape[1] - nope
    result = torch.empty(rows, heads, v_dim, dtype=gathered.dtype, device=gathered.device)
    tile = tile_rows(rows)
    _lower[(triton.cdiv(v_dim, _COLUMNS), heads, triton.cdiv(rows, tile))](
        gathered, ups, result, rows, HEADS=heads, MATRIX=ups.stride(0), NOPE=nope, RANK=rank,
        VALUE=v_dim, BLOCK_M=tile, BLOCK_N=_COLUMNS, BLOCK_K=_block(rank, ups), num_warps=4,
        num_stages=3,
    )  # fmt: skip
    return result


def _block(inputs: int, ups: Tensor) -> int:
    """Inputs of a step; products of fp32 keep both sides in registers."""
    most = 128 if ups.element_size() == 2 else 32
    padded: int = triton.next_power_of_2(inputs)
    return min(most, max(16, padded))


@jit(do_not_specialize=["rows"])
def _lift(partial, ups, cos, sin, positions, lifted, turned, rows, width, SPLITS: tl.constexpr,
          HEADS: tl.constexpr, MATRIX: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr,
          RANK: tl.constexpr, IS_INTERLEAVED: tl.constexpr, BLOCK_M: tl.constexpr,
          BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_P: tl.constexpr):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    step = rows.to(tl.int64) * width
    kind = lifted.dtype.element_ty
    if tl.program_id(0) * BLOCK_N < RANK:
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        source = row[None, :].to(tl.int64) * width + head * (NOPE + ROPE)
        sums = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for first in range(0, NOPE, BLOCK_K):
            inner = first + tl.arange(0, BLOCK_K)
            w_mask = (column[:, None] < RANK) & (inner[None, :] < NOPE)
            where = head * MATRIX + inner[None, :] * RANK + column[:, None]
            w = tl.load(ups + where, w_mask, 0.0)
            v_mask = (row[None, :] < rows) & (inner[:, None] < NOPE)
            v = summed(partial, source + inner[:, None], v_mask, step, SPLITS)
            sums = tl.dot(w, v.to(kind), sums, input_precision="ieee")
        target = lifted + (row[None, :].to(tl.int64) * HEADS + head) * RANK + column[:, None]
        tl.store(target, sums.to(kind), (column[:, None] < RANK) & (row[None, :] < rows))
    else:
        pair = tl.arange(0, BLOCK_P)[None, :]
        first_at, second_at = places_of(pair, ROPE, IS_INTERLEAVED)
        is_row = row[:, None] < rows
        mask = is_row & (pair < ROPE // 2)
        start = row[:, None].to(tl.int64) * width + head * (NOPE + ROPE) + NOPE
        low = summed(partial, start + first_at, mask, step, SPLITS)
        high = summed(partial, start + second_at, mask, step, SPLITS)
        position = tl.load(positions + row[:, None], is_row, 0).to(tl.int64) * ROPE
        low, high = rotated(
            low.to(kind).to(tl.float32), high.to(kind).to(tl.float32), cos + position,
            sin + position, first_at, second_at, mask,
        )  # fmt: skip
        goal = turned + (row[:, None].to(tl.int64) * HEADS + head) * ROPE
        tl.store(goal + first_at, low.to(kind), mask)
        tl.store(goal + second_at, high.to(kind), mask)


@jit(do_not_specialize=["rows"])
def _lower(gathered, ups, result, rows, HEADS: tl.constexpr, MATRIX: tl.constexpr,
           NOPE: tl.constexpr, RANK: tl.constexpr, VALUE: tl.constexpr, BLOCK_M: tl.constexpr,
           BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    source = gathered + (row[None, :].to(tl.int64) * HEADS + head) * RANK
    matrix = ups + head * MATRIX + (NOPE + column[:, None]) * RANK
    sums = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for first in range(0, RANK, BLOCK_K):
        inner = first + tl.arange(0, BLOCK_K)
        w_mask = (column[:, None] < VALUE) & (inner[None, :] < RANK)
        w = tl.load(matrix + inner[None, :], w_mask, 0.0)
        v = tl.load(source + inner[:, None], (row[None, :] < rows) & (inner[:, None] < RANK), 0.0)
        sums = tl.dot(w, v, sums, input_precision="ieee")
    target = result + (row[None, :].to(tl.int64) * HEADS + head) * VALUE + column[:, None]
    mask = (column[:, None] < VALUE) & (row[None, :] < rows)
    tl.store(target, sums.to(result.dtype.element_ty), mask)
