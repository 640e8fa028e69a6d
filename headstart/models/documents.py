"""Whole documents in one batch: rows one after another, attention inside each document only.

Training and scoring run texts that are known from end to end, so nothing is cached. A `Passage`
is a causal pass over all rows; a `Chain` is what a head sees when it goes on from each row by
itself: the passage up to that row, and the entries of that row's own chain.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from headstart.models.attention import Seen
from headstart.models.delta_rule import Rows, convolve, scan
from headstart.models.ragged import causal_attention, chained_attention


@dataclass(frozen=True)
class Documents:
    """Lengths of the documents whose rows lie one after another."""

    lengths: tuple[int, ...]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        starts, total = [], 0
        for length in self.lengths:
            starts.append(total)
            total += length
        return tuple(starts)

    @property
    def slices(self) -> list[slice]:
        """The rows of each document."""
        return [slice(at, at + n) for at, n in zip(self.starts, self.lengths, strict=True)]

    @property
    def num_rows(self) -> int:
        return sum(self.lengths)

    def positions(self, device: torch.device) -> torch.Tensor:
        """[T] places of the rows in their own documents, from 0."""
        return _positions(self.lengths, device)

    def tokens_left(self, device: torch.device) -> torch.Tensor:
        """[T] how many rows of the same document come after each row."""
        return _tokens_left(self.lengths, device)

    def ahead(self, rows: torch.Tensor, depth: int) -> torch.Tensor:
        """rows [T, ...] moved up: row t gets row t + depth of its document, zeros past its end.

        A plain shift would carry the start of the next document into this one.
        """
        moved = torch.zeros_like(rows)
        moved[: max(0, rows.shape[0] - depth)] = rows[depth:]
        outside = self.tokens_left(rows.device) < depth
        return moved.masked_fill(outside.view(-1, *[1] * (rows.dim() - 1)), 0)


# Every layer and depth asks, and the host waits for every copy to a device. Never written to.
# Made in any mode, so that they can be used in any.
@lru_cache(4)
@torch.inference_mode(False)
def _positions(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    parts = [torch.arange(length) for length in lengths]
    return torch.cat([torch.arange(0), *parts]).to(device)


@lru_cache(4)
@torch.inference_mode(False)
def _tokens_left(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    parts = [torch.arange(length - 1, -1, -1) for length in lengths]
    return torch.cat([torch.arange(0), *parts]).to(device)


class Passage:
    """A causal pass over all rows of all documents; keeps the keys and values it saw last.

    rows [N], ascending: the only ones for which `attend` says what they see.
    """

    def __init__(self, documents: Documents, rows: torch.Tensor | None = None):
        self.documents, self._rows = documents, rows
        self.k: torch.Tensor | None = None
        self.v: torch.Tensor | None = None
        self.entries: torch.Tensor | None = None

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        window: int | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.k, self.v = k, v
        return causal_attention(
            q, k, v, self.documents.lengths, window, sinks, rows=self._rows
        ).flatten(1)

    def seen(self, new: torch.Tensor) -> list[Seen]:
        self.entries = new
        return [Seen(rows, new[rows]) for rows in self.documents.slices]

    def convolve(self, rows: torch.Tensor, weight: torch.Tensor, state: int = 0) -> torch.Tensor:
        before = rows.new_zeros(weight.shape[1] - 1, rows.shape[1])
        parts = torch.split(rows, list(self.documents.lengths))
        return torch.cat([convolve(part, before, weight)[0] for part in parts])

    def recur(self, rows: Rows) -> torch.Tensor:
        memory = rows.v.new_zeros(*rows.k.shape[1:], rows.v.shape[-1])
        return torch.cat([scan(rows[own], memory)[0] for own in self.documents.slices])


class Chain:
    """Row t sees the passage's rows up to t, and the entries that its own chain made since.

    rows [N]: the only ones of the passage's that go on; what is attended with has these N rows.
    """

    def __init__(self, passage: Passage, rows: torch.Tensor | None = None):
        self._passage, self._rows = passage, rows
        self._own: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._own_entries: list[torch.Tensor] = []

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        window: int | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert self._passage.k is not None and self._passage.v is not None
        self._own.append((k, v))
        return chained_attention(
            q, self._passage.k, self._passage.v,
            torch.stack([key for key, _ in self._own]),
            torch.stack([value for _, value in self._own]),
            self._passage.documents.lengths, window, sinks, rows=self._rows,
        ).flatten(1)  # fmt: skip

    def seen(self, new: torch.Tensor) -> list[Seen]:
        known = self._passage.entries
        assert known is not None and self._rows is None
        self._own_entries.append(new)
        own = torch.stack(self._own_entries)
        return [Seen(rows, known[rows], own[:, rows]) for rows in self._passage.documents.slices]
