"""Penalties, biases and masks on logits, as `sampling/processors.py` has them, on a GPU.

Tokens are cut into tiles; each tile's largest value (its peak) is kept beside the values, for the
choice among them (`sampling.py`).

B requests, M rows (equally many of each request), N columns (tokens, or a draft vocabulary's), V
tokens, T tiles, S parts of a sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.jit import jit
from headstart.backends.cuda.kernels.ranking import (
    END_AFTER,
    FREQUENCY,
    PRESENCE,
    REPETITION,
)

TILE = 1024  # tokens

# The first rows of `Settings.numbers` and `Settings.counts`; ranking.py has the others.
INV_TEMP, USES = 0, 0
NUM_NUMBERS, NUM_COUNTS = 6, 5
# Bits of USES.
PENALTIES, BIAS, ENDS, MASK, REJECTS = 1, 2, 4, 8, 16
# A word of `Settings.history`: whether the prompt has the token, whether it ends an answer, and
# from bit 2 on how often the output has it.
IN_PROMPT, IS_END, ONE_OUTPUT = 1, 2, 4

_PENALTIES, _BIAS, _ENDS, _MASK = (tl.constexpr(bit) for bit in (PENALTIES, BIAS, ENDS, MASK))
FORBIDS = tl.constexpr(BIAS | ENDS | MASK)  # what may leave no token


@dataclass(frozen=True)
class Settings:
    """What requests ask of the choice, on the device."""

    numbers: Tensor  # [NUM_NUMBERS, B] fp32
    counts: Tensor  # [NUM_COUNTS, B] int32
    seeds: Tensor  # [B] int64
    history: Tensor  # [B, V] int32, of requests with penalties or min_tokens
    bias: Tensor  # [B, V] fp32 with -inf for what is forbidden, of requests that have one

    @property
    def count(self) -> int:
        return self.seeds.shape[0]

    @property
    def inv_temps(self) -> Tensor:
        return self.numbers[INV_TEMP]

    def first(self, count: int) -> Settings:
        """Of the first requests."""
        return Settings(
            self.numbers[:, :count], self.counts[:, :count], self.seeds[:count],
            self.history[:count], self.bias[:count],
        )  # fmt: skip


@dataclass(frozen=True)
class Adjusted:
    """Logits after penalties, biases and masks."""

    values: Tensor  # [M, N] fp32; where nothing is processed they may be in another type
    peaks: Tensor  # [M, T]: the largest value of each tile
    positions: Tensor  # [M] of the tokens to be chosen
    token_ids: Tensor | None  # [N] of a draft vocabulary, or [M, N]

    def tokens_at(self, columns: Tensor) -> Tensor:
        """Ids [M] of one column of each row."""
        if self.token_ids is None:
            return columns
        if self.token_ids.dim() == 1:
            return self.token_ids[columns]
        return self.token_ids.gather(1, columns[:, None]).squeeze(1)


def adjust(
    logits: Tensor, settings: Settings, positions: Tensor, *, drafts: Tensor | None = None,
    token_ids: Tensor | None = None, masks: Tensor | None = None, penalises: bool = True,
    processes: bool = True, copies: bool = True,
) -> Adjusted:  # fmt: skip
    """logits [S, M, N], whose sum over S counts.

    drafts [B, each - 1]: row r of a request comes after r of them, which penalties count. masks
    [M, words] int32: bits of tokens that a grammar allows, for rows of requests that have one.
    token_ids [N], or [M, N] where rows have columns of their own. Without `processes` logits stay
    as they are; then without `copies`, too, where they lie.
    """
    splits, rows, columns = logits.shape
    each = rows // settings.count
    tiles = triton.cdiv(columns, TILE)
    stores = copies or processes or splits > 1
    values = logits[0]
    if stores:
        values = torch.empty(rows, columns, dtype=torch.float32, device=logits.device)
    peaks = torch.empty(rows, tiles, dtype=torch.float32, device=logits.device)
    none = settings.counts
    _adjust[(tiles, rows)](
        logits, none if drafts is None else drafts, positions,
        none if token_ids is None else token_ids, settings.numbers, settings.counts,
        settings.history, settings.bias, none if masks is None else masks, values, peaks,
        settings.numbers.stride(0), each, rows, columns, settings.bias.shape[1],
        0 if masks is None else masks.shape[1], tiles, 0 if drafts is None else drafts.stride(0),
        id_stride(token_ids),
        SPLITS=splits, HAS_IDS=token_ids is not None, HAS_MASKS=masks is not None,
        PENALISES=penalises, PROCESSES=processes, STORES=stores, TILE=TILE, num_warps=4,
    )  # fmt: skip
    return Adjusted(values, peaks, positions, token_ids)


def id_stride(token_ids: Tensor | None) -> int:
    """From the ids of a row's columns to the next row's; 0 where all have the same."""
    return 0 if token_ids is None or token_ids.dim() == 1 else token_ids.stride(0)


def remember(settings: Settings, emitted: Tensor) -> None:
    """Count what a round emitted, [B, 1 + R]: how many tokens, then the tokens."""
    requests, width = emitted.shape
    _remember[(requests,)](
        settings.history, settings.counts, emitted, settings.history.shape[1], width,
        emitted.stride(0), BLOCK=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip


@jit(do_not_specialize=["stride", "each", "rows", "words", "draft_stride", "id_stride"])
def _adjust(logits, drafts, positions, ids, numbers, counts, history, bias, masks, values, peaks,
            stride, each, rows, columns, vocab, words, tiles, draft_stride, id_stride,
            SPLITS: tl.constexpr, HAS_IDS: tl.constexpr, HAS_MASKS: tl.constexpr,
            PENALISES: tl.constexpr, PROCESSES: tl.constexpr, STORES: tl.constexpr,
            TILE: tl.constexpr):  # fmt: skip
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    request, depth = row // each, row % each
    column = tile * TILE + tl.arange(0, TILE)
    is_column = column < columns
    value = tl.load(logits + row * columns + column, is_column, float("-inf")).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        part = logits + (split * rows + row) * columns + column
        value += tl.load(part, is_column, 0.0).to(tl.float32)
    token = column
    if HAS_IDS:
        token = tl.load(ids + row * id_stride + column, is_column, 0).to(tl.int32)
    uses = tl.load(counts + request) * PROCESSES
    asked = numbers + request
    if PENALISES:
        if uses & _PENALTIES:
            word = tl.load(history + request * vocab + token, is_column, 0)
            count = word >> 2
            for draft in range(depth):
                count += (token == tl.load(drafts + request * draft_stride + draft)).to(tl.int32)
            is_seen = (count > 0) | ((word & 1) != 0)
            penalty = tl.load(asked + REPETITION * stride)
            value = tl.where(is_seen, tl.where(value > 0, value / penalty, value * penalty), value)
            presence = tl.load(asked + PRESENCE * stride)
            amount = tl.load(asked + FREQUENCY * stride) * count.to(tl.float32) + presence
            value = tl.where(count > 0, value - amount, value)
    if uses & _BIAS:
        value += tl.load(bias + request * vocab + token, is_column, 0.0)
    if uses & _ENDS:
        word = tl.load(history + request * vocab + token, is_column, 0)
        is_early = tl.load(positions + row) < tl.load(counts + END_AFTER * stride + request)
        value = tl.where(is_early & ((word & 2) != 0), float("-inf"), value)
    if HAS_MASKS:
        if uses & _MASK:
            bits = tl.load(masks + row * words + (token >> 5), is_column, 0)
            value = tl.where(((bits >> (token & 31)) & 1) != 0, value, float("-inf"))
    if STORES:
        tl.store(values + row * columns + column, value, is_column)
    tl.store(peaks + row * tiles + tile, tl.max(value, 0))


@jit(do_not_specialize=["width", "stride"])
def _remember(history, counts, emitted, vocab, width, stride, BLOCK: tl.constexpr):
    request = tl.program_id(0).to(tl.int64)
    if tl.load(counts + request) & _PENALTIES:
        at = tl.arange(0, BLOCK)
        count = tl.load(emitted + request * stride)
        token = tl.load(emitted + request * stride + 1 + at, at < width - 1, -1)
        is_new = (at < count) & (token >= 0)
        tl.atomic_add(history + request * vocab + token, 4, is_new)
