"""Prompts of a gated delta net, first part: what chunks of rows say without the memory before them.

In a chunk (up to 64 rows) the changes d that rows write into a memory S depend on each other by a
triangular system (`models/delta_rule.py`). With G the sum of log decays since the chunk began and
T the system's inverse,

    d = T b V - (T b exp(G) K) S = `wanted` - `known` S

so all chunks of all requests are prepared at once, and only `known` S is left for the walk from
chunk to chunk (`kernels/delta_prompts.py`). Convolution, norms and gates are computed on the way.
The inverse comes by blocks of twice the size each time, whose entries never exceed 1: the system
of unit keys that fade and are written with strengths below 1 is a contraction.

T rows of all requests, H value heads, G key heads, K and V head sizes, C convolved channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.delta import TINY, soft_plus
from headstart.backends.cuda.kernels.jit import jit
from headstart.models.delta_config import DeltaConfig

ROWS = 64  # of a chunk at most
_COLUMNS = 64  # of heads, that are multiplied at a time


@dataclass(frozen=True)
class DeltaWeights:
    """Of one layer: the convolution [C, n], and of each value head [H] in fp32."""

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor


@dataclass(frozen=True)
class ChunkTile:
    """Rows and warps of a program that convolves; what a program has that prepares."""

    conv_rows: int = 16
    conv_warps: int = 4
    warps: int = 4
    registers: int | None = None
    stages: int = 1


@dataclass(frozen=True)
class Prepared:
    """What the walk reads of each row, in the model's type; `faded` in fp32."""

    mixed: Tensor  # [T, C] queries of unit length and scaled, keys of unit length, values
    known: Tensor  # [T, H, K]
    wanted: Tensor  # [T, H, V]
    scores: Tensor  # [T, H, 64] of the row's query with the keys of its chunk, faded
    faded: Tensor  # [H, T] log of what is left of the memory before the chunk


def prepare_chunks(
    projected: Tensor, weights: DeltaWeights, conv: Tensor, chunks: Tensor, config: DeltaConfig,
    tile: ChunkTile,
) -> Prepared:  # fmt: skip
    """projected [T, C + H V + 2 H]: channels, output gates, strengths, decays; conv [slots, n - 1,
    C]: inputs before each request; chunks [N, 4] int32: first row, rows, rows of the request
    before them, slot of the state before the request or -1.
    """
    total, width = projected.shape
    heads, k_heads, kind = config.v_heads, config.k_heads, conv.dtype

    def empty(*shape: int, dtype: torch.dtype = kind) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=projected.device)

    made = Prepared(
        empty(total, config.channels), empty(total, heads, config.k_dim),
        empty(total, heads, config.v_dim), empty(total, heads, ROWS),
        empty(heads, total, dtype=torch.float32),
    )  # fmt: skip
    sizes = {"K_HEADS": k_heads, "K_DIM": config.k_dim, "V_DIM": config.v_dim}
    parts = ROWS // tile.conv_rows
    _convolve[(2 * k_heads + heads, chunks.shape[0] * parts)](
        projected, weights.conv, conv, chunks, made.mixed, width, config.channels,
        config.k_dim**-0.5, **sizes, ROWS=tile.conv_rows, PARTS=parts, TAPS=config.kernel,
        BLOCK=block_of(max(config.k_dim, config.v_dim)), num_warps=tile.conv_warps,
    )  # fmt: skip
    _prepare[(heads, chunks.shape[0])](
        projected, weights.a_log, weights.dt_bias, chunks, made.mixed, made.known, made.wanted,
        made.scores, made.faded, total, width, config.channels, **sizes, ROWS=ROWS, HEADS=heads,
        LEVELS=ROWS.bit_length() - 2, BLOCK=_COLUMNS, num_warps=tile.warps,
        num_stages=tile.stages, maxnreg=tile.registers,
    )  # fmt: skip
    return made


def block_of(dim: int) -> int:
    return max(64, 1 << (dim - 1).bit_length())


