"""A gated delta net whose result for a row depends on nothing but the rows before it, to the bit.

Rounds and prompts go through the same compiled kernels: how many rows there are, which of them are
repeated and how long a ring is are numbers of the launch, not constants. Each row of a request
changes its memory after the row before, in the one loop that there is.

B requests, M rows, C convolved channels (q, k, v), H value heads, K and V head sizes, L places of a
ring, S splits.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.delta import TINY, Rings, soft_plus
from headstart.backends.cuda.kernels.jit import jit

_BLOCK = 256  # channels of a program


@dataclass(frozen=True)
class ExactRows:
    """Where each of M rows is: its position in its text (-1: no row) and its buffer, int32."""

    positions: Tensor
    buffers: Tensor


@dataclass(frozen=True)
class ExactRuns:
    """What B requests run, int32 [B] each: `counts` rows from position `begin` on.

    The first `silent` of them say nothing; what the others say begins at row `lines` of a result.
    The memory begins in slot `sources` (-1: a text that begins), and after `kept` rows goes to slot
    `targets`; 0: it stays where it is.
    """

    begin: Tensor
    counts: Tensor
    silent: Tensor
    lines: Tensor
    buffers: Tensor
    sources: Tensor
    kept: Tensor
    targets: Tensor


def convolve_rows(
    partial: Tensor, weight: Tensor, a_log: Tensor, dt_bias: Tensor, rows: ExactRows, rings: Rings
) -> None:
    """Fill the rings with M rows; what comes before them in a text lies there already.

    partial [S, at least M, C + H V + 2 H], weight [C, n], a_log and dt_bias [H] fp32.
    """
    splits, total, width = partial.shape
    channels, taps = weight.shape
    heads, places, count = a_log.shape[0], rings.inputs.shape[1], rows.positions.shape[0]
    blocks = triton.cdiv(channels, _BLOCK)
    _inputs[(count, blocks + 1)](
        partial, a_log, dt_bias, rows.positions, rows.buffers, rings.inputs, rings.gates, total,
        width, channels, heads, places, SPLITS=splits, BLOCK=_BLOCK,
        BLOCK_H=triton.next_power_of_2(heads), num_warps=2,
    )  # fmt: skip
    _mix[(count, blocks)](
        weight, rows.positions, rows.buffers, rings.inputs, rings.mixed, channels, places,
        TAPS=taps, BLOCK=_BLOCK, num_warps=2,
    )  # fmt: skip


def delta_runs(
    partial: Tensor, norm: Tensor, eps: float, memory: Tensor, runs: ExactRuns, rings: Rings,
    result: Tensor, *, is_silu: bool,
) -> None:  # fmt: skip
    """Rows change memory [slots, H, K, V] one after another; what they read goes to result.

    result [M, H V]: normed, and under its gate.
    """
    splits, total, width = partial.shape
    heads, k_dim, v_dim = memory.shape[1:]
    places, channels = rings.mixed.shape[1:]
    k_heads = (channels - heads * v_dim) // (2 * k_dim)
    _delta[(runs.begin.shape[0], heads)](
        partial, norm, memory, runs.begin, runs.counts, runs.silent, runs.lines, runs.buffers,
        runs.sources, runs.kept, runs.targets, rings.mixed, rings.gates, result, total, width,
        channels, places, eps, k_dim**-0.5, SPLITS=splits, HEADS=heads, GROUP=heads // k_heads,
        KEYS=k_heads * k_dim, K_DIM=k_dim, V_DIM=v_dim, IS_SILU=is_silu,
        BLOCK_K=triton.next_power_of_2(k_dim), BLOCK_V=triton.next_power_of_2(v_dim), num_warps=8,
    )  # fmt: skip


@jit
def _summed(partial, row, total, width, at, mask, kind: tl.constexpr, SPLITS: tl.constexpr):
    """Columns `at` of a product's row, rounded where a plain product would have rounded."""
    value = tl.load(partial + row * width + at, mask, 0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        value += tl.load(partial + (split * total + row) * width + at, mask, 0.0).to(tl.float32)
    return value.to(kind)


@jit(do_not_specialize=["total", "places"])
def _inputs(partial, a_log, dt_bias, positions, buffers, inputs, gates, total, width, channels,
            heads, places, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
            BLOCK_H: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    if position >= 0:
        kind = inputs.dtype.element_ty
        place = tl.load(buffers + row).to(tl.int64) * places + position % places
        if tl.program_id(1) < tl.num_programs(1) - 1:
            at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            own = _summed(partial, row, total, width, at, at < channels, kind, SPLITS)
            tl.store(inputs + place * channels + at, own, at < channels)
        else:
            head = tl.arange(0, BLOCK_H)
            is_head = head < heads
            of_b = width - 2 * heads + head
            b = _summed(partial, row, total, width, of_b, is_head, kind, SPLITS).to(tl.float32)
            a = _summed(partial, row, total, width, of_b + heads, is_head, kind, SPLITS)
            rate = -tl.exp(tl.load(a_log + head, is_head, 0.0))
            bias = tl.load(dt_bias + head, is_head, 0.0)
            target = gates + place * 2 * heads + head
            tl.store(target, rate * soft_plus(a.to(tl.float32) + bias), is_head)
            tl.store(target + heads, tl.sigmoid(b), is_head)


@jit(do_not_specialize=["places"])
def _mix(weight, positions, buffers, inputs, mixed, channels, places, TAPS: tl.constexpr,
         BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    if position >= 0:
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = at < channels
        ring = tl.load(buffers + row).to(tl.int64) * places
        kind = mixed.dtype.element_ty
        value = tl.zeros((BLOCK,), dtype=tl.float32)
        for back in tl.static_range(TAPS):
            earlier = position - back
            # Nothing comes before a text.
            source = inputs + (ring + tl.maximum(earlier, 0) % places) * channels + at
            own = tl.load(source, mask & (at * 0 + earlier >= 0), 0.0).to(tl.float32)
            value += own * tl.load(weight + at * TAPS + TAPS - 1 - back, mask, 0.0).to(tl.float32)
        value = value.to(kind).to(tl.float32)
        value = value * tl.sigmoid(value)
        tl.store(mixed + (ring + position % places) * channels + at, value.to(kind), mask)


@jit
def _unit(x):
    return x * tl.rsqrt(tl.sum(x * x, 0) + TINY)


@jit(do_not_specialize=["total", "places"])
def _delta(partial, norm, memory, begins, counts, silents, lines, buffers, sources, kept, targets,
           mixed, gates, result, total, width, channels, places, eps, scale, SPLITS: tl.constexpr,
           HEADS: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, K_DIM: tl.constexpr,
           V_DIM: tl.constexpr, IS_SILU: tl.constexpr, BLOCK_K: tl.constexpr,
           BLOCK_V: tl.constexpr):  # fmt: skip
    request = tl.program_id(0)
    head = tl.program_id(1)
    in_k = tl.arange(0, BLOCK_K)
    in_v = tl.arange(0, BLOCK_V)
    is_k = in_k < K_DIM
    is_v = in_v < V_DIM
    mask = is_k[:, None] & is_v[None, :]
    at_q = head // GROUP * K_DIM + in_k
    kind = result.dtype.element_ty
    begin = tl.load(begins + request)
    silent = tl.load(silents + request)
    line = tl.load(lines + request).to(tl.int64)
    ring = tl.load(buffers + request).to(tl.int64) * places
    source = tl.load(sources + request).to(tl.int64)
    keep_after = tl.load(kept + request)
    own = in_k[:, None] * V_DIM + in_v[None, :]
    size: tl.constexpr = K_DIM * V_DIM
    target = memory + (tl.load(targets + request).to(tl.int64) * HEADS + head) * size + own
    before = memory + (tl.maximum(source, 0) * HEADS + head) * size + own
    state = tl.load(before, mask & (in_k[:, None] * 0 + source >= 0), 0.0)
    gain = tl.load(norm + in_v, is_v, 0.0).to(tl.float32)
    for done in range(tl.load(counts + request)):
        place = ring + (begin + done) % places
        row = mixed + place * channels
        gate = gates + place * 2 * HEADS + head
        key = _unit(tl.load(row + KEYS + at_q, is_k, 0.0).to(tl.float32))
        value = tl.load(row + 2 * KEYS + head * V_DIM + in_v, is_v, 0.0).to(tl.float32)
        state = state * tl.exp(tl.load(gate))
        known = tl.sum(key[:, None] * state, 0)
        change = (value - known) * tl.load(gate + HEADS)
        state = state + key[:, None] * change[None, :]
        tl.store(target, state, mask & (in_k[:, None] * 0 + done + 1 == keep_after))
        query = _unit(tl.load(row + at_q, is_k, 0.0).to(tl.float32)) * scale
        read = tl.sum(query[:, None] * state, 0).to(kind).to(tl.float32)
        read = read * tl.rsqrt(tl.sum(read * read, 0) / V_DIM + eps) * gain
        said = is_v & (in_v * 0 + done >= silent)
        here = line + done - silent
        out = _summed(partial, here, total, width, channels + head * V_DIM + in_v, said, kind,
                      SPLITS).to(tl.float32)  # fmt: skip
        opened = tl.sigmoid(out)
        if IS_SILU:
            opened = out * opened
        spoken = (read.to(kind).to(tl.float32) * opened.to(kind).to(tl.float32)).to(kind)
        tl.store(result + here * (HEADS * V_DIM) + head * V_DIM + in_v, spoken, said)
