"""Captured rounds, one for each kind: a round becomes one launch.

The first round of a kind runs as it is, which also compiles its kernels; the second is captured.
Seats beyond those in use are empty, which every kernel skips.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import Any

import torch

from headstart.gpu.rounds import Kind, Model, run_round
from headstart.gpu.seats import Seats

_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256)


class Graphs:
    def __init__(self, model: Model, seats: Seats):
        self.model, self._seats = model, seats
        self._graphs: dict[Kind, torch.cuda.CUDAGraph] = {}
        self._seen: set[Kind] = set()
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
        if kind not in self._seen or not self._seats.lengths.is_cuda:
            self._seen.add(kind)
            run_round(self.model, self._seats, kind)
            return
        if kind not in self._graphs:
            self._graphs[kind] = self._capture(kind)
        self._graphs[kind].replay()

    def _capture(self, kind: Kind) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run_round(self.model, self._seats, kind)
        # One pool for all: rounds never run at the same time, so they may share scratch memory.
        self._pool = graph.pool()
        return graph
