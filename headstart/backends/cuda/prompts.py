"""Rows of prompts, and of anything else that is ragged: as many of each request as it has.

The new keys and values are in the cache by the time a row attends. With latent attention the
latents of a prompt's context are unfolded into keys and values once, for all of its rows; some
heads at a time where all of them would be too much memory. A few rows of a request, each by itself,
are compared with the latents as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headstart.backends.cuda.attending import Sight
from headstart.backends.cuda.exact import ExactKernels
from headstart.backends.cuda.forward import Rows
from headstart.backends.cuda.kernels.latent_prompts import prompt_latents
from headstart.backends.cuda.kernels.prompts import prompt_attention, tiles_of
from headstart.backends.cuda.latent import LatentAttend, Queries, paged_latent
from headstart.backends.cuda.libraries import Library
from headstart.backends.cuda.sparse_prompts import as_tensor, choosing
from headstart.backends.rows import on_device
from headstart.models.attention import MAX_LONE_ROWS, LayerCache, Span
from headstart.models.mla_config import MOST_UNFOLDED


def ragged_rows(spans: Sequence[Span], positions: Tensor, library: Library | None = None) -> Rows:
    """Rows of one pass over `spans`, which follow one another without gaps.

    Long prompts go to the library, if there is one; the others to our kernel, in one launch.
    """
    device = positions.device
    kv_slots = torch.cat([as_tensor(span.new, device) for span in spans])
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

    def attend(q: Tensor, cache: LayerCache, sight: Sight) -> Tensor:
        is_usual = sight.is_plain and cache.k.shape == cache.v.shape
        ready = [] if library is None or not is_usual else library.run(long, q, cache)
        if len(ready) == len(spans) == 1:
            return ready[0].flatten(1)
        v_dim = q.shape[2] if cache.sizes is not None else cache.v.shape[2]
        result = q.new_empty(*q.shape[:2], v_dim)
        own = tiles if len(ready) == len(long) else tiles_of_rows(queries)
        if own.shape[0]:
            prompt_attention(
                q, cache.k, cache.v, context, own, row_edges, context_edges, into=result,
                sizes=cache.sizes, window=sight.window, sinks=sight.sinks,
            )  # fmt: skip
        for span, rows in zip(long, ready, strict=False):
            result[span.start : span.stop] = rows
        return result.flatten(1)

    return Rows(positions, kv_slots.to(torch.int32), attend)


def filling_rows(spans: Sequence[Span], positions: Tensor) -> Rows:
    """The same where keys and values are all that is wanted."""
    kv_slots = torch.cat([as_tensor(span.new, positions.device) for span in spans])

    def attend(q: Tensor, cache: LayerCache, sight: Sight) -> Tensor:
        raise AssertionError("rows that fill the cache do not attend")

    return Rows(positions, kv_slots.to(torch.int32), attend)


def exact_rows(
    spans: Sequence[Span], positions: Tensor, kernels: ExactKernels, block_size: int
) -> Rows:
    """The same with each row by itself, for a trunk: its position is its slot."""
    device = positions.device
    kv_slots = torch.cat([as_tensor(span.new, device) for span in spans])
    blocks = [as_tensor(span.context, device)[::block_size] // block_size for span in spans]
    tables = pad_sequence(blocks, batch_first=True).to(torch.int32)
    owners = [index for index, span in enumerate(spans) for _ in range(span.num_rows)]
    by_row = tables[on_device(owners, device)], positions.to(torch.int32), block_size
    return Rows(
        positions, kv_slots.to(torch.int32), kernels.by_row(*by_row),
        latent=kernels.latent_by_row(*by_row),
    )  # fmt: skip


def latent_rows(spans: Sequence[Span], positions: Tensor, top_k: int | None = None) -> Rows:
    """`ragged_rows` for latent attention; top_k: entries that a row sees by an indexer's choice."""
    device = positions.device
    few = [span for span in spans if span.num_rows <= MAX_LONE_ROWS]
    many = [span for span in spans if span.num_rows > MAX_LONE_ROWS]
    most = max(span.num_seen for span in spans) if top_k is None else top_k
    whole = [span for span in many if span.num_seen <= most]
    long = [span for span in many if span.num_seen > most]
    rows = filling_rows(spans, positions)
    attends = [
        (few, _folded(few, device) if few else None),
        (whole, _unfolding(whole, device) if whole else None),
        (long, choosing(long, most, device) if long else None),
    ]
    parts = [(_rows_of(own, device), part) for own, part in attends if part is not None]
    if len(parts) == 1:
        return replace(rows, latent=parts[0][1])

    def attend(queries: Queries, cache: LayerCache) -> Tensor:
        width = queries.attention.heads * queries.attention.config.v_dim
        result = cache.k.new_empty(positions.shape[0], width)
        for own, part in parts:
            result[own] = part(queries.of(own), cache)
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


def _unfolding(spans: Sequence[Span], device: torch.device) -> LatentAttend:
    """All contexts one after another, unfolded; and attention over that."""
    context = torch.cat([as_tensor(span.context, device) for span in spans])
    queries = [span.num_rows for span in spans]
    row_edges, context_edges = (
        on_device([0, *accumulate(counts)], device, torch.int32)
        for counts in (queries, [span.num_seen for span in spans])
    )
    starts = [number for pair in tiles_of(queries) for number in pair]
    tiles = on_device(starts, device, torch.int32).view(-1, 2)

    def attend(queries: Queries, cache: LayerCache) -> Tensor:
        attention, config = queries.attention, queries.attention.config
        q, ups, entries = queries.finished(cache.k.dtype), attention.ups, cache.k[context]
        latents = entries[:, : config.kv_rank]
        result = q.new_empty(*q.shape[:2], config.v_dim)
        each = heads_at_once(attention.heads, len(entries), ups.shape[1])
        for first in range(0, attention.heads, each):
            some = ups[first : first + each]
            unfolded = torch.mm(latents, some.flatten(0, 1).t()).view(len(entries), *some.shape[:2])
            prompt_latents(
                q, unfolded, entries, tiles, row_edges, context_edges, result, scale=config.scale,
                first_head=first,
            )  # fmt: skip
            del unfolded  # before there are more: memory is planned for one of them
        return result.flatten(1)

    return attend


def heads_at_once(heads: int, entries: int, each: int) -> int:
    """Heads that are unfolded together, `each` numbers per entry."""
    return min(heads, max(1, MOST_UNFOLDED // (entries * each)))


def _rows_of(spans: Sequence[Span], device: torch.device) -> Tensor:
    return on_device([row for span in spans for row in range(span.start, span.stop)], device)
