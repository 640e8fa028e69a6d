"""Rows of prompts in layers with latent attention, and of anything else that is ragged.

The latents of a prompt's context are unfolded into keys and values, for all rows at once, and the
rows attend as in other models. A few heads at a time where it would be too much memory. A few rows
of a request, each by itself, are compared with the latents as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from headstart.gpu.forward import Rows
from headstart.gpu.latent import LatentAttend, paged_latent
from headstart.gpu.libraries import Library
from headstart.gpu.prompts import as_tensor, attend_ragged, filling_rows
from headstart.gpu.transfer import on_device
from headstart.models.attention import LayerCache, Span
from headstart.models.mla import LatentAttention

MOST_UNFOLDED = 1 << 27  # numbers of the keys of a pass, and as many of its values
_FEW_ROWS = 16  # of a request


def latent_rows(spans: Sequence[Span], positions: Tensor, library: Library | None = None) -> Rows:
    """`ragged_rows` for latent attention."""
    few = [span for span in spans if span.num_rows <= _FEW_ROWS]
    many = [span for span in spans if span.num_rows > _FEW_ROWS]
    rows = filling_rows(spans, positions)
    if not few or not many:
        whole = _folded(few, positions.device) if few else _unfolding(many, positions, library)
        return replace(rows, latent=whole)
    parts = [
        (_rows_of(few, positions.device), _folded(few, positions.device)),
        (_rows_of(many, positions.device), _unfolding(many, positions, library)),
    ]

    def attend(attention: LatentAttention, q: Tensor, cache: LayerCache) -> Tensor:
        result = q.new_empty(q.shape[0], attention.heads * attention.config.v_dim)
        for own, part in parts:
            result[own] = part(attention, q[own], cache)
        return result

    return replace(rows, latent=attend)


def _folded(spans: Sequence[Span], device: torch.device) -> LatentAttend:
    """Each row a request of its own, whose blocks have one slot."""
    contexts = [as_tensor(span.context, device) for span in spans]
    tables = pad_sequence(contexts, batch_first=True).to(torch.int32)
    owners = [index for index, span in enumerate(spans) for _ in range(span.num_rows)]
    last = [slot for span in spans for slot in range(span.num_seen - span.num_rows, span.num_seen)]
    return paged_latent(
        tables[on_device(owners, device)], on_device(last, device, torch.int32), 1, block_size=1,
        max_context=tables.shape[1], first_slot=0,
    )  # fmt: skip


def _unfolding(spans: Sequence[Span], positions: Tensor, library: Library | None) -> LatentAttend:
    """All contexts one after another, and attention over that."""
    device = positions.device
    context = torch.cat([as_tensor(span.context, device) for span in spans])
    edges = [0, *accumulate(span.num_seen for span in spans)]
    starts = [0, *accumulate(span.num_rows for span in spans)]
    moved = [
        Span(start, stop, slice(end - (stop - start), end), slice(begin, end))
        for start, stop, begin, end in zip(starts, starts[1:], edges, edges[1:], strict=False)
    ]
    inner = attend_ragged(moved, device, library)

    def attend(attention: LatentAttention, q: Tensor, cache: LayerCache) -> Tensor:
        config = attention.config
        q = _scaled(q, config.scale, config.unfolded_dim)
        entries = cache.k[context]
        each = heads_at_once(attention.heads, len(entries), config.unfolded_dim)
        parts = []
        for first in range(0, attention.heads, each):
            heads = slice(first, first + each)
            unfolded = LayerCache(*attention.unfold(entries, heads))
            own = inner(q[:, heads].contiguous(), unfolded)
            parts.append(own.view(q.shape[0], -1, config.unfolded_dim)[..., : config.v_dim])
        return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).flatten(1)

    return attend


def heads_at_once(heads: int, entries: int, dim: int) -> int:
    """Heads whose keys and values are unfolded together."""
    return min(heads, max(1, MOST_UNFOLDED // (entries * dim)))


def _scaled(q: Tensor, scale: float, dim: int) -> Tensor:
    """As whoever attends wants them: of the size of keys, scores to be divided by its root."""
    factor = scale * dim**0.5
    q = q if abs(factor - 1) < 1e-6 else q * factor
    return q if q.shape[-1] == dim else pad(q, (0, dim - q.shape[-1]))


def _rows_of(spans: Sequence[Span], device: torch.device) -> Tensor:
    return on_device([row for span in spans for row in range(span.start, span.stop)], device)
