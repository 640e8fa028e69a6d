"""A few rows of a request attend at once, and each gets the bits that it would get alone.

Libraries choose their way by shape. So all products here have shapes that do not depend on how
many rows came: always four rows, some of them blank, over a context that is filled up to a multiple
of 64 slots. What a row must not see counts for exactly nothing. That a row's place among the four
does not matter was measured, not promised: docs/engine.md says on what.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

_ROWS = 4
_STEP = 64
Slots = slice | torch.Tensor  # physical K/V slots: a slice where they are consecutive


@dataclass(frozen=True)
class Part:
    """Up to four rows whose contexts fill up to the same length."""

    rows: slice  # of the request's new rows
    length: int  # of the context, filled up
    seen: tuple[int, ...]  # how much of it each row sees


@dataclass(frozen=True)
class Reach:
    """What the rows of one request see; made once in a pass, for all layers."""

    slots: torch.Tensor  # physical ones, filled up with the last
    parts: list[Part]
    _masks: dict[tuple[int, int, torch.dtype], torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, context: Slots, num_rows: int) -> Reach:
        """The last of `context`'s slots are the rows' own."""
        count = context.stop - context.start if isinstance(context, slice) else len(context)
        first = count - num_rows + 1
        parts: list[Part] = []
        for row in range(num_rows):
            seen, length = first + row, -(-(first + row) // _STEP) * _STEP
            last = parts[-1] if parts else None
            if last is None or last.length != length or len(last.seen) == _ROWS:
                parts.append(Part(slice(row, row + 1), length, (seen,)))
            else:
                parts[-1] = Part(slice(last.rows.start, row + 1), length, (*last.seen, seen))
        return cls(_filled_up(context, parts[-1].length), parts)

    def mask(self, number: int, group: int, like: torch.Tensor) -> torch.Tensor:
        """Additive [1, rows of the product, length] for a part; the blank rows see everything."""
        key = (number, group, like.dtype)
        if key not in self._masks:
            part = self.parts[number]
            seen = torch.tensor([*part.seen, *[part.length] * (_ROWS - len(part.seen))])
            is_hidden = torch.arange(part.length) >= seen[:, None]
            mask = torch.zeros(is_hidden.shape, dtype=like.dtype).masked_fill_(
                is_hidden, -torch.inf
            )
            self._masks[key] = mask.repeat_interleave(group, 0)[None].to(like.device)
        return self._masks[key]


def attend_row_invariant(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, reach: Reach
) -> torch.Tensor:
    """q [rows, heads, dim], caches [slots, kv_heads, dim] -> [rows, heads * dim]."""
    keys, values = (cache.index_select(0, reach.slots) for cache in (k_cache, v_cache))
    if len(reach.parts) == 1:
        return _attend(q, keys, values, reach, 0)
    return torch.cat(
        [_attend(q[part.rows], keys, values, reach, i) for i, part in enumerate(reach.parts)]
    )


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, reach: Reach, number: int
) -> torch.Tensor:
    rows, heads, dim = q.shape
    length, kv_heads = reach.parts[number].length, keys.shape[1]
    group = heads // kv_heads
    if rows < _ROWS:
        q = torch.cat([q, q.new_zeros(_ROWS - rows, heads, dim)])
    queries = q.view(_ROWS, kv_heads, group, dim).transpose(0, 1).reshape(kv_heads, -1, dim)
    scores = torch.baddbmm(
        reach.mask(number, group, q), queries, keys[:length].permute(1, 2, 0), alpha=dim**-0.5
    )
    result = torch.bmm(scores.softmax(-1), values[:length].transpose(0, 1))
    return result.view(kv_heads, _ROWS, -1).transpose(0, 1)[:rows].reshape(rows, -1)


def _filled_up(context: Slots, length: int) -> torch.Tensor:
    """So many slots: the last one again and again, which is finite where the others are."""
    if isinstance(context, slice):
        context = torch.arange(context.start, context.stop)
    return torch.cat([context, context[-1:].expand(length - len(context))])
