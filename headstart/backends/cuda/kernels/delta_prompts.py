"""Prompts of a gated delta net, second part: memories walk from chunk to chunk.

A program takes a request, a value head and a part of its values, holds that part of the memory in
fp32, and reads what `kernels/delta_chunks.py` prepared of each chunk. Where a state is to be kept,
a piece of the request's rows ends, and a chunk with it. Rows that the convolution still has to see
are kept here, too: all programs of the first part have read the old ones by then.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.delta_chunks import ROWS, Prepared, block_of
from headstart.backends.cuda.kernels.jit import jit
from headstart.models.delta_config import DeltaConfig
from headstart.models.recurrence import LayerStates

_FINISHED_ROWS = 16  # of a program that norms and gates


@dataclass(frozen=True)
class WalkTile:
    """Values of a head that a program has, its warps and stages.

    With one stage Triton 3.6 made code that left its memory on an H200, and wrong numbers where
    queries and keys could not be fetched ahead (rows of 112 bytes).
    """

    values: int = 32
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True)
class Walks:
    """Where requests begin and end, all int32."""

    spans: Tensor  # [S, 4] first piece, end of pieces, slot of the state before or -1, first row
    pieces: Tensor  # [P, 4] first row, end of rows, first of `keeps`, their end
    keeps: Tensor  # [N] slots


def walk(
    made: Prepared, projected: Tensor, norm: Tensor, eps: float, states: LayerStates, walks: Walks,
    config: DeltaConfig, tile: WalkTile,
) -> Tensor:  # fmt: skip
    """What all rows read, normed and gated: [T, H V] in the model's type. States are kept."""
    assert tile.stages > 1
    total, width = projected.shape
    heads, v_dim = config.v_heads, config.v_dim
    result = torch.empty(total, heads * v_dim, dtype=made.mixed.dtype, device=projected.device)
    block_v = min(tile.values, block_of(v_dim))
    tiles, is_silu = triton.cdiv(v_dim, block_v), config.gate == "silu"
    _walk[(heads * tiles, walks.spans.shape[0])](
        made.mixed, made.known, made.wanted, made.scores, made.faded, projected, norm,
        states.conv, states.memory, walks.spans, walks.pieces, walks.keeps, result, total, width,
        config.channels, eps, HEADS=heads, K_HEADS=config.k_heads, TILES=tiles, K_DIM=config.k_dim,
        V_DIM=v_dim, TAPS=config.kernel, ROWS=ROWS, IS_SILU=is_silu,
        BLOCK_C=triton.next_power_of_2(max(1, config.kernel - 1)), BLOCK_K=block_of(config.k_dim),
        BLOCK_V=block_v, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if tiles > 1:
        _finish[(heads, triton.cdiv(total, _FINISHED_ROWS))](
            result, projected, norm, total, width, config.channels, eps, HEADS=heads, V_DIM=v_dim,
            IS_SILU=is_silu, ROWS=_FINISHED_ROWS, BLOCK_V=block_of(v_dim), num_warps=4,
        )  # fmt: skip
    return result


@jit
def _gated(read, projected, norm, row, is_row, head, width, channels, eps, kind: tl.constexpr,
           V_DIM: tl.constexpr, IS_SILU: tl.constexpr, BLOCK_V: tl.constexpr):  # fmt: skip
    """What rows read [R, V], normed, and under their output gates."""
    in_v = tl.arange(0, BLOCK_V)
    is_v = in_v < V_DIM
    gain = tl.load(norm + in_v, is_v, 0.0).to(tl.float32)
    read = read.to(kind).to(tl.float32)
    size = tl.rsqrt(tl.sum(read * read, 1) / V_DIM + eps)
    normed = (read * size[:, None] * gain[None, :]).to(kind).to(tl.float32)
    place = projected + row[:, None] * width + (channels + head * V_DIM + in_v)[None, :]
    gate = tl.load(place, is_row[:, None] & is_v[None, :], 0.0).to(kind).to(tl.float32)
    opened = tl.sigmoid(gate)
    if IS_SILU:
        opened = gate * opened
    return normed * opened.to(kind).to(tl.float32)


@jit(do_not_specialize=["total"])
def _finish(result, projected, norm, total, width, channels, eps, HEADS: tl.constexpr,
            V_DIM: tl.constexpr, IS_SILU: tl.constexpr, ROWS: tl.constexpr,
            BLOCK_V: tl.constexpr):  # fmt: skip
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_v = tl.arange(0, BLOCK_V)
    is_row = row < total
    mask = is_row[:, None] & (in_v < V_DIM)[None, :]
    place = result + (row * HEADS + head)[:, None] * V_DIM + in_v[None, :]
    kind: tl.constexpr = result.dtype.element_ty
    value = _gated(tl.load(place, mask, 0.0), projected, norm, row, is_row, head, width, channels,
                   eps, kind, V_DIM, IS_SILU, BLOCK_V)  # fmt: skip
    tl.store(place, value.to(kind), mask)


@jit
def _keep_inputs(projected, conv, at, is_channel, slot, source, first, stop, width, channels,
                 TAPS: tl.constexpr, BLOCK_C: tl.constexpr):  # fmt: skip
    """The last inputs of rows [first, stop), those before them by what was kept in `source`."""
    line = tl.arange(0, BLOCK_C)
    row = (stop - (TAPS - 1) + line).to(tl.int64)
    is_line = (line < TAPS - 1)[:, None] & is_channel[None, :]
    new = is_line & (row >= first)[:, None]
    earlier = source * (TAPS - 1) + (TAPS - 1) + row - first  # negative where there is no source
    old = is_line & ((row < first) & (earlier >= 0))[:, None]
    value = tl.load(projected + row[:, None] * width + at[None, :], new, 0.0).to(tl.float32)
    value += tl.load(conv + earlier[:, None] * channels + at[None, :], old, 0.0).to(tl.float32)
    tl.debug_barrier()  # a request goes on in its own slot, and rows move up by what is new
    place = conv + (slot * (TAPS - 1) + line)[:, None] * channels + at[None, :]
    tl.store(place, value.to(conv.dtype.element_ty), is_line)


@jit(do_not_specialize=["total"])
def _walk(mixed, known, wanted, scores, faded, projected, norm, conv, memory, spans, pieces,
          keeps, result, total, width, channels, eps, HEADS: tl.constexpr, K_HEADS: tl.constexpr,
          TILES: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, TAPS: tl.constexpr,
          ROWS: tl.constexpr, IS_SILU: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
          BLOCK_V: tl.constexpr):  # fmt: skip
    head = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    span = spans + 4 * tl.program_id(1)
    source = tl.load(span + 2).to(tl.int64)
    span_first = tl.load(span + 3).to(tl.int64)
    group: tl.constexpr = HEADS // K_HEADS
    kind: tl.constexpr = mixed.dtype.element_ty
    k_head = head // group
    row = tl.arange(0, ROWS)
    column = tl.arange(0, ROWS)
    in_k = tl.arange(0, BLOCK_K)
    in_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    is_k = in_k < K_DIM
    is_v = in_v < V_DIM
    of_state = in_k[:, None] * V_DIM + in_v[None, :]
    is_state = is_k[:, None] & is_v[None, :]
    before = (source * HEADS + head) * (K_DIM * V_DIM) + of_state  # negative without a source
    state = tl.load(memory + before, is_state & (before >= 0), 0.0)
    for piece in range(tl.load(span), tl.load(span + 1)):
        start = tl.load(pieces + 4 * piece)
        stop = tl.load(pieces + 4 * piece + 1)
        for first in range(start, stop, ROWS):
            is_row = first + row < stop
            here = row.to(tl.int64) + first
            by_key = here[:, None] * channels + (k_head * K_DIM + in_k)[None, :]
            by_head = here * HEADS + head
            of_keys = is_row[:, None] & is_k[None, :]
            of_values = is_row[:, None] & is_v[None, :]
            at_v = by_head[:, None] * V_DIM + in_v[None, :]
            old_k = tl.load(known + by_head[:, None] * K_DIM + in_k[None, :], of_keys, 0.0)
            value = tl.load(wanted + at_v, of_values, 0.0).to(tl.float32)
            q = tl.load(mixed + by_key, of_keys, 0.0)
            k = tl.load(mixed + K_HEADS * K_DIM + by_key, of_keys, 0.0)
            seen = tl.load(scores + by_head[:, None] * ROWS + column[None, :], is_row[:, None], 0.0)
            sums = tl.load(faded + head * total + here, is_row, 0.0)
            last = tl.load(faded + head * total + tl.minimum(first + ROWS, stop) - 1)
            narrow = state.to(kind)
            change = value - tl.dot(old_k, narrow, input_precision="ieee")
            read = tl.dot(q, narrow, input_precision="ieee") * tl.exp(sums)[:, None]
            read = tl.dot(seen, change.to(kind), read, input_precision="ieee")
            to_end = tl.where(is_row, tl.exp(last - sums), 0.0)
            state = state * tl.exp(last)
            state = tl.dot(tl.trans(k), (change * to_end[:, None]).to(kind), state,
                           input_precision="ieee")  # fmt: skip
            if TILES == 1:
                read = _gated(read, projected, norm, here, is_row, head, width, channels, eps, kind,
                              V_DIM, IS_SILU, BLOCK_V)  # fmt: skip
            tl.store(result + at_v, read.to(kind), of_values)
        for at in range(tl.load(pieces + 4 * piece + 2), tl.load(pieces + 4 * piece + 3)):
            slot = tl.load(keeps + at).to(tl.int64)
            place = memory + (slot * HEADS + head) * (K_DIM * V_DIM) + of_state
            tl.store(place, state, is_state)
            _keep_inputs(projected, conv, 2 * K_HEADS * K_DIM + head * V_DIM + in_v, is_v, slot,
                         source, span_first, stop, width, channels, TAPS, BLOCK_C)  # fmt: skip
            if (tile == 0) & (head % group == 0):
                for part in tl.static_range(2):
                    _keep_inputs(projected, conv, (part * K_HEADS + k_head) * K_DIM + in_k, is_k,
                                 slot, source, span_first, stop, width, channels, TAPS,
                                 BLOCK_C)  # fmt: skip
