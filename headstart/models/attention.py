"""What a row attends to: a `Context`; here the paged K/V cache of an engine, in plain PyTorch.

Rows of all requests lie one after another. A `Span` says which rows are one request's, and which
slots of the cache hold its context. Rows write their own K/V first, so a row sees itself.
`models/documents.py` has the contexts without a cache, for training and scoring.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from headstart.models.kv_fp8 import from_kv_fp8, rounded_kv
from headstart.models.row_invariant import Reach, Slots, attend_row_invariant

# The newest token and 16 drafts, the most that an engine makes. More rows come from prompts, where
# one product for all is much faster.
MAX_LONE_ROWS = 17
# In the mask of one product. A long prompt's would be gigabytes, and while those are given back to
# the system no other thread, as a server's event loop, gets memory from it.
_MASK_VALUES = 1 << 23
# Of one context on a GPU, where they do not lie side by side and a library wants them so.
MAX_GATHERED_SLOTS = 1 << 16


class Context(Protocol):
    """Where the keys and values of one layer are."""

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        window: int | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q [T, heads, dim], k and v [T, kv_heads, dim] of the new rows; [T, heads * dim].

        sinks [heads]: a further score of each head, with nothing behind it.
        """
        ...


@dataclass(frozen=True)
class Seen:
    """What the rows of one text see, where a layer keeps entries of its own making."""

    rows: slice  # of the batch
    stored: torch.Tensor  # [n, E]; the last ones are the rows' own
    own: torch.Tensor | None = None  # [C, R, E]: further ones that each row sees alone

    @property
    def num_rows(self) -> int:
        return int(self.rows.stop - self.rows.start)


class EntryContext(Protocol):
    """Where the entries of one layer are; what they mean is the layer's business."""

    def seen(self, new: torch.Tensor) -> list[Seen]:
        """Keep the entries [T, E] of the new rows; what the rows of each text see with them."""
        ...


@dataclass(frozen=True)
class Span:
    """One request's rows in a batch, for one layer geometry."""

    start: int  # first row
    stop: int
    new: Slots  # physical slots that the rows fill
    context: Slots  # physical slots from the first valid one to the last row's

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    @property
    def num_seen(self) -> int:
        """Slots that the last row sees."""
        return _count(self.context)

    @cached_property
    def reach(self) -> Reach:
        """What the rows see, for `attend_row_invariant`; made once in a pass."""
        return Reach.of(self.context, self.num_rows)

    @property
    def first_slot(self) -> int:
        """Of the slots that the rows fill."""
        return self.new.start if isinstance(self.new, slice) else int(self.new[0])

    def by_row(self) -> list[Span]:
        """Each row by itself, seeing the slots up to its own."""
        before = self.num_seen - self.num_rows
        return [
            Span(
                self.start + row,
                self.start + row + 1,
                _part(self.new, row, row + 1),
                _part(self.context, 0, before + row + 1),
            )
            for row in range(self.num_rows)
        ]


def _count(slots: Slots) -> int:
    return slots.stop - slots.start if isinstance(slots, slice) else len(slots)


def _part(slots: Slots, begin: int, end: int) -> Slots:
    if isinstance(slots, slice):
        return slice(slots.start + begin, slots.start + end)
    return slots[begin:end]


