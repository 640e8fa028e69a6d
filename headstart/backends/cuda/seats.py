"""Device state of the requests that are decoding: one seat each, fixed tensors for all.

A captured round reads and writes these tensors, so they are made once and only changed in place:
by kernels (`fill_`), since a copy of a number from the host would wait for the rounds under way.
The host keeps no copy of what the device decides; it learns the emitted tokens one round later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.backends.cuda.recurrent import RecurrentSeats
from headstart.backends.cuda.transfer import on_device
from headstart.models.recurrence import LayerStates


@dataclass(frozen=True)
class Seat:
    """What a request brings when it sits down: it has been read up to its newest token."""

    num_tokens: int
    left: int  # tokens it may still get
    limit: int  # drafts per round
    newest: int | Tensor  # a number, or one that only the device knows yet
    state: Tensor | None  # [D] of the token before the newest, for the head; None: it has none
    seed: int
    temperature: float
    blocks: Sequence[int]
    top_k: int = 0  # up to kernels.choice.MAX_TOP_K
    top_p: float = 1.0
    min_p: float = 0.0
    state_slot: int = -1  # of its recurrent states, where the model has any


class Seats:
    """S seats; a seat keeps up to `window` tokens that the head has not read."""

    def __init__(
        self, count: int, *, max_drafts: int, window: int, max_blocks: int, hidden: int,
        dtype: torch.dtype, device: torch.device, recurrent: RecurrentSeats | None = None,
    ):  # fmt: skip
        assert window > max_drafts

        def numbers(kind: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(count, *shape, dtype=kind, device=device)

        self.max_drafts = max_drafts
        self.lengths = numbers(torch.int32)
        self.left = numbers(torch.int32)
        self.limits = numbers(torch.int32)
        self.pending = numbers(torch.int32)
        self.seeds = numbers(torch.int64)
        self.heat = numbers(torch.float32)
        self.top_k = numbers(torch.int32)
        self.top_p = numbers(torch.float32)
        self.min_p = numbers(torch.float32)
        self.tokens = numbers(torch.int64, window)
        self.states = numbers(dtype, window, hidden)
        self.tables = numbers(torch.int32, max_blocks)
        self.emitted = numbers(torch.int64, max_drafts + 2)
        self.recurrent = recurrent
        self._buffers = list(range(count))  # as `recurrent` has them

    @property
    def window(self) -> int:
        return self.tokens.shape[1]

    @property
    def count(self) -> int:
        return self.lengths.shape[0]

    def sit(self, at: int, seat: Seat, states: list[LayerStates] | None = None) -> None:
        """Fill a seat. Ordered after the rounds already launched, like every change below.

        states: of the recurrent layers, which hold the request's.
        """
        num_pending = int(seat.state is not None)
        self._set(at, [seat.num_tokens, seat.left, seat.limit, num_pending])
        self.seeds[at].fill_(signed(seat.seed))
        self.heat[at].fill_(1 / seat.temperature if seat.temperature > 0 else 0.0)
        self.top_k[at].fill_(seat.top_k)
        self.top_p[at].fill_(seat.top_p)
        self.min_p[at].fill_(seat.min_p)
        self.tokens[at, 0].fill_(seat.newest)
        if seat.state is not None:
            self.states[at, 0] = seat.state
        self.extend(at, 0, seat.blocks)
        if self.recurrent is not None:
            rows = seat.num_tokens - 1  # the newest token has not been read
            self.recurrent.sit(at, seat.state_slot, self._buffers[at], rows, states or [])

    def leave(self, at: int) -> None:
        self._set(at, [0, 0, 0, 0])

    def extend(self, at: int, start: int, blocks: Sequence[int]) -> None:
        """More blocks for a seat, from index `start` of its table."""
        new = on_device(blocks, self.tables.device, torch.int32)
        self.tables[at, start : start + len(blocks)] = new

    def limit(self, drafts: Sequence[int]) -> None:
        """Drafts per round of the first seats."""
        self.limits[: len(drafts)] = on_device(drafts, self.limits.device, torch.int32)

    def move(self, source: int, target: int) -> None:
        """A request changes seats, so that a smaller captured round serves those who are left."""
        for tensor in (
            self.lengths, self.left, self.limits, self.pending, self.seeds, self.heat, self.top_k,
            self.top_p, self.min_p, self.tokens, self.states, self.tables,
        ):  # fmt: skip
            tensor[target] = tensor[source]
        if self.recurrent is not None:
            own = self._buffers
            own[source], own[target] = own[target], own[source]  # nobody has two
            self.recurrent.move(source, target, own)
        self.leave(source)

    def _set(self, at: int, numbers: list[int]) -> None:
        for tensor, number in zip(
            (self.lengths, self.left, self.limits, self.pending), numbers, strict=True
        ):
            tensor[at].fill_(number)


def signed(word: int) -> int:
    """The int64 with the bits of a 64-bit word."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word
