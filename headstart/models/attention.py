"""What a row attends to: a `Context`; here the paged K/V cache of an engine, in plain PyTorch.

Rows of all requests lie one after another. A `Span` says which rows are one request's, and which
slots of the cache hold its context. Rows write their own K/V first, so a row sees itself.
`models/documents.py` has the contexts without a cache, for training and scoring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

# The newest token and 16 drafts, the most that an engine makes. More rows come from prompts, where
# one product for all is much faster.
MAX_LONE_ROWS = 17
# In the mask of one product. A long prompt's would be gigabytes, and while those are given back to
# the system no other thread, as a server's event loop, gets memory from it.
_MASK_VALUES = 1 << 23
Places = slice | torch.Tensor  # physical slots: a slice where they are consecutive


class Context(Protocol):
    """Where the keys and values of one layer are."""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        """q [T, heads, dim], k and v [T, kv_heads, dim] of the new rows; [T, heads * dim]."""
        ...


@dataclass(frozen=True)
class Span:
    """One request's rows in a batch, for one layer geometry."""

    start: int  # first row
    stop: int
    new: Places  # physical slots that the rows fill
    context: Places  # physical slots from the first valid one to the last row's

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    @property
    def first_slot(self) -> int:
        """Of the slots that the rows fill."""
        return self.new.start if isinstance(self.new, slice) else int(self.new[0])

    def by_row(self) -> list[Span]:
        """Each row by itself, seeing the slots up to its own."""
        before = _count(self.context) - self.num_rows
        return [
            Span(
                self.start + row,
                self.start + row + 1,
                _part(self.new, row, row + 1),
                _part(self.context, 0, before + row + 1),
            )
            for row in range(self.num_rows)
        ]


def _count(places: Places) -> int:
    return places.stop - places.start if isinstance(places, slice) else len(places)


def _part(places: Places, begin: int, end: int) -> Places:
    if isinstance(places, slice):
        return slice(places.start + begin, places.start + end)
    return places[begin:end]


@dataclass(frozen=True)
class LayerCache:
    """K and V of one layer, [slots, kv_heads, head_dim] each."""

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True)
class PagedContext:
    """One layer's cache, and the requests whose rows are being run.

    With `lone_rows` each of a few rows attends as if it came alone: the library adds in another
    order for two rows than for one.
    """

    cache: LayerCache
    spans: list[Span]
    lone_rows: bool = False

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        for span in self.spans:
            self.cache.k[span.new] = k[span.start : span.stop]
            self.cache.v[span.new] = v[span.start : span.stop]
        spans = self._lone_spans() if self.lone_rows else self.spans
        if len(spans) == 1:
            return attend_span(q, self.cache, spans[0], window)
        parts = [attend_span(q[s.start : s.stop], self.cache, s, window) for s in spans]
        return torch.cat(parts)

    def _lone_spans(self) -> list[Span]:
        return [
            part
            for span in self.spans
            for part in (span.by_row() if span.num_rows <= MAX_LONE_ROWS else [span])
        ]


def attend_span(
    q: torch.Tensor, cache: LayerCache, span: Span, window: int | None = None
) -> torch.Tensor:
    """Attention of one request, so many rows at a time that their mask stays small."""
    rows, heads, _ = q.shape
    keys, values = cache.k[span.context], cache.v[span.context]
    length, kv_heads, _ = keys.shape
    step = max(1, _MASK_VALUES // (length * (heads // kv_heads)))
    if rows <= step:
        return _attend(q, keys, values, window)
    parts = []
    for at in range(0, rows, step):
        seen = length - rows + at + step  # more than there are, for the last
        parts.append(_attend(q[at : at + step], keys[:seen], values[:seen], window))
    return torch.cat(parts)


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None
) -> torch.Tensor:
    """The last keys are the rows' own. Heads that share a K/V head are rows of one product."""
    rows, heads, dim = q.shape
    length, kv_heads, _ = keys.shape
    if window is not None and length > window + rows - 1:
        cut = length - (window + rows - 1)
        keys, values, length = keys[cut:], values[cut:], length - cut
    group = heads // kv_heads
    grouped = q.view(rows, kv_heads, group, dim).permute(1, 2, 0, 3)
    mask = _mask(rows, length, window, q) if rows > 1 else None
    if mask is not None:
        mask = mask.expand(group, rows, length).reshape(1, group * rows, length)
    result = scaled_dot_product_attention(
        grouped.reshape(1, kv_heads, group * rows, dim),
        keys.transpose(0, 1).unsqueeze(0),
        values.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
    )
    return result.view(kv_heads, group, rows, dim).permute(2, 0, 1, 3).reshape(rows, heads * dim)


def _mask(rows: int, length: int, window: int | None, like: torch.Tensor) -> torch.Tensor:
    """Additive [rows, length]: a row sees all but the rows after it; with a window, near ones."""
    slots = torch.arange(length, device=like.device)
    last = torch.arange(length - rows, length, device=like.device)[:, None]
    allowed = slots <= last
    if window is not None:
        allowed &= slots > last - window
    mask = torch.zeros(rows, length, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(~allowed, float("-inf"))
