"""What a round costs by batch size and number of drafts: measured at start, interpolated."""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from headstart.engine.request import Request
from headstart.engine.runner import HeadRows, Runner
from headstart.engine.scheduler import Work
from headstart.sampling.params import SamplingParams

_ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64, 128)
_REPEATS = 3
_CONTEXT = 32  # tokens of context while measuring, where there is room for them


@dataclass(frozen=True)
class CostTable:
    """Seconds of a trunk pass and of a draft step, by number of rows (ascending)."""

    trunk: tuple[tuple[int, float], ...]
    draft: tuple[tuple[int, float], ...]

    def round_seconds(self, batch: int, drafts: int) -> float:
        """One round: verification of batch * (drafts + 1) rows, then `drafts` draft steps."""
        verify = _between(self.trunk, batch * (drafts + 1))
        return verify + drafts * _between(self.draft, batch)


def _between(table: tuple[tuple[int, float], ...], rows: int) -> float:
    sizes = [size for size, _ in table]
    at = bisect_left(sizes, rows)
    if at < len(table) and sizes[at] == rows:
        return table[at][1]
    if at == 0:
        return table[0][1]
    if at == len(table):  # beyond what was measured: in proportion
        return table[-1][1] * rows / sizes[-1]
    (low, low_cost), (high, high_cost) = table[at - 1], table[at]
    return low_cost + (high_cost - low_cost) * (rows - low) / (high - low)


def measure(runner: Runner, max_rows: int, num_blocks: int) -> CostTable:
    """Time both passes on blank requests; K/V memory is scratch before the first request."""
    longest = min(num_blocks * runner.block_size, runner.trunk_model.rotary.num_positions)
    context = max(1, min(_CONTEXT, longest // 2))
    room = min(max_rows, max(_ROWS), longest - context)
    sizes = [rows for rows in _ROWS if rows <= max(room, 1)]
    trunk = tuple((rows, _seconds(partial(_trunk, context), runner, rows)) for rows in sizes)
    draft = tuple((rows, _seconds(partial(_draft, context), runner, rows)) for rows in sizes)
    return CostTable(trunk, draft)


def _blank(context: int, runner: Runner, rows: int) -> Request:
    """A request of blank tokens that owns the first blocks, as far as it needs them."""
    request = Request(
        "cost", [0] * (context + 1), SamplingParams(temperature=0), 0, 1, frozenset(), 0
    )
    request.num_computed = context
    request.blocks = list(range(-(-(context + rows) // runner.block_size)))
    return request


def _trunk(context: int, runner: Runner, rows: int) -> None:
    request = _blank(context, runner, rows)
    runner.trunk([Work(request, context, rows, tuple([0] * (rows - 1)))])


def _draft(context: int, runner: Runner, rows: int) -> None:
    request = _blank(context, runner, rows)
    states = torch.zeros(
        rows, runner.trunk_model.config.hidden, dtype=runner.dtype, device=runner.device
    )
    normed, _, _ = runner.head_pass(0, [HeadRows(request, context, [0] * rows, states)])
    vocab = "default" if "default" in runner.draft_vocabs else None
    runner.draft_logits(normed, vocab).argmax(-1)


def _seconds(run: Callable[[Runner, int], None], runner: Runner, rows: int) -> float:
    run(runner, rows)
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        run(runner, rows)
        if runner.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times)
