"""What the host decides of the next round: its shape, and how many drafts each request has.

The host is one round behind the device. It knows what it asked for, so how far the head may be
behind at most; which drafts were accepted it does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from headstart.backends.cuda.decode_batch import most_rows
from headstart.backends.cuda.graphs import Graphs
from headstart.backends.cuda.packed import captured_rows, most_captured
from headstart.backends.cuda.sampling import PLAIN, SamplingNeeds
from headstart.backends.cuda.shapes import RoundShape
from headstart.backends.rounds import RoundSizes

_PATIENCE = 8  # rounds that a shape is wanted before it is captured, where a larger one will do,
_AS_LARGE = 2  # up to so many times as large
COPIED = (8, 16)  # drafts of requests that copy, where those of a round are too few


class RoundPlan(NamedTuple):
    """One round, decided before it is launched."""

    shape: RoundShape
    limits: list[int]  # drafts of the head for each request at most, by index
    drafts: list[int]  # the same with those that are copied
    num_unread: int  # tokens from before the round that the head will not read in it, at most


class RoundPlans:
    """Plans one engine's rounds, one after another."""

    def __init__(self, graphs: Graphs, sizes: RoundSizes, *, window: int, widest: int):
        """window, widest: of `RoundShapes`."""
        self._graphs, self._most_copied = graphs, sizes.copied
        self.menu = [drafts for drafts in sizes.menu if drafts <= sizes.max_drafts]
        self.max_rows = most_rows(sizes)
        self._shapes = RoundShapes(graphs, window, self.menu, widest, max_rows=self.max_rows)
        self._last_drafts = 0  # the most of any request in the last round
        self._pending = 0  # the most tokens that any request's head may be behind
        self._copied = 0  # the most drafts that a request copies in the next round,
        self._copying: Collection[int] = ()  # which requests may, by index,
        self._copied_rows = 0  # and rows of all of them beyond the head's drafts
        self._has_copied = False  # whether one could in the round before

    def came(self) -> None:
        """A request has come whose head has not read its newest token."""
        self._pending = max(self._pending, 1)

    def all_left(self) -> None:
        """The next request brings one token that its head has not read."""
        self._pending = 0

    def drained(self) -> None:
        """All have left at once, and what they might have copied is forgotten."""
        self._pending = self._copied = 0

    def give(self, copying: Collection[int], most: int, rows: int) -> bool:
        """Who may copy in the next round, how much at most; whether the device has to be told."""
        if not copying and not self._copied:
            return False
        # A few sizes, so that few rounds are captured.
        sizes = (size for size in (*self.menu, *COPIED) if size >= most)
        found = min(next(sizes, self._most_copied), self._most_copied)
        self._copied, self._copied_rows = found if copying else 0, rows
        self._copying = frozenset(copying)
        return True

    def rows_under_way(self, count: int) -> int:
        """Of so many requests, by the drafts that the last round had."""
        return count * (self._last_drafts + 1)

    def max_ahead(self, drafts: Sequence[int]) -> int:
        """Tokens that the round under way and the next one, with these drafts, may add."""
        # A first token, too, may not have arrived at the host yet.
        return (self._last_drafts + 1) + (max(*drafts, self._copied) + 1) + 1

    def plan(self, drafts: Sequence[int], needs: SamplingNeeds, *, squeezes: bool) -> RoundPlan:
        """The next round, which will be launched, with so many drafts for each request at most.

        squeezes: whether requests may have different numbers of rows.
        """
        count = len(drafts)
        self._shapes.squeezes = squeezes
        shape = self._shapes.pick(
            count, min(max(drafts), self._room_for_drafts(count)), self._pending, needs,
            self._copied, copied_rows=self._copied_rows, after_copies=self._has_copied,
        )  # fmt: skip
        self._has_copied = self._copied > 0
        limits = [min(number, shape.num_drafts) for number in drafts]
        copied = shape.num_rows - 1 if self._copied else 0
        self._last_drafts = max(*limits, copied)
        num_unread = 0 if shape.head_rows or not self._graphs.has_head else self._pending
        self._pending = self._last_drafts + 1 if shape.head_rows else self._pending + 1
        most = [max(n, copied) if at in self._copying else n for at, n in enumerate(limits)]
        return RoundPlan(shape, limits, most, num_unread)

    def is_usual(self, shape: RoundShape) -> bool:
        """Whether the time of the round that was planned last says what such rounds cost."""
        return self._shapes.is_usual(shape, self._last_drafts)

    def _room_for_drafts(self, count: int) -> int:
        """Drafts of a request at most, where so many decode: many drafts of many take memory."""
        room = self.max_rows // self._graphs.bucket(count) - 1
        return max((number for number in self.menu if number <= room), default=room)


