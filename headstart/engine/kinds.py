"""Which captured round serves the requests that sit: few kinds, so that few are captured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from headstart.backends.cuda.graphs import Graphs
from headstart.backends.cuda.rounds import Kind

_PATIENCE = 8  # rounds that a kind is wanted before it is captured, where a larger one will do,
_AS_LARGE = 2  # up to so many times as large


@dataclass
class Kinds:
    """The kinds of one engine's rounds, and how often each ran."""

    graphs: Graphs
    window: int  # tokens that the head may be behind while nobody drafts
    menu: Sequence[int] = ()  # numbers of drafts that others are rounded up to; none: any
    widest: int = 0  # tokens that it may be behind after many drafts, where that is more
    _runs: Counter[Kind] = field(default_factory=Counter)
    _wanted: Counter[Kind] = field(default_factory=Counter)

    def pick(self, count: int, most: int, pending: int, *, is_truncated: bool) -> Kind:
        """For `count` requests with up to `most` drafts, of which the head is `pending` behind.

        Without drafts the head falls behind, and reads a whole window now and then. With drafts
        a round reads as much as the one before gave. Where K falls by one step of the menu, the
        larger round runs once more, in which seats draft what is wanted. Where still more is
        pending, it reads the window and drafts a single token: one kind for all such changes.
        """
        drafts = self._on_menu(most)
        if not self.graphs.has_head:
            drafts, head_rows = 0, 0
        elif self.is_late(most, pending):
            above = next((number for number in self.menu if number > drafts), 0)
            if most > 1 and pending <= above + 1:
                drafts, head_rows = above, above + 1
            else:
                drafts, head_rows = min(1, most), self.late_rows(pending)
        else:
            head_rows = drafts + 1 if most else 0
        kind = Kind(self.graphs.bucket(count), drafts, head_rows, is_truncated)
        return self._captured(kind)

    def is_late(self, most: int, pending: int) -> bool:
        """Whether the head has more to read than rounds with up to `most` drafts let it."""
        return pending > self._on_menu(most) + 1 if most else pending + 1 > self.window

    def is_fall(self, kind: Kind, most: int) -> bool:
        """Whether it is a larger round once more, where up to `most` drafts were wanted."""
        return kind.num_drafts > self._on_menu(most)

    def late_rows(self, pending: int) -> int:
        """Rows of the head that read so much, where it is late."""
        return self.window if pending <= self.window else self.widest

    def _on_menu(self, most: int) -> int:
        return next((number for number in self.menu if number >= most), most)

    def run(self, kind: Kind) -> bool:
        """Launch a round; whether it is one whose time counts: a replay."""
        is_replay = self.is_captured(kind)
        self.graphs.run(kind)
        self._runs[kind] += 1
        return is_replay

    def is_captured(self, kind: Kind) -> bool:
        return self._runs[kind] >= 2  # the first runs as it is, the second is captured

    def _captured(self, kind: Kind) -> Kind:
        """The kind itself, or a larger one for a while: capturing takes longer than some rounds.

        The last answers of a batch pass through many sizes, a few rounds each.
        """
        self._wanted[kind] += 1
        if self.is_captured(kind) or self._wanted[kind] > _PATIENCE:
            return kind
        larger = (
            replace(kind, count=size)
            for size in self.graphs.sizes()
            if kind.count < size <= _AS_LARGE * kind.count
        )
        return next(filter(self.is_captured, larger), kind)
