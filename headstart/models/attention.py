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

from headstart.models.kv_fp8 import from_kv_fp8, rounded_kv
from headstart.models.row_attention import attend_rows
from headstart.models.row_invariant import Reach, Slots, attend_row_invariant

# The newest token and 16 drafts, the most that an engine makes. More rows come from prompts, where
# one product for all is much faster.
MAX_LONE_ROWS = 17
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
