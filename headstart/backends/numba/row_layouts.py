"""Where the rows of a pass go and what they see: from the blocks of requests to what kernels read.

A module of a head has no entry in its first slots. The slots that a text's rows can see begin
behind those, and so do positions: a row's own slot is the last that it sees, its position the
number of those before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from headstart.backends.numba.layers import runs
from headstart.backends.numba.passes import ROWS_PER_ITEM, SPAN, RowLayout
from headstart.backends.rows import HeadRows, StateRows, TrunkRows

_NO_STATES = np.empty((0, SPAN), np.int64), np.empty((0, 2), np.int64)


def slot_numbers(blocks: Sequence[int], size: int, begin: int, end: int) -> np.ndarray:
    """Physical slots of logical ones [begin, end), in blocks of `size`."""
    lowest = begin // size
    used = np.array(blocks[lowest : -(-end // size)])
    slots = (used[:, None] * size + np.arange(size)).ravel()
    return slots[begin - lowest * size : end - lowest * size]


@dataclass(frozen=True)
class TextRows:
    """One text's rows in a pass, and how many rows of drafts come later."""

    count: int
    slots: np.ndarray  # all that the last row sees, then those of later rows
    later: int = 0

    @classmethod
    def of(
        cls, rows: TrunkRows | HeadRows, block_size: int, *, first: int = 0, later: int = 0
    ) -> TextRows:
        """Of a text that is seen from slot `first` on."""
        count = len(rows.tokens)
        end = rows.start + count + later
        return cls(count, slot_numbers(rows.blocks, block_size, first, end), later)

    @property
    def num_seen(self) -> int:
        return len(self.slots) - self.later


def layout_of(texts: Sequence[TextRows], states: Sequence[StateRows | None] = ()) -> RowLayout:
    """The layout of a pass; `states` by text, of a model with recurrent layers."""
    positions: list[int] = []
    begins: list[int] = []
    ends: list[int] = []
    firsts: list[int] = []
    lasts: list[int] = []
    begin = row = 0
    for text in texts:
        seen, count = text.num_seen, text.count
        positions += range(seen - count, seen)
        begins += [begin] * count
        ends += range(begin + seen - count + 1, begin + seen + 1)
        stop = row + count
        together = range(row, stop, ROWS_PER_ITEM)
        firsts += together
        lasts += [min(first + ROWS_PER_ITEM, stop) for first in together]
        begin, row = begin + len(text.slots), stop
    kv_slots = joined([text.slots for text in texts])
    return RowLayout(
        np.array(positions),
        joined([text.slots[text.num_seen - text.count : text.num_seen] for text in texts]),
        kv_slots, runs(kv_slots),
        np.array(begins), np.array(ends), np.array(firsts), np.array(lasts),
        *_states(texts, states),
    )  # fmt: skip


def later_layout(texts: Sequence[TextRows], first: RowLayout) -> RowLayout:
    """The second pass of texts that draft, each with a row, and the slots of all further ones
    [passes, texts]; `first` is the layout of the first pass. Texts with most drafts come first.
    """
    count = len(texts)
    slots = np.zeros((texts[0].later, count), np.int64)
    for number, text in enumerate(texts):
        slots[: text.later, number] = text.slots[text.num_seen :]
    positions = np.array([text.num_seen for text in texts])
    begins = np.array([0, *accumulate(len(text.slots) for text in texts[:-1])])
    return RowLayout(
        positions, slots, first.kv_slots, first.runs, begins, begins + positions + 1,
        np.arange(count), np.arange(1, count + 1), *_NO_STATES,
    )  # fmt: skip


def joined(parts: list[np.ndarray]) -> np.ndarray:
    """One behind another; a single one as it is."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _states(
    texts: Sequence[TextRows], states: Sequence[StateRows | None]
) -> tuple[np.ndarray, np.ndarray]:
    """Spans and keeps of a layout."""
    if not any(states):
        return _NO_STATES
    spans: list[tuple[int, ...]] = []
    keeps: list[tuple[int, int]] = []
    row = 0
    for text, own in zip(texts, states, strict=True):
        assert own is not None
        source = -1 if own.source is None else own.source
        spans.append((row, row + text.count, source, len(keeps), len(own.keeps)))
        keeps += own.keeps
        row += text.count
    return np.array(spans, np.int64), np.array(keeps, np.int64).reshape(-1, 2)
