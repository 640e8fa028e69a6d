"""Which captured round serves the requests that sit: few kinds, so that few are captured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from headstart.gpu.graphs import Graphs
from headstart.gpu.rounds import Kind

_PATIENCE = 8  # rounds that a kind is wanted before it is captured, where a larger one will do,
_AS_LARGE = 2  # up to so many times as large


@dataclass
class Kinds:
    """The kinds of one engine's rounds, and how often each ran."""

    graphs: Graphs
    window: int  # tokens that the head may be behind
    menu: Sequence[int] = ()  # numbers of drafts that others are rounded up to; none: any
    _runs: Counter[Kind] = field(default_factory=Counter)
    _wanted: Counter[Kind] = field(default_factory=Counter)

    def pick(self, count: int, most: int, pending: int, *, is_truncated: bool) -> Kind:
        """For `count` requests with up to `most` drafts, of which the head is `pending` behind.

        Without drafts the head falls behind, and reads a whole window now and then. With drafts
        a round reads as much as the one before gave. Where more is pending, it reads the window
        and drafts a single token, whatever was wanted: one kind for all such changes of K.
        """
        drafts = next((number for number in self.menu if number >= most), most)
        if not self.graphs.has_head:
            drafts, head_rows = 0, 0
        elif not most:
            head_rows = self.window if pending + 1 > self.window else 0
        elif pending <= drafts + 1:
            head_rows = drafts + 1
        else:
            drafts, head_rows = 1, self.window
        kind = Kind(self.graphs.bucket(count), drafts, head_rows, is_truncated)
        return self._captured(kind)

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
