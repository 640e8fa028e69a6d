"""Lists of pairs of a row and an expert, by expert.

For many rows they are sorted and cut into tiles. Nothing is read back: there are as many tiles as
there can be, and some are empty. The tiles of expert e, which has pairs s to t - 1 of the sorted
ones, are those from number s // tile + e up to t // tile + e: that is room for all its pairs and
needs no look at how the others were cut. So each expert's program finds its place by itself.

-1 stands for no expert. Its pairs come first, and all its tiles are empty.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from headstart.backends.cuda.kernels.jit import jit

_TILES = (16, 32, 64, 128)  # pairs,
MOST = 64  # of a tile, where nothing else is said
# Pairs that a sorting program looks at together: it needs few enough registers for the programs of
# 512 experts to run at once on an H200. benchmarks/gpu_moe.py measures others.
_STEP = 1024
# Every expert's program reads all pairs; of more than these a library sorts them.
_MOST_PAIRS = 1 << 16
_BEHIND = tl.constexpr(0x7FFFFFFF)  # an expert after all others


@dataclass(frozen=True)
class Lists:
    """`count` lists of pairs that have one expert; programs take `tile` of them at a time."""

    experts: Tensor  # [count] int32
    starts: Tensor  # [count, 2] int32: where in `order` a list begins, and how long it is
    order: Tensor  # pairs, int32
    count: int
    tile: int
    is_by_expert: bool = False  # one list for each expert, after one without pairs for -1


def empty_lists(chosen: Tensor, most: int, tile: int = _TILES[0]) -> Lists:
    """A list of up to `most` pairs for each of chosen [M, C]; programs fill them."""
    pairs = chosen.numel()
    starts = torch.empty(pairs, 2, dtype=torch.int32, device=chosen.device)
    order = torch.empty(pairs * most, dtype=torch.int32, device=chosen.device)
    return Lists(chosen, starts, order, pairs, tile)


def empty_expert_lists(chosen: Tensor, num_experts: int, most: int, tile: int) -> Lists:
    """A list of up to `most` pairs for each expert, after one for no expert; a program fills them.

    Fewer than those of pairs where many pairs share few experts: programs of an empty list take
    the time of a start each.
    """
    count = num_experts + 1
    experts = torch.empty(count, dtype=torch.int32, device=chosen.device)
    starts = torch.empty(count, 2, dtype=torch.int32, device=chosen.device)
    order = torch.empty(count * most, dtype=torch.int32, device=chosen.device)
    return Lists(experts, starts, order, count, tile, is_by_expert=True)


def tile_for(pairs: int, num_experts: int, most: int = MOST) -> int:
    """Pairs of a tile, so that few experts have more: every tile reads its expert's matrices.

    Of choices drawn at random five experts of six have at most the mean and its root.
    """
    mean = pairs / num_experts
    return next((size for size in _TILES if mean + mean**0.5 <= size or size == most), most)


def sort_pairs(chosen: Tensor, num_experts: int, step: int = _STEP, most: int = MOST) -> Lists:
    """Tiles of chosen [M, C] int32, in one launch; an expert's pairs stay in their order.

    `most`: pairs of a tile.
    """
    pairs = chosen.numel()
    if pairs > _MOST_PAIRS:
        return sort_plainly(chosen, num_experts, most)
    assert chosen.is_contiguous()
    count, tile = _tiling(pairs, num_experts, most)
    experts = torch.empty(count, dtype=torch.int32, device=chosen.device)
    starts = torch.empty(count, 2, dtype=torch.int32, device=chosen.device)
    order = torch.empty(pairs, dtype=torch.int32, device=chosen.device)
    _sort[(num_experts + 1,)](
        chosen, experts, starts, order, pairs, TILE=tile, BLOCK=step, BLOCK_T=32, num_warps=4
    )
    return Lists(experts, starts, order, count, tile)


def sort_plainly(chosen: Tensor, num_experts: int, most: int = MOST) -> Lists:
    """The same by PyTorch's operations: the reference."""
    pairs, device = chosen.numel(), chosen.device
    count, tile = _tiling(pairs, num_experts, most)
    sorted_ids, order = chosen.flatten().sort(stable=True)
    owners = torch.arange(-1, num_experts + 1, dtype=torch.int32, device=device)  # and an end
    edges = torch.searchsorted(sorted_ids, owners)
    first = edges // tile + owners
    number = torch.arange(count, device=device)
    at = torch.searchsorted(first[:-1], number, right=True) - 1
    start = edges[at] + (number - first[at]) * tile
    own = (edges[at + 1] - start).clamp(0, tile).masked_fill(at == 0, 0)
    starts = torch.stack([start, own], 1).to(torch.int32)
    return Lists(owners[at].clamp_min(0), starts, order.to(torch.int32), count, tile)


def _tiling(pairs: int, num_experts: int, most: int) -> tuple[int, int]:
    """How many tiles there are, and pairs of a tile."""
    tile = tile_for(pairs, num_experts, most)
    return pairs // tile + num_experts, tile


@jit(do_not_specialize=["pairs"])
def _sort(chosen, experts, starts, order, pairs, TILE: tl.constexpr, BLOCK: tl.constexpr,
          BLOCK_T: tl.constexpr):  # fmt: skip
    """All about one expert: its pairs in `order`, its tiles; the first program is of no expert."""
    expert = tl.program_id(0) - 1
    lane = tl.arange(0, BLOCK)
    is_before = tl.zeros((BLOCK,), dtype=tl.int32)
    is_own = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, pairs, BLOCK):
        ids = tl.load(chosen + first + lane, first + lane < pairs, _BEHIND)
        is_before += (ids < expert).to(tl.int32)
        is_own += (ids == expert).to(tl.int32)
    start = tl.sum(is_before, 0)
    count = tl.sum(is_own, 0)

    place = start - 1
    stop = tl.where(count > 0, pairs, 0)
    for first in range(0, stop, BLOCK):
        ids = tl.load(chosen + first + lane, first + lane < pairs, _BEHIND)
        rank = tl.cumsum((ids == expert).to(tl.int32), 0)
        tl.store(order + place + rank, first + lane, ids == expert)
        place += tl.max(rank, 0)

    first_tile = start // TILE + expert
    num_tiles = (start + count) // TILE + expert + 1 - first_tile
    filled = tl.where(expert >= 0, count, 0)
    for part in range(0, num_tiles, BLOCK_T):
        tile = part + tl.arange(0, BLOCK_T)
        number = first_tile + tile
        is_tile = (tile < num_tiles) & (number >= 0)  # tiles of no expert begin at -1
        own = tl.minimum(tl.maximum(filled - tile * TILE, 0), TILE)
        tl.store(experts + number, tl.zeros_like(tile) + tl.maximum(expert, 0), is_tile)
        tl.store(starts + 2 * number, start + tile * TILE, is_tile)
        tl.store(starts + 2 * number + 1, own, is_tile)
