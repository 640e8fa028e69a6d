"""Rounds of a gated delta net: a few new rows of each request, and exact ways back.

What a row brings (its convolved channels, its decay and strength) is kept by position in a ring.
A request's memory stays behind by the rows of its last round: the next round first lets those that
were accepted change it once more, writes it back, and goes on with its own rows in registers. So
a rejected row is forgotten by not being repeated, and the memory is read and written once a round.
The convolution needs no way back: rejected rows of the ring are overwritten.

B requests, R new rows of each, C convolved channels (q, k, v), H value heads, K and V head sizes,
L places of a ring, S splits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.jit import jit

TINY = tl.constexpr(1e-6)  # keeps the length of a zero key from dividing by zero


@dataclass(frozen=True)
class Rings:
    """What one layer keeps of the newest rows; position p lies at place p % L."""

    inputs: Tensor  # [buffers, L, C] what will be convolved
    mixed: Tensor  # [buffers, L, C] what was
    gates: Tensor  # [buffers, L, 2, H] fp32: log of the decay, strength


@dataclass(frozen=True)
class DeltaRequests:
    """Where the B requests are; `first` [B] is the position of a first row, -1 for none."""

    first: Tensor
    replays: Tensor  # rows of the last round that were accepted
    slots: Tensor  # of the memories
    buffers: Tensor  # of the rings


def empty_rings(
    buffers: int, places: int, channels: int, heads: int, dtype: torch.dtype, device: torch.device
) -> Rings:
    rows = (buffers, places, channels)
    return Rings(
        torch.zeros(rows, dtype=dtype, device=device),
        torch.zeros(rows, dtype=dtype, device=device),
        torch.zeros(buffers, places, 2, heads, device=device),
    )


def convolve_round(
    partial: Tensor, weight: Tensor, a_log: Tensor, dt_bias: Tensor, batch: DeltaRequests,
    rings: Rings, rows: int,
) -> None:  # fmt: skip
    """Fill the rings with R new rows of each request.

    partial [S, B * R, C + H V + 2 H] sums up to channels, output gates, strengths, decays; weight
    [C, n]; a_log and dt_bias [H] fp32.
    """
    splits, total, width = partial.shape
    channels, taps = weight.shape
    heads = a_log.shape[0]
    places = rings.inputs.shape[1]
    assert taps - 1 + rows <= places
    block = 256
    _convolve[(batch.first.shape[0], triton.cdiv(channels, block) + 1)](
        partial, weight, a_log, dt_bias, batch.first, batch.buffers, rings.inputs, rings.mixed,
        rings.gates, total, width, channels, heads, SPLITS=splits, ROWS=rows, TAPS=taps,
        PLACES=places, BLOCK=block, BLOCK_H=triton.next_power_of_2(heads), num_warps=2,
    )  # fmt: skip


def delta_round(
    partial: Tensor, norm: Tensor, eps: float, memory: Tensor, batch: DeltaRequests, rings: Rings,
    rows: int, *, is_silu: bool = True,
) -> Tensor:  # fmt: skip
    """Repeat what was accepted, in place in memory [slots, H, K, V]; then R new rows of each.

    Returns what they read, normed and gated: [B * R, H V] in the rings' type; gates are silu, or
    sigmoids. With no rows only the memories are brought up to date.
    """
    splits, total, width = partial.shape
    heads, k_dim, v_dim = memory.shape[1:]
    places, channels = rings.mixed.shape[1:]
    k_heads = (channels - heads * v_dim) // (2 * k_dim)
    count = batch.first.shape[0]
    result = torch.empty(count * rows, heads * v_dim, dtype=rings.mixed.dtype, device=memory.device)
    _delta[(count, heads)](
        partial, norm, memory, batch.first, batch.replays, batch.slots, batch.buffers, rings.mixed,
        rings.gates, result, total, width, channels, eps, k_dim**-0.5, SPLITS=splits, ROWS=rows,
        HEADS=heads, GROUP=heads // k_heads, KEYS=k_heads * k_dim, K_DIM=k_dim, V_DIM=v_dim,
        PLACES=places, IS_SILU=is_silu, BLOCK_K=triton.next_power_of_2(k_dim),
        BLOCK_V=triton.next_power_of_2(v_dim), num_warps=8,
    )  # fmt: skip
    return result


@jit
def _summed(partial, row, total, width, at, mask, kind, SPLITS: tl.constexpr):
    """Columns `at` of a product's row, rounded where a plain product would have rounded."""
    value = tl.load(partial + row * width + at, mask, 0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        value += tl.load(partial + (split * total + row) * width + at, mask, 0.0).to(tl.float32)
    return value.to(kind).to(tl.float32)


@jit(do_not_specialize=["total"])
def _convolve(partial, weight, a_log, dt_bias, first, buffers, inputs, mixed, gates, total, width,
              channels, heads, SPLITS: tl.constexpr, ROWS: tl.constexpr, TAPS: tl.constexpr,
              PLACES: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    begin = tl.load(first + request)
    ring = tl.load(buffers + request).to(tl.int64) * PLACES
    kind = mixed.dtype.element_ty
    if begin >= 0:
        if block < tl.num_programs(1) - 1:
            at = block * BLOCK + tl.arange(0, BLOCK)
            mask = at < channels
            for row in range(ROWS):
                here = request * ROWS + row
                place = ring + (begin + row) % PLACES
                own = _summed(partial, here, total, width, at, mask, kind, SPLITS)
                tl.store(inputs + place * channels + at, own.to(kind), mask)
                tap = tl.load(weight + at * TAPS + TAPS - 1, mask, 0.0).to(tl.float32)
                value = own * tap
                for back in tl.static_range(1, TAPS):
                    tap = tl.load(weight + at * TAPS + TAPS - 1 - back, mask, 0.0).to(tl.float32)
                    if row >= back:
                        new = _summed(partial, here - back, total, width, at, mask, kind, SPLITS)
                        value += new * tap
                    elif begin + row >= back:  # from before this round
                        earlier = ring + (begin + row - back) % PLACES
                        old = tl.load(inputs + earlier * channels + at, mask, 0.0)
                        value += old.to(tl.float32) * tap
                value = value.to(kind).to(tl.float32)
                value = value * tl.sigmoid(value)
                tl.store(mixed + place * channels + at, value.to(kind), mask)
        else:
            head = tl.arange(0, BLOCK_H)
            is_head = head < heads
            rate = -tl.exp(tl.load(a_log + head, is_head, 0.0))
            bias = tl.load(dt_bias + head, is_head, 0.0)
            for row in range(ROWS):
                line = request * ROWS + row
                in_row = width - 2 * heads + head
                b = _summed(partial, line, total, width, in_row, is_head, kind, SPLITS)
                a = _summed(partial, line, total, width, in_row + heads, is_head, kind, SPLITS)
                target = gates + (ring + (begin + row) % PLACES) * 2 * heads + head
                tl.store(target, rate * soft_plus(a + bias), is_head)
                tl.store(target + heads, tl.sigmoid(b), is_head)


@jit
def soft_plus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@jit
def _unit(x):
    return x * tl.rsqrt(tl.sum(x * x, 0) + TINY)


@jit
def _changed(state, source, gate, at_k, is_k, at_v, is_v, HEADS: tl.constexpr):
    """A memory [K, V] after one row: it fades, and the row writes what it lacked."""
    key = _unit(tl.load(source + at_k, is_k, 0.0).to(tl.float32))
    value = tl.load(source + at_v, is_v, 0.0).to(tl.float32)
    state = state * tl.exp(tl.load(gate))
    known = tl.sum(key[:, None] * state, 0)
    change = (value - known) * tl.load(gate + HEADS)
    return state + key[:, None] * change[None, :]


@jit(do_not_specialize=["total"])
def _delta(partial, norm, memory, first, replays, slots, buffers, mixed, gates, result, total,
           width, channels, eps, scale, SPLITS: tl.constexpr, ROWS: tl.constexpr,
           HEADS: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, K_DIM: tl.constexpr,
           V_DIM: tl.constexpr, PLACES: tl.constexpr, IS_SILU: tl.constexpr,
           BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    in_k = tl.arange(0, BLOCK_K)
    in_v = tl.arange(0, BLOCK_V)
    is_k = in_k < K_DIM
    is_v = in_v < V_DIM
    at_q = head // GROUP * K_DIM + in_k
    at_k = KEYS + at_q
    at_v = 2 * KEYS + head * V_DIM + in_v
    kind = result.dtype.element_ty
    begin = tl.load(first + request)
    if begin >= 0:
        ring = tl.load(buffers + request).to(tl.int64) * PLACES
        gate = gates + head
        where = (tl.load(slots + request).to(tl.int64) * HEADS + head) * (K_DIM * V_DIM)
        own = memory + where + in_k[:, None] * V_DIM + in_v[None, :]
        mask = is_k[:, None] & is_v[None, :]
        state = tl.load(own, mask, 0.0)
        repeated = tl.load(replays + request)
        for back in range(repeated):
            place = ring + (begin - repeated + back) % PLACES
            state = _changed(state, mixed + place * channels, gate + place * 2 * HEADS, at_k, is_k,
                             at_v, is_v, HEADS)  # fmt: skip
        tl.store(own, state, mask)
        gain = tl.load(norm + in_v, is_v, 0.0).to(tl.float32)
        for row in range(ROWS):
            place = ring + (begin + row) % PLACES
            source = mixed + place * channels
            state = _changed(state, source, gate + place * 2 * HEADS, at_k, is_k, at_v, is_v, HEADS)
            query = _unit(tl.load(source + at_q, is_k, 0.0).to(tl.float32)) * scale
            read = tl.sum(query[:, None] * state, 0).to(kind).to(tl.float32)
            read = read * tl.rsqrt(tl.sum(read * read, 0) / V_DIM + eps) * gain
            here = request * ROWS + row
            out = _summed(partial, here, total, width, channels + head * V_DIM + in_v, is_v, kind,
                          SPLITS)  # fmt: skip
            opened = tl.sigmoid(out)
            if IS_SILU:
                opened = out * opened
            value = read.to(kind).to(tl.float32) * opened.to(kind).to(tl.float32)
            target = result + here * (HEADS * V_DIM) + head * V_DIM + in_v
            tl.store(target, value.to(kind), is_v)
    else:
        for row in range(ROWS):
            target = result + (request * ROWS + row) * (HEADS * V_DIM) + head * V_DIM + in_v
            tl.store(target, tl.zeros((BLOCK_V,), dtype=kind), is_v)
