"""Rows of a forward pass: which tokens of which requests, and where their K/V lies.

The engine describes each request's part in ints (`TrunkRows`, `HeadRows`); a backend runs all of
them as one flat batch (`TrunkBatch`, `HeadBatch`). Slots of a request that lie in consecutive
blocks are addressed as a slice, others through a list; the result is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from headstart.models.attention import Span
from headstart.models.recurrence import StateSpan
from headstart.models.row_invariant import Slots

ToDevice = Callable[[Sequence[int]], torch.Tensor]
_SPREAD = 0x9E3779B1  # numbers times this, as fractions of 2^32, lie evenly
# Of a trunk pass: per request the states that feed its head, and all wanted logits.
TrunkOutput = tuple[list[torch.Tensor], torch.Tensor]


def blank_tokens(count: int, vocab: int, first: int = 0) -> list[int]:
    """Tokens of requests that only take time: from number `first` on, each another.

    Rows that are alike would all go to the same experts, which is less to read than rows of texts
    have.
    """
    return [((number * _SPREAD) % 2**32) * vocab >> 32 for number in range(first, first + count)]


@dataclass(frozen=True)
class StateRows:
    """Where one request's recurrent states come from and go to; counts are rows of the pass."""

    source: int | None  # slot of the state before the first row; None where the text begins
    chain: tuple[tuple[int, int], ...]  # (rows done, slot): where the request may go on from
    snapshots: tuple[tuple[int, int], ...] = ()  # the same, at ends of blocks

    @property
    def keeps(self) -> tuple[tuple[int, int], ...]:
        """All slots that are written, by rows; the last row's among them."""
        return tuple(sorted((*self.chain, *self.snapshots)))


@dataclass(frozen=True)
class TrunkRows:
    """One request's rows in a trunk pass: slots [start, start + len(tokens))."""

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]  # K/V blocks of the request
    num_logits: int  # of its last rows
    feeds_head: bool  # whether the states of all its rows are wanted
    states: StateRows | None = None  # of a model with recurrent layers


@dataclass(frozen=True)
class HeadRows:
    """One request's rows for one module of the head: slots [start, start + len(tokens))."""

    tokens: list[int]
    start: int
    blocks: Sequence[int]
    states: torch.Tensor  # [n, hidden], what each row is fused with


@dataclass(frozen=True)
class TrunkBatch:
    """All rows of a trunk pass, one request after another."""

    ids: list[int]
    positions: list[int]
    spans: list[Span]
    state_spans: list[StateSpan]
    logits: list[int]  # rows whose logits are wanted
    wanted: list[int]  # rows whose states are wanted, those of the logits among them,
    logits_among: list[int]  # where they stand in `wanted`
    parts: list[slice]  # of `wanted`, by request: what feeds its head

    @classmethod
    def of(cls, requests: Sequence[TrunkRows], block_size: int, to_device: ToDevice) -> TrunkBatch:
        batch = cls([], [], [], [], [], [], [], [])
        for rows in requests:
            begin, count = len(batch.ids), len(rows.tokens)
            batch.ids.extend(rows.tokens)
            batch.positions.extend(range(rows.start, rows.start + count))
            span = span_of(
                rows.blocks, begin, rows.start, count, 0, block_size=block_size, to_device=to_device
            )
            batch.spans.append(span)
            if rows.states is not None:
                kept = StateSpan(span.start, span.stop, rows.states.source, rows.states.keeps)
                batch.state_spans.append(kept)
            batch._want(rows, begin, begin + count)
        return batch

    def _want(self, rows: TrunkRows, begin: int, end: int) -> None:
        first = end - rows.num_logits
        before = len(self.wanted)
        self.logits.extend(range(first, end))
        self.wanted.extend(range(begin if rows.feeds_head else first, end))
        total = len(self.wanted)
        self.logits_among.extend(range(total - rows.num_logits, total))
        self.parts.append(slice(before, total if rows.feeds_head else before))

    def by_request(self, states: torch.Tensor) -> list[torch.Tensor]:
        """The states of each request's rows; `states` are those of all rows, or of `wanted`."""
        if states.shape[0] < len(self.ids):
            return [states[part] for part in self.parts]
        return [states[span.start : span.stop] for span in self.spans]


@dataclass(frozen=True)
class HeadBatch:
    """All rows of a pass of one module, one request after another."""

    ids: torch.Tensor
    hidden: torch.Tensor  # [T, hidden]
    positions: torch.Tensor  # rotary ones
    spans: list[Span]

    @classmethod
    def of(
        cls, module: int, requests: Sequence[HeadRows], block_size: int, to_device: ToDevice
    ) -> HeadBatch:
        """Module j has rotary position i - j - 1 at slot i, and no entry in slots 0 to j."""
        ids: list[int] = []
        positions: list[int] = []
        spans: list[Span] = []
        for rows in requests:
            count, position = len(rows.tokens), rows.start - module - 1
            span = span_of(
                rows.blocks, len(ids), rows.start, count, module + 1, block_size=block_size,
                to_device=to_device,
            )  # fmt: skip
            spans.append(span)
            ids.extend(rows.tokens)
            positions.extend(range(position, position + count))
        return cls(to_device(ids), hidden_of(requests), to_device(positions), spans)


def hidden_of(requests: Sequence[HeadRows]) -> torch.Tensor:
    """The states of all rows, [T, hidden]."""
    return requests[0].states if len(requests) == 1 else torch.cat([r.states for r in requests])


def span_of(
    blocks: Sequence[int], row: int, slot: int, count: int, first: int, *, block_size: int,
    to_device: ToDevice,
) -> Span:  # fmt: skip
    """`count` rows from `row` on, which fill slots from `slot` on and see those from `first` on."""
    new, context = (
        slots_of(blocks, block_size, begin, slot + count, to_device) for begin in (slot, first)
    )
    return Span(row, row + count, new, context)


def slots_of(blocks: Sequence[int], size: int, begin: int, end: int, to_device: ToDevice) -> Slots:
    """Physical slots of logical ones [begin, end), in blocks of `size`: a slice where it can be."""
    lowest, highest = begin // size, (end - 1) // size
    first = blocks[lowest]
    run = range(first, first + highest - lowest + 1)
    if blocks[highest] == run[-1] and list(blocks[lowest : highest + 1]) == list(run):
        offset = (first - lowest) * size
        return slice(begin + offset, end + offset)
    used = to_device(blocks[lowest : highest + 1])
    slots = (used[:, None] * size + torch.arange(size, device=used.device)).view(-1)
    return slots[begin - lowest * size : end - lowest * size]


def on_device(
    values: Sequence[int] | Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """A tensor of `values` on the device, ready for whatever is launched after this."""
    return pinned_to(torch.tensor(values, dtype=dtype), device)


def pinned_to(made: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The host's tensor on the device, ready for whatever is launched after this.

    A copy to a GPU from ordinary memory would first wait for everything that it has to do; from
    pinned memory it takes its place in the queue.
    """
    if device.type != "cuda":
        return made.to(device)
    return made.pin_memory().to(device, non_blocking=True)
