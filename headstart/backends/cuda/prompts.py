"""Rows of prompts, and of anything else that is ragged: as many of each request as it has.

The new keys and values are in the cache by the time a row attends.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headstart.backends.cuda.exact import ExactKernels
from headstart.backends.cuda.forward import Rows
from headstart.backends.cuda.kernels.prompts import prompt_attention, tiles_of
from headstart.backends.cuda.libraries import Library
from headstart.backends.cuda.transfer import on_device
from headstart.models.attention import LayerCache, Slots, Span


def ragged_rows(spans: Sequence[Span], positions: Tensor, library: Library | None = None) -> Rows:
    """Rows of one pass over `spans`, which follow one another without gaps.

    Long prompts go to the library, if there is one; the others to our kernel, in one launch.
    """
    device = positions.device
    places = torch.cat([as_tensor(span.new, device) for span in spans])
    contexts = [as_tensor(span.context, device) for span in spans]
    context = torch.cat(contexts).to(torch.int32)
    queries = [span.num_rows for span in spans]
    lengths = [len(part) for part in contexts]
    row_edges, context_edges = (
        on_device([0, *accumulate(counts)], device, torch.int32) for counts in (queries, lengths)
    )
    long = [] if library is None else [span for span in spans if library.takes(span)]

    def tiles_of_rows(counts: Sequence[int]) -> Tensor:
        starts = [number for pair in tiles_of(counts) for number in pair]
        return on_device(starts, device, torch.int32).view(-1, 2)

    firsts = {span.start for span in long}
    tiles = tiles_of_rows([0 if span.start in firsts else span.num_rows for span in spans])

    def attend(q: Tensor, cache: LayerCache) -> Tensor:
        ready = [] if library is None else library.run(long, q, cache)
        if len(ready) == len(spans) == 1:
            return ready[0].flatten(1)
        result = torch.empty_like(q)
        own = tiles if len(ready) == len(long) else tiles_of_rows(queries)
        if own.shape[0]:
            prompt_attention(
                q, cache.k, cache.v, context, own, row_edges, context_edges, into=result
            )
        for span, rows in zip(long, ready, strict=False):
            result[span.start : span.stop] = rows
        return result.flatten(1)

    return Rows(positions, places.to(torch.int32), attend)


def filling_rows(spans: Sequence[Span], positions: Tensor) -> Rows:
    """The same where keys and values are all that is wanted."""
    places = torch.cat([as_tensor(span.new, positions.device) for span in spans])

    def attend(q: Tensor, cache: LayerCache) -> Tensor:
        raise AssertionError("rows that fill the cache do not attend")

    return Rows(positions, places.to(torch.int32), attend)


def exact_rows(
    spans: Sequence[Span], positions: Tensor, kernels: ExactKernels, block_size: int
) -> Rows:
    """The same with each row by itself, for a trunk: its position is its slot."""
    device = positions.device
    places = torch.cat([as_tensor(span.new, device) for span in spans])
    blocks = [as_tensor(span.context, device)[::block_size] // block_size for span in spans]
    tables = pad_sequence(blocks, batch_first=True).to(torch.int32)
    owners = [index for index, span in enumerate(spans) for _ in range(span.num_rows)]
    attend = kernels.by_row(
        tables[on_device(owners, device)], positions.to(torch.int32), block_size
    )
    return Rows(positions, places.to(torch.int32), attend)


def as_tensor(slots: Slots, device: torch.device) -> Tensor:
    if isinstance(slots, slice):
        return torch.arange(slots.start, slots.stop, device=device)
    return slots
