"""Lists of pairs of a row and an expert, by expert.

For many rows they are sorted and cut into tiles. Nothing is read back: there are as many tiles as
there can be, and those left over are empty.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

_TILES = (16, 32, 64)  # pairs


@dataclass(frozen=True)
class Lists:
    """`count` lists of pairs that have one expert; programs take `tile` of them at a time."""

    experts: Tensor  # [count] int32
    starts: Tensor  # [count, 2] int32: where in `order` a list begins, and how long it is
    order: Tensor  # pairs, int32
    count: int
    tile: int


def empty_lists(chosen: Tensor, most: int) -> Lists:
    """A list of up to `most` pairs for each of chosen [M, C]; programs fill them."""
    pairs = chosen.numel()
    starts = torch.empty(pairs, 2, dtype=torch.int32, device=chosen.device)
    order = torch.empty(pairs * most, dtype=torch.int32, device=chosen.device)
    return Lists(chosen, starts, order, pairs, _TILES[0])


def sort_pairs(chosen: Tensor, num_experts: int) -> Lists:
    """Tiles of chosen [M, C]; -1 is nobody's and in no tile."""
    pairs = chosen.numel()
    device = chosen.device
    tile = next((size for size in _TILES if pairs <= size * num_experts), _TILES[-1])
    count = triton.cdiv(pairs, tile) + min(pairs, num_experts)
    experts, order = chosen.flatten().sort(stable=True)
    edges = torch.searchsorted(
        experts, torch.arange(num_experts + 1, dtype=torch.int32, device=device)
    )
    tiles = (edges.diff() + tile - 1) // tile
    ends = tiles.cumsum(0)
    number = torch.arange(count, device=device)
    expert = torch.searchsorted(ends, number, right=True)
    known = expert.clamp_max(num_experts - 1)
    start = edges[known] + (number - ends[known] + tiles[known]) * tile
    own = (edges[known + 1] - start).clamp(0, tile).masked_fill(expert >= num_experts, 0)
    starts = torch.stack([start, own], 1).to(torch.int32)
    return Lists(known.to(torch.int32), starts, order.to(torch.int32), count, tile)
