"""Where the slots of a request lie in K/V memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from headstart.models.alike import Places


def slots_of(
    blocks: list[int], size: int, begin: int, end: int,
    numbers: Callable[[Sequence[int]], torch.Tensor],
) -> Places:  # fmt: skip
    """Physical slots of logical ones [begin, end), in blocks of `size`: a slice where it can be."""
    lowest, highest = begin // size, (end - 1) // size
    first = blocks[lowest]
    run = range(first, first + highest - lowest + 1)
    if blocks[highest] == run[-1] and blocks[lowest : highest + 1] == list(run):
        offset = (first - lowest) * size
        return slice(begin + offset, end + offset)
    used = numbers(blocks[lowest : highest + 1])
    slots = (used[:, None] * size + torch.arange(size, device=used.device)).view(-1)
    return slots[begin - lowest * size : end - lowest * size]
