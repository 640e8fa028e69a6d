"""Captured rounds: one graph for each shape of each part.

A captured part is one launch. The first round of a shape runs as it is, which also compiles what
the start did not; the second is captured. Indices beyond those in use are free, which every kernel
skips. There are few shapes (`round_plans.py` picks them), so that few are captured; of very many,
which requests with settings of all kinds can ask for, those used last are kept.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from dataclasses import replace

import torch

from headstart.backends.cuda.decode_batch import DecodeBatch
from headstart.backends.cuda.drafting import run_drafts
from headstart.backends.cuda.packed import AS_MANY_ROWS, FINE, captured_rows
from headstart.backends.cuda.round_model import RoundModel
from headstart.backends.cuda.rounds import run_choice, run_trunk
from headstart.backends.cuda.shapes import ChoiceShape, DraftShape, RoundShape, TrunkShape

_MOST_GRAPHS = 512
_COARSE_SIZES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
_PACKED_PATIENCE = 32  # passes of a size before it is captured, where a larger one will do
_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256)


_Part = DraftShape | TrunkShape | ChoiceShape


class Graphs:
    """Each part of a round is captured by itself: settings of requests make no other trunk pass."""

    def __init__(self, model: RoundModel, batch: DecodeBatch):
        self.model, self._batch = model, batch
        self._graphs: dict[_Part, torch.cuda.CUDAGraph] = {}
        self._runs: Counter[_Part] = Counter()
        self._wanted: Counter[TrunkShape] = Counter()  # with joined rows
        self._too_large: set[_Part] = set()  # for which there was no memory when it was captured
        self.new_seconds: dict[RoundShape, float] = {}  # what compiling and capturing took the host

    @property
    def has_head(self) -> bool:
        return self.model.head is not None

    @property
    def device(self) -> torch.device:
        return self._batch.lengths.device

    def sizes(self) -> list[int]:
        """Numbers of requests that rounds are captured for."""
        most = self._batch.count
        return [*(size for size in _SIZES if size < most), most]

    def bucket(self, count: int) -> int:
        """How many requests the captured round for `count` of them has room for."""
        at = bisect_left(_SIZES, count)
        return min(_SIZES[at] if at < len(_SIZES) else self._batch.count, self._batch.count)

    def packed_shape(self, part: TrunkShape, rows: int, groups: int) -> TrunkShape:
        """The packed pass of `rows` all together, with at least so many groups of other rows.

        For a while one with some more, if that is captured and the exact one is not. Requests and
        groups are counted coarsely: those that are not there cost next to nothing.
        """
        count = next((size for size in _COARSE_SIZES if size >= part.count), self._batch.count)
        exact = TrunkShape(
            min(count, self._batch.count), part.num_drafts, 1 << (groups - 1).bit_length(),
            captured_rows(rows, self._batch.lengths.device),
        )  # fmt: skip
        self._wanted[exact] += 1
        if self._wanted[exact] > _PACKED_PATIENCE or exact in self._graphs:
            return exact
        most = max(AS_MANY_ROWS * exact.rows, exact.rows + FINE)
        larger = (
            shape for shape in self._graphs
            if isinstance(shape, TrunkShape) and shape.groups >= exact.groups
            and (shape.count, shape.num_drafts) == (exact.count, exact.num_drafts)
            and exact.rows <= shape.rows <= most
        )  # fmt: skip
        return min(larger, key=lambda shape: (shape.rows, shape.groups), default=exact)

    def counts(self) -> list[int]:
        """Numbers of requests that packed passes are captured for."""
        most = self._batch.count
        return [*(size for size in _COARSE_SIZES if size < most), most]

    def has_run(self, part: TrunkShape) -> bool:
        return self._runs[part] > 0

    def prepare(self, part: TrunkShape) -> None:
        """Capture a pass that has not run, whose kernels were compiled for others."""
        if part not in self._graphs:
            self._runs[part] = max(1, self._runs[part])
            self._graph(part)
            self._runs[part] = 2

    def is_captured(self, shape: RoundShape) -> bool:
        """Whether the next round of this shape is a replay."""
        parts = (shape.drafts, shape.trunk, shape.choice)
        return all(self._runs[part] >= 2 and part not in self._too_large for part in parts)

    def run(self, shape: RoundShape) -> bool:
        """One round of the first `count` requests; whether its time counts: it was a replay."""
        shape = replace(shape, count=self.bucket(shape.count))
        began, is_replay = time.perf_counter(), self.is_captured(shape)
        for part in (shape.drafts, shape.trunk, shape.choice):
            self.run_part(part)
        if not is_replay:
            self.new_seconds[shape] = self.new_seconds.get(shape, 0.0) + time.perf_counter() - began
        return is_replay

    def run_part(self, part: _Part) -> None:
        """One part of a round, whose shape is one of a captured size."""
        graph = self._graph(part)
        if graph is None:
            self._launch(part)
        else:
            graph.replay()
        self._runs[part] += 1

    def _graph(self, part: _Part) -> torch.cuda.CUDAGraph | None:
        """None for a first run, and where there is no memory for a graph."""
        if not self._runs[part] or part in self._too_large or not self._batch.lengths.is_cuda:
            return None
        try:
            graph = self._graphs.pop(part, None) or self._capture(part)
        except torch.cuda.OutOfMemoryError:
            self._too_large.add(part)
            return None
        self._graphs[part] = graph  # the last used comes last
        return graph

    def _launch(self, part: _Part) -> None:
        match part:
            case DraftShape():
                run_drafts(self.model, self._batch, part)
            case TrunkShape():
                run_trunk(self.model, self._batch, part)
            case ChoiceShape():
                run_choice(self.model, self._batch, part)

    def _capture(self, part: _Part) -> torch.cuda.CUDAGraph:
        self._forget_oldest()
        graph = torch.cuda.CUDAGraph()
        # One pool for all: parts never run at the same time, so they may share scratch memory.
        pool = next((other.pool() for other in self._graphs.values()), None)
        # Another thread may be loading a head: what it does must not end a capture.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self._launch(part)
        return graph

    def _forget_oldest(self) -> None:
        """Make room for one more; what is forgotten is captured again the next time."""
        while len(self._graphs) >= _MOST_GRAPHS:
            oldest = next(iter(self._graphs))
            del self._graphs[oldest]
            self._runs[oldest] = 1
