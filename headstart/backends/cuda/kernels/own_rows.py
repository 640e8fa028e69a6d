"""Tokens that requests draft beside a draft vocabulary: which they are, and the choice with them.

A request has up to L slots, each with a token of its own text and where the text had it last. The
head's pending tokens join before it drafts; the one that the text had longest ago makes room. Rows
of the whole LM head are read where they lie, those of slots in use only.

B requests, V tokens, K inputs, L slots, R pending tokens at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.choice import best_of_rows, keep_best, with_noise
from headstart.backends.cuda.kernels.jit import jit

_SLOTS = 8  # of a program
_INPUTS = 512  # that a program reads at a time


@dataclass(frozen=True)
class OwnSlots:
    """The own tokens of requests, on the device."""

    ids: Tensor  # [B, L] int32
    last: Tensor  # [B, L] int32: where the text had each of them last
    counts: Tensor  # [B] int32: slots in use, the first ones

    @classmethod
    def empty(cls, requests: int, limit: int, device: torch.device) -> OwnSlots:
        ids, last = torch.zeros(2, requests, limit, dtype=torch.int32, device=device).unbind()
        return cls(ids, last, torch.zeros(requests, dtype=torch.int32, device=device))

    @property
    def limit(self) -> int:
        return self.ids.shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in (self.ids, self.last, self.counts))

    def first(self, count: int) -> OwnSlots:
        """Of the first requests."""
        return OwnSlots(self.ids[:count], self.last[:count], self.counts[:count])

    def move(self, source: int, target: int) -> None:
        for tensor in (self.ids, self.last, self.counts):
            tensor[target] = tensor[source]


def add_own(
    own: OwnSlots, tokens: Tensor, pending: Tensor, lengths: Tensor, columns: Tensor,
    vocabs: Tensor, number: int,
) -> None:  # fmt: skip
    """Take in the pending tokens [B, R] of requests with draft vocabulary `number`.

    columns [V]: where that vocabulary has a token, -1: nowhere; vocabs [B]: which one each has.
    """
    _add[(own.ids.shape[0],)](
        own.ids, own.last, own.counts, tokens, pending, lengths, columns, vocabs, number,
        tokens.stride(0), tokens.shape[1], LIMIT=own.limit,
        BLOCK=triton.next_power_of_2(own.limit), num_warps=4,
    )  # fmt: skip


def choose_with_own(
    x: Tensor, weight: Tensor, own: OwnSlots, chosen: Tensor, inv_temps: Tensor, seeds: Tensor,
    positions: Tensor,
) -> Tensor:  # fmt: skip
    """[B] int64: the best of what a list gave (chosen [B]) and the own tokens; x [B, K].

    weight [V, K] of the whole LM head: both sides are compared by it. The rest is as
    `choice.choose_rows` has it.
    """
    requests, inputs = x.shape
    tiles = triton.cdiv(own.limit + 1, _SLOTS)
    best = torch.empty(requests, tiles, dtype=torch.float32, device=x.device)
    where = torch.empty(requests, tiles, dtype=torch.int32, device=x.device)
    _best_of_own[(tiles, requests)](
        x, weight, own.ids, own.counts, chosen, inv_temps, seeds, positions, best, where, inputs,
        tiles, chosen.stride(0), LIMIT=own.limit, SLOTS=_SLOTS, BLOCK_K=_block(inputs),
        num_warps=4,
    )  # fmt: skip
    return best_of_rows(best, where)


def own_logits(x: Tensor, weight: Tensor, own: OwnSlots) -> Tensor:
    """[B, L] fp32 by slot, -inf where it is not in use."""
    requests, inputs = x.shape
    result = torch.empty(requests, own.limit, dtype=torch.float32, device=x.device)
    _logits_of_own[(triton.cdiv(own.limit, _SLOTS), requests)](
        x, weight, own.ids, own.counts, result, inputs, LIMIT=own.limit, SLOTS=_SLOTS,
        BLOCK_K=_block(inputs), num_warps=4,
    )  # fmt: skip
    return result


def _block(inputs: int) -> int:
    return int(min(_INPUTS, triton.next_power_of_2(inputs)))


@jit(do_not_specialize=["number", "stride", "width"])
def _add(ids, last, counts, tokens, pending, lengths, columns, vocabs, number, stride, width,
         LIMIT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + request)
    if (tl.load(vocabs + request) == number) & (length > 0):
        at = tl.arange(0, BLOCK)
        own = tl.load(ids + request * LIMIT + at, at < LIMIT, -1)
        seen = tl.load(last + request * LIMIT + at, at < LIMIT, 2147483647)
        count, new = tl.load(counts + request), tl.load(pending + request)
        for i in range(tl.minimum(new, width)):
            token = tl.load(tokens + request * stride + i).to(tl.int32)
            is_known = (own == token) & (at < count)
            is_there = tl.max(is_known.to(tl.int32), 0)
            oldest = tl.min(tl.where(at < count, seen, 2147483647), 0)
            is_last = (count == LIMIT) & (seen == oldest)
            is_free = (count < LIMIT) & (at == count)
            is_place = tl.where(is_there > 0, is_known, (is_last | is_free) & (at < LIMIT))
            is_place = is_place & (tl.load(columns + token) < 0)
            own = tl.where(is_place, token, own)
            seen = tl.where(is_place, length - new + i, seen)
            grows = tl.max((is_place & is_free).to(tl.int32), 0) * (1 - is_there)
            count += grows
        tl.store(ids + request * LIMIT + at, own, at < LIMIT)
        tl.store(last + request * LIMIT + at, seen, at < LIMIT)
        tl.store(counts + request, count)


@jit
def _products(x, weight, request, token, is_row, inputs, SLOTS: tl.constexpr,
              BLOCK_K: tl.constexpr):  # fmt: skip
    """[SLOTS]: logits of tokens `token` by one request's state."""
    sums = tl.zeros((SLOTS,), dtype=tl.float32)
    for first in range(0, inputs, BLOCK_K):
        inner = first + tl.arange(0, BLOCK_K)
        w_mask = is_row[:, None] & (inner[None, :] < inputs)
        w = tl.load(weight + token[:, None].to(tl.int64) * inputs + inner[None, :], w_mask, 0.0)
        v = tl.load(x + request * inputs + inner, inner < inputs, 0.0)
        sums += tl.sum(w.to(tl.float32) * v.to(tl.float32)[None, :], 1)
    return sums


