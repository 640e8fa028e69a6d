"""Schedulers and requests without a model, and the engine's part of a step."""

from __future__ import annotations

from typing import Any

from headstart.engine.kv_cache import BlockPool
from headstart.engine.options import EngineOptions
from headstart.engine.request import Request
from headstart.engine.scheduler import Scheduler, Work
from headstart.sampling.params import SamplingParams

GREEDY = SamplingParams(temperature=0)


def scheduler(num_blocks: int = 100, *, block_size: int = 2, **options: Any) -> Scheduler:
    pool = BlockPool(num_blocks, block_size)
    return Scheduler(pool, EngineOptions(block_size=block_size, **options))


def request(name: str, length: int, arrival: int = 0, priority: int = 0) -> Request:
    first = ord(name[0]) * 1000
    return Request(
        name, list(range(first, first + length)), GREEDY, 0, 50, frozenset(), arrival, priority
    )


def run(
    scheduler: Scheduler, plan: list[Work], *, accepted: int = 0, drafts: int = 0
) -> dict[str, tuple[int, int, int]]:
    """Play the engine's part of a step: compute, accept, emit, draft again."""
    for work in plan:
        decides = work.needs_logits
        kept = min(accepted, len(work.drafts))
        work.request.num_computed = work.stop - len(work.drafts) + kept
        scheduler.register(work.request, work.request.num_computed)
        work.request.drafts = []
        if decides:
            work.request.tokens += [*work.drafts[:kept], 7]
            count = scheduler.look_ahead(work.request, drafts) if drafts else 0
            work.request.drafts = [9] * count
    scheduler.check()
    return {w.request.id: (w.start, w.count, len(w.drafts)) for w in plan}