@jit
def _convolve(projected, weight, conv, chunks, mixed, width, channels, scale, K_HEADS: tl.constexpr,
              K_DIM: tl.constexpr, V_DIM: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
              TAPS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """A head of queries, keys or values, of some of a chunk's rows."""
    head = tl.program_id(0)
    chunk = chunks + 4 * (tl.program_id(1) // PARTS)
    skipped = tl.program_id(1) % PARTS * ROWS
    first = tl.load(chunk).to(tl.int64) + skipped
    count = tl.load(chunk + 1) - skipped
    before = tl.load(chunk + 2) + skipped
    source = tl.load(chunk + 3).to(tl.int64)
    kind: tl.constexpr = mixed.dtype.element_ty
    is_value = head >= 2 * K_HEADS
    begin = tl.where(is_value, 2 * K_HEADS * (K_DIM - V_DIM) + head * V_DIM, head * K_DIM)
    in_head = tl.arange(0, BLOCK)
    is_channel = in_head < tl.where(is_value, V_DIM, K_DIM)
    at = begin + in_head
    row = tl.arange(0, ROWS)
    value = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for back in tl.static_range(TAPS):
        tap = tl.load(weight + at * TAPS + (TAPS - 1 - back), is_channel, 0.0).to(tl.float32)
        place = projected + (first + row - back)[:, None] * width + at[None, :]
        inside = (row < count) & (before + row >= back)
        read = tl.load(place, inside[:, None] & is_channel[None, :], 0.0).to(kind).to(tl.float32)
        if before < back:  # rows of the state before the request
            earlier = source * (TAPS - 1) + (TAPS - 1 + before + row - back)
            outside = (row < count) & (before + row < back) & (earlier >= 0)  # where there is one
            mask = outside[:, None] & is_channel[None, :]
            old = tl.load(conv + earlier[:, None] * channels + at[None, :], mask, 0.0)
            read += old.to(tl.float32)
        value += read * tap[None, :]
    value = value.to(kind).to(tl.float32)
    value = (value * tl.sigmoid(value)).to(kind).to(tl.float32)
    if head < 2 * K_HEADS:
        size = tl.rsqrt(tl.sum(value * value, 1) + TINY)
        value *= (size * tl.where(head < K_HEADS, scale, 1.0))[:, None]
    place = mixed + (first + row)[:, None] * channels + at[None, :]
    tl.store(place, value.to(kind), (row < count)[:, None] & is_channel[None, :])


@jit
def _inverse(overlap, kind: tl.constexpr, LEVELS: tl.constexpr, ROWS: tl.constexpr):
    """Of 1 + overlap, which is 0 on and above its diagonal.

    The inverse of blocks [[A, 0], [B, C]] has -1/C B 1/A below its diagonal.
    """
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, ROWS)[None, :]
    result = tl.where(row == column, 1.0, 0.0) - tl.where(row >> 1 == column >> 1, overlap, 0.0)
    for level in tl.static_range(1, LEVELS + 1):
        is_below = (row >> level != column >> level) & (row >> level + 1 == column >> level + 1)
        narrow = result.to(kind)
        below = tl.where(is_below, overlap, 0.0).to(kind)
        below = tl.dot(below, narrow, input_precision="ieee").to(kind)
        result -= tl.dot(narrow, below, input_precision="ieee")
    return result


@jit(do_not_specialize=["total"])
def _prepare(projected, a_log, dt_bias, chunks, mixed, known, wanted, scores, faded, total, width,
             channels, K_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
             ROWS: tl.constexpr, HEADS: tl.constexpr, LEVELS: tl.constexpr,
             BLOCK: tl.constexpr):  # fmt: skip
    head = tl.program_id(0)
    chunk = chunks + 4 * tl.program_id(1)
    first = tl.load(chunk).to(tl.int64)
    count = tl.load(chunk + 1)
    kind: tl.constexpr = mixed.dtype.element_ty
    # As fine as tf32, and twice as quick; no entry of the inverse or of its parts is above 1.
    fine: tl.constexpr = tl.float32 if kind == tl.float32 else tl.float16
    row = tl.arange(0, ROWS)
    column = tl.arange(0, ROWS)
    in_block = tl.arange(0, BLOCK)
    is_row = row < count
    gate = projected + (first + row) * width + (width - 2 * HEADS + head)
    b = tl.load(gate, is_row, 0.0).to(kind).to(tl.float32)
    a = tl.load(gate + HEADS, is_row, 0.0).to(kind).to(tl.float32) + tl.load(dt_bias + head)
    strength = tl.where(is_row, tl.sigmoid(b), 0.0)
    decay = tl.where(is_row, -tl.exp(tl.load(a_log + head)) * soft_plus(a), 0.0)
    sums = tl.cumsum(decay, 0)
    tl.store(faded + head * total + first + row, sums, is_row)
    # Masked before the exponential: ahead of a row it would overflow.
    is_seen = row[:, None] >= column[None, :]
    between = tl.exp(tl.where(is_seen, sums[:, None] - sums[None, :], float("-inf")))
    at_q = head // (HEADS // K_HEADS) * K_DIM
    query = mixed + (first + row)[:, None] * channels + (at_q + in_block)[None, :]
    key = query + K_HEADS * K_DIM
    value = query + (2 * K_HEADS * K_DIM + head * V_DIM - at_q)
    of_row = ((first + row) * HEADS + head)[:, None]
    score = tl.zeros((ROWS, ROWS), dtype=tl.float32)
    overlap = tl.zeros((ROWS, ROWS), dtype=tl.float32)
    for start in range(0, K_DIM, BLOCK):  # some columns at a time: registers are dear
        mask = is_row[:, None] & (start + in_block < K_DIM)[None, :]
        k = tl.load(key + start, mask, 0.0)
        score = tl.dot(tl.load(query + start, mask, 0.0), tl.trans(k), score,
                       input_precision="ieee")  # fmt: skip
        overlap = tl.dot(k, tl.trans(k), overlap, input_precision="ieee")
    place = scores + of_row * ROWS + column[None, :]
    tl.store(place, (score * between).to(kind), is_row[:, None])
    overlap = tl.where(row[:, None] > column[None, :], overlap * between * strength[:, None], 0.0)
    inverse = _inverse(overlap, fine, LEVELS, ROWS).to(kind)
    faded_strength = (strength * tl.exp(sums))[:, None]
    for start in range(0, K_DIM, BLOCK):
        mask = is_row[:, None] & (start + in_block < K_DIM)[None, :]
        k = tl.load(key + start, mask, 0.0).to(tl.float32)
        part = tl.dot(inverse, (k * faded_strength).to(kind), input_precision="ieee")
        tl.store(known + of_row * K_DIM + start + in_block[None, :], part.to(kind), mask)
    for start in range(0, V_DIM, BLOCK):
        mask = is_row[:, None] & (start + in_block < V_DIM)[None, :]
        v = tl.load(value + start, mask, 0.0).to(tl.float32)
        part = tl.dot(inverse, (v * strength[:, None]).to(kind), input_precision="ieee")
        tl.store(wanted + of_row * V_DIM + start + in_block[None, :], part.to(kind), mask)
