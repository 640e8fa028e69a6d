"""Captured rounds, one for each shape: a round becomes one launch.

The first round of a shape runs as it is, which also compiles what the start did not; the second is
captured. Indices beyond those in use are free, which every kernel skips.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from dataclasses import replace

import torch

from headstart.backends.cuda.decode_batch import DecodeBatch
from headstart.backends.cuda.rounds import RoundModel, RoundShape, run_round

_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256)


class Graphs:
    def __init__(self, model: RoundModel, batch: DecodeBatch):
        self.model, self._batch = model, batch
        self._graphs: dict[RoundShape, torch.cuda.CUDAGraph] = {}
        self._runs: Counter[RoundShape] = Counter()
        self.new_seconds: dict[RoundShape, float] = {}  # what compiling and capturing took the host

    @property
    def has_head(self) -> bool:
        return self.model.head is not None

    def sizes(self) -> list[int]:
        """Numbers of requests that rounds are captured for."""
        most = self._batch.count
        return [*(size for size in _SIZES if size < most), most]

    def bucket(self, count: int) -> int:
        """How many requests the captured round for `count` of them has room for."""
        at = bisect_left(_SIZES, count)
        return min(_SIZES[at] if at < len(_SIZES) else self._batch.count, self._batch.count)

    def is_captured(self, shape: RoundShape) -> bool:
        """Whether the next round of this shape is a replay."""
        return self._runs[shape] >= 2

    def run(self, shape: RoundShape) -> bool:
        """One round of the first `count` requests; whether its time counts: it was a replay."""
        shape = replace(shape, count=self.bucket(shape.count))
        began, is_replay = time.perf_counter(), self.is_captured(shape)
        if not self._runs[shape] or not self._batch.lengths.is_cuda:
            run_round(self.model, self._batch, shape)
        elif shape not in self._graphs:
            self._graphs[shape] = self._capture(shape)
        if not is_replay:
            self.new_seconds[shape] = self.new_seconds.get(shape, 0.0) + time.perf_counter() - began
        if shape in self._graphs:
            self._graphs[shape].replay()
        self._runs[shape] += 1
        return is_replay

    def _capture(self, shape: RoundShape) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # One pool for all: rounds never run at the same time, so they may share scratch memory.
        pool = next((other.pool() for other in self._graphs.values()), None)
        with torch.cuda.graph(graph, pool=pool):
            run_round(self.model, self._batch, shape)
        return graph
