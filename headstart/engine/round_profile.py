"""Captured rounds, timed at start: what `auto` decides by, and graphs that serving goes on with.

Seats are filled with blank requests whose blocks are the first of the K/V memory, which is still
scratch. At most five sizes are timed; per size every K of the menu is captured, and two rounds
in which the head reads a whole window: 40 captures at most. Sizes between are interpolated, and
captured when they are needed.
"""

from __future__ import annotations

import time

import torch

from headstart.backends.cuda.recurrent import RecurrentSeats
from headstart.backends.cuda.rounds import Kind
from headstart.engine.cost import NEVER_PAYS
from headstart.engine.curves import Curve
from headstart.engine.draft_choice import MENU
from headstart.engine.round_costs import RoundTable
from headstart.engine.seating import Seating

_SIZES = (1, 4, 16, 64, 256)
_SHORT, _LONG = 64, 1024  # tokens of context
_MARGIN = 64  # tokens that a seat may get while it is timed
_REPEATS = 2


def profiled_kinds(seating: Seating, max_drafts: int) -> list[Kind]:
    """Rounds that `profile_rounds` runs, where there is memory for all."""
    window = seating.kinds.window
    kinds: list[Kind] = []
    for count in _counts(seating):
        kinds += [Kind.usual(count, drafts) for drafts in MENU if drafts <= max_drafts]
        kinds += [Kind(count, drafts, window) for drafts in (0, 1)]
    return kinds


def _counts(seating: Seating) -> list[int]:
    """Sizes that are timed."""
    return sorted({seating.graphs.bucket(min(size, seating.seats.count)) for size in _SIZES})


def profile_rounds(seating: Seating, max_drafts: int) -> RoundTable:
    """Time rounds of blank requests, with short and with long contexts."""
    blank = _Blank(seating)
    menu = [drafts for drafts in MENU if drafts <= max_drafts]
    window = seating.kinds.window
    rounds: list[tuple[int, Curve]] = []
    context: list[tuple[int, Curve]] = []
    catch_up: list[tuple[int, float]] = []
    for count in _counts(seating):
        short, long = (blank.fitting(count, tokens) for tokens in (_SHORT, _LONG))
        if short < 1:
            break
        kinds = [Kind.usual(count, drafts) for drafts in menu]
        bases = [blank.seconds(kind, short) for kind in kinds]
        late = blank.seconds(Kind(count, 0, window), short)
        catch_up.append((count, max(0.0, late - bases[0])))
        blank.seconds(Kind(count, 1, window), short)  # for serving: K rises from 0 by this one
        seating.graphs.catch_up(range(count), window)  # and where few have a head, by this
        slopes = [0.0] * len(menu)
        if long >= 2 * short:
            slopes = [
                (blank.seconds(kind, long) - base) / (count * (long - short))
                for kind, base in zip(kinds, bases, strict=True)
            ]
        context.append((count, tuple(zip(menu, slopes, strict=True))))
        bases = [base - slope * count * short for base, slope in zip(bases, slopes, strict=True)]
        rounds.append((count, tuple(zip(menu, bases, strict=True))))
    blank.fill(Kind(seating.seats.count, 0, 0), 0)
    if not rounds:
        return RoundTable(((1, tuple((k, NEVER_PAYS.round_seconds(1, k)) for k in MENU)),))
    return RoundTable(tuple(rounds), tuple(context), tuple(catch_up), window - 1)


class _Blank:
    """Rounds of requests that have only a length."""

    def __init__(self, seating: Seating):
        self._seats, self._kinds = seating.seats, seating.kinds
        self._pool, self._max_tokens = seating.scheduler.pool, seating.max_tokens
        self._num_states = seating.runner.num_states

    def fitting(self, count: int, tokens: int) -> int:
        """Tokens of context, up to so many, that as many seats have memory for."""
        slots = self._pool.num_blocks // count * self._pool.block_size
        return min(tokens, min(slots, self._max_tokens) - _MARGIN)

    def seconds(self, kind: Kind, context: int) -> float:
        """Of one replay; compiled and captured before."""
        self.fill(kind, context)
        while not self._kinds.is_captured(kind):
            self._kinds.run(kind)
        times = []
        for _ in range(_REPEATS):
            self.fill(kind, context)
            times.append(self._time(kind))
        return min(times)

    def _time(self, kind: Kind) -> float:
        if not self._seats.lengths.is_cuda:
            started = time.perf_counter()
            self._kinds.run(kind)
            return time.perf_counter() - started
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        self._kinds.run(kind)
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3

    def fill(self, kind: Kind, context: int) -> None:
        """Seats in the middle of an answer, each with blocks of its own; empty without context."""
        seats, count = self._seats, kind.count
        seats.lengths[:count] = context
        seats.left[:count] = _MARGIN if context else 0
        seats.limits[:count] = kind.num_drafts
        seats.pending[:count] = max(1, kind.head_rows) if context else 0
        if context:
            each = -(-(context + _MARGIN) // self._pool.block_size)
            blocks = torch.arange(count * each, dtype=torch.int32, device=seats.tables.device)
            seats.tables[:count, :each] = blocks.view(count, each)
        if seats.recurrent is not None:
            self._fill_recurrent(seats.recurrent, count, context)

    def _fill_recurrent(self, seats: RecurrentSeats, count: int, context: int) -> None:
        """A memory each, as far as there are so many: one for all would not leave the caches."""
        slots = torch.arange(count, dtype=torch.int32, device=seats.slots.device)
        seats.slots[:count] = slots % self._num_states
        # Every round repeats a row of the one before; never more than there are.
        seats.replays[:count] = min(1, max(0, context - 1))
