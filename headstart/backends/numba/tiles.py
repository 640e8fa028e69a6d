"""How scales and zero points of groups lie in tiles of 32 outputs, beside their weights."""

from __future__ import annotations

import torch

from headstart.backends.numba.sums import TILE

_LINE_OF_CACHE = 64
_LARGEST_EXPONENT = 15  # of a float16 scale: smaller ones then keep all their bits


def filled_up(num_bytes: int) -> int:
    """What lies in front of a tile's groups, so that these begin with a line of the cache."""
    return -(-num_bytes // _LINE_OF_CACHE) * _LINE_OF_CACHE


def half_scales(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales [N, groups] as float16 times a power of two for each output [N].

    Those of 16 bits keep their values.
    """
    _, exponents = torch.frexp(scales.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny))
    factors = torch.ldexp(torch.ones(len(scales)), exponents - _LARGEST_EXPONENT)
    return (scales / factors[:, None]).half(), factors


def in_tiles(values: torch.Tensor) -> torch.Tensor:
    """[N, groups] -> [tiles, groups, 32]."""
    return values.view(-1, TILE, values.shape[1]).transpose(1, 2).contiguous()


def out_of_tiles(values: torch.Tensor) -> torch.Tensor:
    """[tiles, groups, 32] -> [N, groups]."""
    return values.transpose(1, 2).reshape(-1, values.shape[1])
