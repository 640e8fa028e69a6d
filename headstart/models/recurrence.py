"""What rows of a recurrent layer go on from: a `Recurrence`; here states in slots of an engine.

As with attention, rows of all requests lie one after another. A `StateSpan` says which rows are
one request's, in which slot the state before them lies, and after which rows the state is kept,
and where. A rejected draft is forgotten by going on from the slot of the last accepted row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from headstart.models.delta_config import RecurrentConfig
from headstart.models.delta_rule import Rows, convolve, recur, scan

# Fewer rows than this are faster one by one, and verified rows come to the same bits as single.
_FEW_ROWS = 24


class Recurrence(Protocol):
    """Where the states of one layer are."""

    def convolve(self, rows: torch.Tensor, weight: torch.Tensor, state: int = 0) -> torch.Tensor:
        """rows [T, C], weight [C, n]: each row's channels over its own last n rows.

        `state` numbers what a layer convolves, where it is more than what its mixer reads.
        """
        ...

    def recur(self, rows: Rows) -> torch.Tensor:
        """The rule of these rows over each text's: [T, H, V]."""
        ...


@dataclass(frozen=True)
class StateSpan:
    """One request's rows in a batch."""

    start: int  # first row
    stop: int
    source: int | None  # slot of the state before the first row; None where the text begins
    keeps: tuple[tuple[int, int], ...]  # (rows done, slot), by rows; the last is all of them

    def between(self, first: int, last: int, carry: int) -> StateSpan | None:
        """Its part in rows [first, last) of the batch, counted from there; None if it has none.

        What a later part goes on from lies in slot `carry`.
        """
        start, stop = max(self.start, first), min(self.stop, last)
        if start >= stop:
            return None
        before, done = start - self.start, stop - self.start
        keeps = [(rows - before, slot) for rows, slot in self.keeps if before < rows <= done]
        if stop < self.stop:
            keeps.append((done - before, carry))
        source = self.source if before == 0 else carry
        return StateSpan(start - first, stop - first, source, tuple(keeps))

    def pieces(self) -> list[tuple[slice, list[int]]]:
        """Its rows from one state that is kept to the next, and the slots that keep that."""
        slots: dict[int, list[int]] = {}
        for count, slot in self.keeps:
            assert count > 0, "the state before the first row is kept already"
            slots.setdefault(count, []).append(slot)
        begins = [0, *slots]
        return [
            (slice(self.start + begin, self.start + count), slots[count])
            for begin, count in zip(begins, slots, strict=False)
        ]


def first_rows(spans: Sequence[StateSpan]) -> list[int]:
    """First rows of spans that are computed row by row: what `SlotRecurrence.starts` holds."""
    return [span.start for span in _short(spans)]


def _short(spans: Sequence[StateSpan]) -> list[StateSpan]:
    """Spans of few rows. The longest first: those that still have rows are always the first."""
    few = [span for span in spans if span.stop - span.start < _FEW_ROWS]
    return sorted(few, key=lambda span: span.start - span.stop)


@dataclass(frozen=True)
class LayerStates:
    """States of one layer by slot: conv [slots, n - 1, C], memory [slots, H, K, V].

    `more` are further ones of convolutions, from number 1 on.
    """

    conv: torch.Tensor
    memory: torch.Tensor
    more: tuple[torch.Tensor, ...] = ()


def empty_states(
    config: RecurrentConfig,
    slots: int,
    dtype: torch.dtype,
    device: torch.device,
    more: Sequence[tuple[int, int]] = (),
) -> LayerStates:
    """`more` are rows and channels of further convolutions' states."""
    wide = torch.promote_types(dtype, torch.float32)
    conv = torch.zeros(slots, config.kernel - 1, config.channels, dtype=dtype, device=device)
    shape = (slots, config.v_heads, config.k_dim, config.v_dim)
    memory = torch.zeros(shape, dtype=wide, device=device)
    further = (torch.zeros(slots, *own, dtype=dtype, device=device) for own in more)
    return LayerStates(conv, memory, tuple(further))


@dataclass(frozen=True)
class SlotRecurrence:
    """One layer's states, and the requests whose rows are being run.

    `one_by_one` runs every row in tensors of the same shape, whatever else is in the batch.
    """

    states: LayerStates
    spans: Sequence[StateSpan]
    one_by_one: bool = False
    # `first_rows` on the device. Equal in all layers; made by each of them if they are not given.
    starts: torch.Tensor | None = None

    def convolve(self, rows: torch.Tensor, weight: torch.Tensor, state: int = 0) -> torch.Tensor:
        result = torch.zeros_like(rows)
        conv = self.states.more[state - 1] if state else self.states.conv
        for span in self.spans:
            before = conv.new_zeros(conv.shape[1:]) if span.source is None else conv[span.source]
            own = slice(span.start, span.stop)
            result[own], read = convolve(rows[own], before, weight)
            for done, slot in span.keeps:
                conv[slot] = read[done : done + conv.shape[1]]
        return result

    def recur(self, rows: Rows) -> torch.Tensor:
        result = torch.zeros_like(rows.v)
        if self.one_by_one:
            for span in self.spans:
                self._row_by_row(rows, [span], result, self._numbers([span.start]))
            return result
        if many := [span for span in self.spans if span.stop - span.start >= _FEW_ROWS]:
            self._in_chunks(rows, many, result)
        if few := _short(self.spans):
            starts = self._numbers(first_rows(few)) if self.starts is None else self.starts
            self._row_by_row(rows, few, result, starts)
        return result

    def _numbers(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, device=self.states.memory.device)

    def _before(self, span: StateSpan) -> torch.Tensor:
        memory = self.states.memory
        return memory.new_zeros(memory.shape[1:]) if span.source is None else memory[span.source]

    def _row_by_row(
        self, rows: Rows, spans: list[StateSpan], result: torch.Tensor, starts: torch.Tensor
    ) -> None:
        """The next row of every request at once, until the longest, which is first, is done.

        No numbers go to a device here: a copy would wait for all that the device has to do.
        """
        memory = torch.stack([self._before(span) for span in spans])
        for done in range(spans[0].stop - spans[0].start):
            active = [span for span in spans if span.stop - span.start > done]
            at = starts[: len(active)] + done
            result[at], memory = recur(rows[at], memory[: len(active)])
            for index, span in enumerate(active):
                for count, slot in span.keeps:
                    if count == done + 1:
                        self.states.memory[slot] = memory[index]

    def _in_chunks(self, rows: Rows, spans: list[StateSpan], result: torch.Tensor) -> None:
        """Of every request the rows up to the next state that is kept, until all are done."""
        for span in spans:
            memory = self._before(span)
            for own, slots in span.pieces():
                result[own], memory = scan(rows[own], memory)
                for slot in slots:
                    self.states.memory[slot] = memory