@dataclass
class RoundShapes:
    """The shapes of one engine's rounds."""

    graphs: Graphs
    window: int  # tokens that the head may be behind while no request drafts
    menu: Sequence[int] = ()  # numbers of drafts that others are rounded up to; none: any
    widest: int = 0  # tokens that it may be behind after many drafts, where that is more
    max_rows: int = 1 << 30  # of all requests that there is memory for
    squeezes: bool = False  # whether requests of a round may have different numbers of rows
    _wanted: Counter[RoundShape] = field(default_factory=Counter)

    def pick(
        self, count: int, most: int, pending: int, needs: SamplingNeeds = PLAIN, copied: int = 0,
        *, copied_rows: int = 0, after_copies: bool = False,
    ) -> RoundShape:  # fmt: skip
        """For `count` requests with up to `most` drafts, of which the head is `pending` behind.

        `copied`: drafts of a request at most, where more are copied than the head makes, for which
        there are `copied_rows`; `after_copies`: whether any were in the round before.

        Without drafts the head falls behind, and reads a whole window now and then. With drafts
        a round reads as much as the one before gave. Where K falls by one step of the menu, the
        larger round runs once more, in which requests draft what is wanted. Where still more is
        pending, it reads the window and drafts a single token: one shape for all such changes.
        """
        drafts = self._on_menu(most)
        if not self.graphs.has_head:
            drafts, head_rows = 0, 0
        elif (copied or after_copies) and pending > drafts + 1:
            # Copied tokens come many at a time: the head reads them, and drafts as it would.
            most_read = COPIED[0] + 1
            head_rows = most_read if pending <= most_read else self._late_rows(pending)
        elif self.is_late(most, pending):
            above = next((number for number in self.menu if number > drafts), 0)
            if most > 1 and pending <= above + 1:
                drafts, head_rows = above, above + 1
            else:
                drafts, head_rows = min(1, most), self._late_rows(pending)
        else:
            head_rows = drafts + 1 if most or copied else 0
        more, packed = self._more_rows(count, drafts, copied, copied_rows, needs)
        size = self.graphs.bucket(count)
        return self._captured(RoundShape(size, drafts, head_rows, needs, more, packed))

    def _more_rows(
        self, count: int, drafts: int, copied: int, copied_rows: int, needs: SamplingNeeds
    ) -> tuple[int, int]:
        """Drafts beyond the head's for which there is room, and rows of the pass where squeezed.

        Only requests that copy have rows for them, as many as there are, unless all have as many in
        any case.
        """
        size, device = self.graphs.bucket(count), self.graphs.device
        usual = count * (drafts + 1)
        fitting = min(
            captured_rows(usual + copied_rows, device), most_captured(self.max_rows, device)
        )
        is_squeezed = self.squeezes and fitting > usual
        for total in (copied, *(number for number in reversed(COPIED) if number < copied)):
            more = max(0, total - drafts)
            if not more:
                break
            whole = size * (drafts + 1 + more)
            packed = fitting if is_squeezed else whole
            # Logits that are processed are made of all rows that a request could have.
            held = whole if needs.processes or needs.has_logprobs else packed
            if min(held, whole) <= self.max_rows:
                return more, packed if packed < whole else 0
        return 0, 0

    def is_late(self, most: int, pending: int) -> bool:
        """Whether the head has more to read than rounds with up to `most` drafts let it."""
        return pending > self._on_menu(most) + 1 if most else pending + 1 > self.window

    def is_usual(self, shape: RoundShape, most: int) -> bool:
        """Whether its time says what rounds with up to `most` drafts cost.

        Not where the head reads more than it usually does, nor where a larger round runs once more
        than was wanted: that may take less than one in which all rows are there.
        """
        is_read = shape.head_rows in (0, shape.num_drafts + 1) and shape.head_rows < self.window
        return is_read and shape.num_drafts <= self._on_menu(most)

    def _late_rows(self, pending: int) -> int:
        """Rows of the head that read so much, where it is late."""
        return self.window if pending <= self.window else self.widest

    def _on_menu(self, most: int) -> int:
        return next((number for number in self.menu if number >= most), most)

    def _captured(self, shape: RoundShape) -> RoundShape:
        """The shape itself, or a larger one for a while: capturing takes longer than some rounds.

        The last answers of a batch pass through many sizes, a few rounds each.
        """
        self._wanted[shape] += 1
        if self.graphs.is_captured(shape) or self._wanted[shape] > _PATIENCE:
            return shape
        larger = (
            replace(shape, count=size)
            for size in self.graphs.sizes()
            if shape.count < size <= _AS_LARGE * shape.count
        )
        return next(filter(self.graphs.is_captured, larger), shape)