@dataclass(frozen=True)
class LayerCache:
    """K and V of one layer, [slots, kv_heads, head_dim] each; or entries [slots, E] and no V.

    sizes [slots, kv_heads, 2] int16: then K and V are words of two 8-bit floats, and these their
    exponents (`models/kv_fp8.py`), in a model that computes in `dtype`. With `rounds` numbers are
    rounded to such floats and held in the model's own type.
    """

    k: torch.Tensor
    v: torch.Tensor
    _: KW_ONLY
    sizes: torch.Tensor | None = None
    dtype: torch.dtype | None = None
    rounds: bool = False

    def keep(self, slots: Slots | int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write what plain modules computed."""
        assert self.sizes is None, "kernels write 8-bit floats"
        self.k[slots] = rounded_kv(k) if self.rounds else k
        self.v[slots] = rounded_kv(v) if self.rounds else v

    def read(self, slots: Slots) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of some slots, in the type that the model computes in."""
        if self.sizes is None:
            return self.k[slots], self.v[slots]
        assert self.dtype is not None
        of_k, of_v = self.sizes[slots].unbind(-1)
        k = from_kv_fp8(self.k[slots], of_k, self.dtype)
        return k, from_kv_fp8(self.v[slots], of_v, self.dtype)


def empty_cache(
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    slots: int,
    dtype: torch.dtype,
    device: torch.device,
) -> LayerCache:
    """Memory for what `ModelConfig.kept` says of a layer."""
    # Zeros, not garbage: a masked NaN would still spoil a product.
    return LayerCache(
        *(torch.zeros((slots, *shape), dtype=dtype, device=device) for shape in shapes)
    )


def empty_fp8_cache(
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    slots: int,
    dtype: torch.dtype,
    device: torch.device,
) -> LayerCache:
    """The same in 8-bit floats, for a model that computes in `dtype`."""
    (heads, dim), (_, v_dim) = shapes
    halves = (heads, dim // 2), (heads, v_dim // 2)
    words = empty_cache(halves, slots, torch.int16, device)
    sizes = torch.zeros(slots, heads, 2, dtype=torch.int16, device=device)
    return LayerCache(words.k, words.v, sizes=sizes, dtype=dtype)


@dataclass(frozen=True)
class PagedContext:
    """One layer's cache, and the requests whose rows are being run.

    With `lone_rows` each of a few rows gets the bits that it would get alone: the library adds in
    another order for two rows than for one.
    """

    cache: LayerCache
    spans: list[Span]
    lone_rows: bool = False

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        window: int | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        for span in self.spans:
            self.cache.keep(span.new, k[span.start : span.stop], v[span.start : span.stop])
        parts = [self._attend(q[s.start : s.stop], s, window, sinks) for s in self.spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend(
        self, q: torch.Tensor, span: Span, window: int | None, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        if not self.lone_rows or span.num_rows > MAX_LONE_ROWS:
            return attend_span(q, self.cache, span, window, sinks)
        if window is None and sinks is None:
            return attend_row_invariant(q, self.cache.k, self.cache.v, span.reach)
        rows = [
            attend_span(q[i : i + 1], self.cache, own, window, sinks)
            for i, own in enumerate(span.by_row())
        ]
        return torch.cat(rows)

    def seen(self, new: torch.Tensor) -> list[Seen]:
        for span in self.spans:
            self.cache.k[span.new] = new[span.start : span.stop]
        spans = self._lone_spans() if self.lone_rows else self.spans
        return [Seen(slice(s.start, s.stop), self.cache.k[s.context]) for s in spans]

    def _lone_spans(self) -> list[Span]:
        return [
            part
            for span in self.spans
            for part in (span.by_row() if span.num_rows <= MAX_LONE_ROWS else [span])
        ]


def attend_chosen(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    allowed: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`attend_rows` over the entries that each row may see: allowed [rows, n]."""
    rows, length = allowed.shape
    step = max(1, _MASK_VALUES // (length if sinks is None else length * len(sinks)))
    if rows <= step:
        return attend_allowed(q, keys, values, allowed, sinks)
    parts = []
    for at in range(0, rows, step):
        own, seen = slice(at, at + step), length - rows + at + step
        near = allowed[own, :seen]
        parts.append(attend_allowed(q[own], keys[:seen], values[:seen], near, sinks))
    return torch.cat(parts)


def attend_allowed(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    allowed: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The same with the whole mask in memory; entries may lie in any order."""
    mask = allowed
    if sinks is not None:  # as in `_attend`
        unseen = torch.zeros_like(allowed, dtype=q.dtype).masked_fill_(~allowed, -torch.inf)
        by_head = sinks.to(q.dtype).view(-1, 1, 1).expand(-1, len(q), 1)
        mask = torch.cat([unseen.expand(len(sinks), -1, -1), by_head], dim=-1)
        keys, values = (
            torch.cat([part, part.new_zeros(1, *part.shape[1:])]) for part in (keys, values)
        )
    shape = (1, q.shape[1], len(keys), -1)
    k, v = (part.transpose(0, 1).unsqueeze(0).expand(shape) for part in (keys, values))
    found = scaled_dot_product_attention(q.transpose(0, 1).unsqueeze(0), k, v, attn_mask=mask)
    return found.squeeze(0).transpose(0, 1)


def attend_span(
    q: torch.Tensor,
    cache: LayerCache,
    span: Span,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one request: [rows, heads * dim]."""
    keys, values = cache.k[span.context], cache.v[span.context]
    return attend_rows(q, keys, values, window, sinks).flatten(1)


def attend_rows(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [rows, heads, dim], the last of keys and values [n, kv_heads, dim] being the rows' own.

    [rows, heads, dim of values]; so many rows at a time that their mask stays small.
    """
    rows, heads, _ = q.shape
    length, kv_heads, _ = keys.shape
    step = max(1, _MASK_VALUES // (length * (heads // kv_heads)))
    if rows <= step:
        return _attend(q, keys, values, window, sinks)
    parts = []
    for at in range(0, rows, step):
        seen = length - rows + at + step  # more than there are, for the last
        parts.append(_attend(q[at : at + step], keys[:seen], values[:seen], window, sinks))
    return torch.cat(parts)


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    window: int | None,
    sinks: torch.Tensor | None,
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
    if sinks is not None:  # one more key, whose score is the sink's and whose value is nothing
        keys, values = (
            torch.cat([part, part.new_zeros(1, *part.shape[1:])]) for part in (keys, values)
        )
        seen = q.new_zeros(rows, length) if mask is None else mask
        by_head = sinks.to(q.dtype).view(1, kv_heads, group, 1, 1).expand(-1, -1, -1, rows, -1)
        mask = torch.cat([seen.expand(1, kv_heads, group, rows, length), by_head], dim=-1)
        mask = mask.flatten(2, 3)
    elif mask is not None:
        mask = mask.expand(group, rows, length).reshape(1, group * rows, length)
    result = scaled_dot_product_attention(
        grouped.reshape(1, kv_heads, group * rows, dim),
        keys.transpose(0, 1).unsqueeze(0),
        values.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
    )
    return result.view(kv_heads, group, rows, -1).permute(2, 0, 1, 3).reshape(rows, heads, -1)


def _mask(rows: int, length: int, window: int | None, like: torch.Tensor) -> torch.Tensor:
    """Additive [rows, length]: a row sees all but the rows after it; with a window, near ones."""
    slots = torch.arange(length, device=like.device)
    last = torch.arange(length - rows, length, device=like.device)[:, None]
    allowed = slots <= last
    if window is not None:
        allowed &= slots > last - window
    mask = torch.zeros(rows, length, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(~allowed, float("-inf"))
