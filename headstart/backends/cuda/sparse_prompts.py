"""Rows of prompts that see more entries than an indexer chooses: scored, chosen and seen in parts.

Rows are taken together in groups, which read an index key once. So many rows at a time that their
scores stay small; every row then attends to what it chose, compared with the latents themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from headstart.backends.cuda.kernels.index_choice import Texts
from headstart.backends.cuda.latent import LatentAttend, Queries, attend_latents
from headstart.backends.cuda.sparse import Choices, IndexQueries
from headstart.backends.rows import on_device
from headstart.models.attention import LayerCache, Span
from headstart.models.row_invariant import Slots

MOST_ROWS = 256  # at a time
_GROUP = 16  # rows


@dataclass(frozen=True)
class _Part:
    """Some rows of one prompt, `texts.rows` to a group; what they chose."""

    rows: Tensor  # among those of all prompts
    texts: Texts
    choices: Choices


def index_bytes(max_len: int, max_rows: int, top_k: int) -> int:
    """Scores of rows at a time, and what all rows of a pass have chosen."""
    return 4 * (MOST_ROWS * max_len + max_rows * top_k)


def choosing(spans: Sequence[Span], top_k: int, device: torch.device) -> LatentAttend:
    """How the rows of these spans attend, which lie one after another."""
    parts = list[_Part]()
    first = 0
    for span in spans:
        context = as_tensor(span.context, device).to(torch.int32)
        before = span.num_seen - span.num_rows
        for at in range(0, span.num_rows, MOST_ROWS):
            end = min(at + MOST_ROWS, span.num_rows)
            seen = on_device(range(before + at, before + end, _GROUP), device, torch.int32)
            tables = context.expand(len(seen), -1)
            texts = Texts(tables, seen, _GROUP, 1, before + end)
            rows = torch.arange(first + at, first + end, device=device)
            parts.append(_Part(rows, texts, Choices()))
        first += span.num_rows

    def attend(queries: Queries, cache: LayerCache) -> Tensor:
        width = queries.attention.heads * queries.attention.config.v_dim
        result = cache.k.new_empty(first, width)
        for part in parts:
            own, count = queries.of(part.rows), len(part.rows)
            index = None if own.index is None else _filled(own.index)
            chosen = part.choices.of(index, cache.v, part.texts, top_k, count)
            result[part.rows] = attend_latents(own, cache, chosen)
        return result

    return attend


def _filled(index: IndexQueries) -> IndexQueries:
    """With blank rows up to whole groups."""
    missing = -len(index.q) % _GROUP
    return IndexQueries(
        pad(index.q, (0, 0, 0, 0, 0, missing)), pad(index.weights, (0, 0, 0, missing))
    )


def as_tensor(slots: Slots, device: torch.device) -> Tensor:
    if isinstance(slots, slice):
        return torch.arange(slots.start, slots.stop, device=device)
    return slots
