"""Rows of prompts, and of anything else that is ragged: attention by a library's kernel.

The new keys and values are in the cache by the time a row attends; each request's context is
gathered from its blocks and handed to flash attention, which takes documents of any length.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from headstart.gpu.forward import Rows
from headstart.gpu.transfer import on_device
from headstart.models.attention import LayerCache, Places, Span, attend_span


def ragged_rows(spans: Sequence[Span], positions: Tensor) -> Rows:
    """Rows of one pass over `spans`, which follow one another without gaps."""
    device = positions.device
    places = torch.cat([_as_tensor(span.new, device) for span in spans])
    contexts = [_as_tensor(span.context, device) for span in spans]
    context = torch.cat(contexts)
    queries = [span.num_rows for span in spans]
    lengths = [len(part) for part in contexts]

    def attend(q: Tensor, cache: LayerCache) -> Tensor:
        if q.dtype not in (torch.bfloat16, torch.float16):
            parts = [attend_span(q[s.start : s.stop], cache, s) for s in spans]
            return torch.cat(parts)
        return _flash(q, cache.k[context], cache.v[context], edges, max(queries), max(lengths))

    edges = tuple(
        on_device([0, *accumulate(counts)], device, torch.int32) for counts in (queries, lengths)
    )
    return Rows(positions, places.to(torch.int32), attend)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, edges: tuple[Tensor, ...], max_rows: int, max_context: int
) -> Tensor:
    """Causal from the end: the last row of a request sees all of its context."""
    result: Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, edges[0], edges[1], max_rows, max_context, 0.0, True, False
    )[0]
    return result.flatten(1)


def _as_tensor(places: Places, device: torch.device) -> Tensor:
    if isinstance(places, slice):
        return torch.arange(places.start, places.stop, device=device)
    return places