@jit(do_not_specialize=["stride"])
def _best_of_own(x, weight, ids, counts, chosen, inv_temps, seeds, positions, best, where, inputs,
                 tiles, stride, LIMIT: tl.constexpr, SLOTS: tl.constexpr,
                 BLOCK_K: tl.constexpr):  # fmt: skip
    tile, request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    count = tl.load(counts + request)
    slot = tile * SLOTS + tl.arange(0, SLOTS) - 1  # -1: what the list gave
    is_row = slot < count
    token = tl.load(ids + request * LIMIT + slot, is_row & (slot >= 0), 0)
    token = tl.where(slot < 0, tl.load(chosen + request * stride).to(tl.int32), token)
    value = tl.where(slot < 0, 0.0, float("-inf"))
    if (count > 0) & (tile * SLOTS <= count):
        value = _products(x, weight, request, token, is_row, inputs, SLOTS, BLOCK_K)
        value = with_noise(value, token, request, inv_temps, seeds, positions)
        value = tl.where(is_row, value, float("-inf"))
    keep_best(value, token, best, where, request * tiles + tile)


@jit
def _logits_of_own(x, weight, ids, counts, result, inputs, LIMIT: tl.constexpr,
                   SLOTS: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    request = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    count = tl.load(counts + request)
    value = tl.full((SLOTS,), float("-inf"), dtype=tl.float32)
    if tl.program_id(0) * SLOTS < count:
        is_row = slot < count
        token = tl.load(ids + request * LIMIT + slot, is_row, 0)
        value = _products(x, weight, request, token, is_row, inputs, SLOTS, BLOCK_K)
        value = tl.where(is_row, value, float("-inf"))
    tl.store(result + request * LIMIT + slot, value, slot < LIMIT)
