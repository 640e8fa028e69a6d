"""What a pass begins with: embeddings, their norms, the pairs that the head fuses.

M rows, N width of the model; B requests of R rows each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.jit import jit


def embed_rows(ids: Tensor, embed: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Embeddings [M, N] of ids [M], a copy that may be changed, and their RMS norm."""
    rows, width = ids.shape[0], embed.shape[1]
    stream = torch.empty(rows, width, dtype=embed.dtype, device=embed.device)
    normed = torch.empty_like(stream)
    _embed_rows[(rows,)](
        ids, embed, weight, stream, normed, width, eps, BLOCK=triton.next_power_of_2(width),
        num_warps=8,
    )  # fmt: skip
    return stream, normed


def pair_rows(
    ids: Tensor, states: Tensor, embed: Tensor, norms: tuple[Tensor, Tensor], positions: Tensor,
    eps: float, *, embed_first: bool, zero_first: bool,
) -> Tensor:  # fmt: skip
    """Normed embedding and normed state of every row side by side: [B * R, 2 N].

    ids [B, R], states [B, R, N], both perhaps parts of wider tensors; norms: of the embedding, of
    the state; positions [B * R]. With `zero_first` the embedding at position 0 counts as zero.
    """
    requests, rows, width = states.shape
    assert states.stride(2) == 1 and ids.stride(1) in (1, rows) and embed.is_contiguous()
    pair = torch.empty(requests * rows, 2 * width, dtype=embed.dtype, device=embed.device)
    _pair_rows[(requests, rows)](
        ids, states, embed, *norms, positions, pair, ids.stride(0), states.stride(0),
        states.stride(1), width, eps, EMBED_AT=0 if embed_first else 1, ZERO_FIRST=zero_first,
        BLOCK=triton.next_power_of_2(width), num_warps=8,
    )  # fmt: skip
    return pair


def newest_rows(
    normed: Tensor, recycled: Tensor, pending: Tensor, after: int = 0
) -> tuple[Tensor, Tensor]:
    """Of each request's R rows the one of its last pending token: [B, N] of both [B * R, N].

    Or the one so many rows `after` it.
    """
    requests, width = pending.shape[0], normed.shape[1]
    rows = normed.shape[0] // requests
    results = [
        torch.empty(requests, width, dtype=x.dtype, device=x.device) for x in (normed, recycled)
    ]
    _newest_rows[(requests,)](
        normed, recycled, pending, *results, width, after, ROWS=rows,
        BLOCK=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return results[0], results[1]


def noise_rows(
    lengths: Tensor, inv_temps: Tensor, seeds: Tensor, rows: int, ahead: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Inverse temperature, seed and position of what every row chooses, [B * rows] each.

    Row r of a request chooses the token at its length + ahead + r.
    """
    requests = lengths.shape[0]
    if rows == 1 and ahead == 0:
        return inv_temps, seeds, lengths.long()
    scales = torch.empty(requests * rows, dtype=inv_temps.dtype, device=inv_temps.device)
    seeded = torch.empty(requests * rows, dtype=seeds.dtype, device=inv_temps.device)
    positions = torch.empty(requests * rows, dtype=torch.int64, device=inv_temps.device)
    _noise_rows[(triton.cdiv(requests * rows, 128),)](
        lengths, inv_temps, seeds, scales, seeded, positions, requests * rows, ahead, ROWS=rows,
        BLOCK=128, num_warps=1,
    )  # fmt: skip
    return scales, seeded, positions


@jit
def _normed(x, mask, weight, at, width, eps):
    value = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    gain = tl.load(weight + at, mask, 0.0).to(tl.float32)
    return (value * scale * gain).to(x.dtype)


@jit
def _embed_rows(ids, embed, weight, stream, normed, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < width
    x = tl.load(embed + tl.load(ids + row) * width + at, mask, 0.0)
    tl.store(stream + row * width + at, x, mask)
    tl.store(normed + row * width + at, _normed(x, mask, weight, at, width, eps), mask)


@jit
def _pair_rows(ids, states, embed, embed_norm, state_norm, positions, pair, id_stride,
               request_stride, row_stride, width, eps, EMBED_AT: tl.constexpr,
               ZERO_FIRST: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1)
    flat = request * tl.num_programs(1) + row
    at = tl.arange(0, BLOCK)
    mask = at < width
    token = tl.load(ids + request * id_stride + row)
    x = tl.load(embed + token * width + at, mask, 0.0)
    if ZERO_FIRST:
        x = tl.where(tl.load(positions + flat) == 0, x * 0, x)
    target = pair + flat * 2 * width + at
    tl.store(target + EMBED_AT * width, _normed(x, mask, embed_norm, at, width, eps), mask)
    state = tl.load(states + request * request_stride + row * row_stride + at, mask, 0.0)
    other = (1 - EMBED_AT) * width
    tl.store(target + other, _normed(state, mask, state_norm, at, width, eps), mask)


@jit(do_not_specialize=["after"])
def _newest_rows(normed, recycled, pending, normed_out, recycled_out, width, after,
                 ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < width
    row = tl.maximum(tl.load(pending + request) - 1, 0) + after
    source = (request * ROWS + row) * width + at
    tl.store(normed_out + request * width + at, tl.load(normed + source, mask, 0.0), mask)
    tl.store(recycled_out + request * width + at, tl.load(recycled + source, mask, 0.0), mask)


@jit(do_not_specialize=["count", "ahead"])
def _noise_rows(lengths, inv_temps, seeds, scales, seeded, positions, count, ahead,
                ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    flat = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = flat < count
    request = flat // ROWS
    tl.store(scales + flat, tl.load(inv_temps + request, mask, 0.0), mask)
    tl.store(seeded + flat, tl.load(seeds + request, mask, 0), mask)
    length = tl.load(lengths + request, mask, 0).to(tl.int64)
    tl.store(positions + flat, length + ahead + flat % ROWS, mask)
