"""Captured rounds, one for each kind: a round becomes one launch.

The first round of a kind runs as it is, which also compiles what the start did not; the second is
captured.
Seats beyond those in use are empty, which every kernel skips.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from headstart.backends.cuda.rounds import Kind, Model, catch_up, run_round
from headstart.backends.cuda.seats import Seats
from headstart.backends.cuda.transfer import on_device

_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256)


class Graphs:
    def __init__(self, model: Model, seats: Seats):
        self.model, self._seats = model, seats
        self._graphs: dict[Kind, torch.cuda.CUDAGraph] = {}
        self._seen: set[Kind] = set()
        self.new_seconds: dict[Kind, float] = {}  # what compiling and capturing took the host
        self._pool: Any = None

    @property
    def has_head(self) -> bool:
        return self.model.head is not None

    def sizes(self) -> list[int]:
        """Numbers of seats that rounds are captured for."""
        most = self._seats.count
        return [*(size for size in _SIZES if size < most), most]

    def bucket(self, count: int) -> int:
        """How many seats the captured round for `count` requests has."""
        at = bisect_left(_SIZES, count)
        return min(_SIZES[at] if at < len(_SIZES) else self._seats.count, self._seats.count)

    def run(self, kind: Kind) -> None:
        """One round of the first `count` seats, or a few more; they must hold every request."""
        kind = replace(kind, count=self.bucket(kind.count))
        began = time.perf_counter()
        is_seen = kind in self._seen
        if not is_seen or not self._seats.lengths.is_cuda:
            self._seen.add(kind)
            run_round(self.model, self._seats, kind)
        elif kind not in self._graphs:
            self._graphs[kind] = self._capture(kind)
            is_seen = False
        if not is_seen:
            self.new_seconds[kind] = self.new_seconds.get(kind, 0.0) + time.perf_counter() - began
        if kind in self._graphs:
            self._graphs[kind].replay()

    def catch_up(self, at: Sequence[int], rows: int) -> None:
        """Let the head read up to `rows` tokens that are pending for these seats; not captured."""
        # As many as in a captured round, the last one repeated: nothing is compiled for it then.
        filled = [*at, *[at[-1]] * (self.bucket(len(at)) - len(at))]
        catch_up(self.model, self._seats, on_device(filled, self._seats.lengths.device), rows)

    def _capture(self, kind: Kind) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run_round(self.model, self._seats, kind)
        # One pool for all: rounds never run at the same time, so they may share scratch memory.
        self._pool = graph.pool()
        return graph
