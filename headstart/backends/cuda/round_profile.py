"""Captured rounds, timed at start: what `auto` decides by, and graphs that serving goes on with.

The batch is filled with blank requests whose blocks are the first of the K/V memory, which is
still scratch. At most five sizes are timed; per size every K of the menu is captured, and two
rounds in which the head reads a whole window: 40 captures at most. Sizes between are interpolated,
and captured when they are needed.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from headstart.backends.cuda.decode_batch import most_rows
from headstart.backends.cuda.recurrent import RecurrentBatch
from headstart.backends.cuda.round_plans import COPIED
from headstart.backends.cuda.sampling import PLAIN
from headstart.backends.cuda.shapes import RoundShape
from headstart.backends.results import CacheSizes
from headstart.backends.rounds import SizeTimes
from headstart.backends.rows import blank_tokens

if TYPE_CHECKING:
    from headstart.backends.cuda.device_rounds import CapturedRounds

_SIZES = (1, 4, 16, 64, 256)
_SHORT, _LONG = 64, 1024  # tokens of context
_MARGIN = 64  # tokens that a request may get while it is timed
_REPEATS = 2


def profiled_shapes(rounds: CapturedRounds) -> list[RoundShape]:
    """Rounds that `BlankRounds.times` runs, where there is memory for all."""
    shapes: list[RoundShape] = []
    for size in _timed_sizes(rounds):
        shapes += [RoundShape.usual(size, drafts) for drafts in rounds.menu]
        shapes += [RoundShape(size, drafts, rounds.window) for drafts in (0, 1)]
    return shapes


def copying_shapes(rounds: CapturedRounds) -> list[RoundShape]:
    """Rounds in which some requests copy, of which the kernels are compiled at the start.

    Where requests may have different numbers of rows there are kernels for that alone; else only
    rows for more drafts than the menu has are new, where there is memory for them.
    """
    sizes, has_head, joins = rounds.sizes, rounds.graphs.has_head, rounds.joins_prompts
    drafts, head_rows = (min(1, sizes.num_drafts), min(COPIED) + 1) if has_head else (0, 0)
    found = []
    for size in _timed_sizes(rounds):
        packed = size * (drafts + 1) + 1 if size > 1 and joins else 0
        for total in (count for count in COPIED if count <= sizes.copied):
            if joins or sizes.num_drafts < total < most_rows(sizes) // size:
                found.append(RoundShape(size, drafts, head_rows, PLAIN, total - drafts, packed))
    return found


def _timed_sizes(rounds: CapturedRounds) -> list[int]:
    return sorted({rounds.bucket(min(size, rounds.sizes.max_requests)) for size in _SIZES})


class BlankRounds:
    """Rounds of requests that have only a length."""

    def __init__(self, rounds: CapturedRounds, cache: CacheSizes):
        self._rounds, self._batch, self._cache = rounds, rounds.batch, cache
        # Other ones than zeros: what drafts follow from, and the experts of a round with them.
        tokens = blank_tokens(self._batch.tokens.numel(), rounds.vocab)
        self._tokens = torch.tensor(tokens, device=self._batch.tokens.device)
        self._tokens = self._tokens.view_as(self._batch.tokens)

    def times(self) -> list[SizeTimes]:
        """With short and with long contexts, for all sizes that there is memory for."""
        found: list[SizeTimes] = []
        menu, window = self._rounds.menu, self._rounds.window
        for size in _timed_sizes(self._rounds):
            short, long = (self._fitting(size, tokens) for tokens in (_SHORT, _LONG))
            if short < 1:
                break
            shapes = {drafts: RoundShape.usual(size, drafts) for drafts in menu}
            bases = {drafts: self._seconds(shape, short) for drafts, shape in shapes.items()}
            late = self._seconds(RoundShape(size, 0, window), short)
            self._seconds(RoundShape(size, 1, window), short)  # captured for a K that rises from 0
            slopes = dict.fromkeys(menu, 0.0)
            if long >= 2 * short:
                slopes = {
                    drafts: (self._seconds(shape, long) - bases[drafts]) / (size * (long - short))
                    for drafts, shape in shapes.items()
                }
            empty = {drafts: bases[drafts] - slopes[drafts] * size * short for drafts in menu}
            found.append(SizeTimes(size, empty, slopes, max(0.0, late - bases[0])))
        self._fill(RoundShape(self._batch.count, 0, 0), 0)
        return found

    def _fitting(self, count: int, tokens: int) -> int:
        """Tokens of context, up to so many, that as many requests have memory for."""
        slots = self._cache.num_blocks // count * self._cache.block_size
        return min(tokens, min(slots, self._rounds.sizes.max_tokens) - _MARGIN)

    def _seconds(self, shape: RoundShape, context: int) -> float:
        """Of one replay; compiled and captured before."""
        graphs = self._rounds.graphs
        self._fill(shape, context)
        while not graphs.is_captured(shape):
            graphs.run(shape)
        times = []
        for _ in range(_REPEATS):
            self._fill(shape, context)
            times.append(self._time(shape))
        return min(times)

    def _time(self, shape: RoundShape) -> float:
        graphs = self._rounds.graphs
        if not self._batch.lengths.is_cuda:
            started = time.perf_counter()
            graphs.run(shape)
            return time.perf_counter() - started
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graphs.run(shape)
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3

    def _fill(self, shape: RoundShape, context: int) -> None:
        """Requests in the middle of an answer, each with its own blocks; none without context."""
        batch, count, size = self._batch, shape.count, self._cache.block_size
        batch.lengths[:count] = context
        batch.left[:count] = _MARGIN if context else 0
        batch.limits[:count] = shape.num_drafts
        batch.pending[:count] = max(1, shape.head_rows) if context else 0
        batch.tokens[:count] = self._tokens[:count]
        if context:
            each = -(-(context + _MARGIN) // size)
            blocks = torch.arange(count * each, dtype=torch.int32, device=batch.tables.device)
            batch.tables[:count, :each] = blocks.view(count, each)
        if batch.recurrent is not None:
            self._fill_recurrent(batch.recurrent, count, context)

    def _fill_recurrent(self, recurrent: RecurrentBatch, count: int, context: int) -> None:
        """A memory each, as far as there are so many: one for all would not leave the caches."""
        slots = torch.arange(count, dtype=torch.int32, device=recurrent.slots.device)
        recurrent.slots[:count] = slots % self._cache.num_states
        # Every round repeats a row of the one before; never more than there are.
        recurrent.replays[:count] = min(1, max(0, context - 1))
