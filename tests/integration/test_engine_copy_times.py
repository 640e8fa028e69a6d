"""What indexing prompts takes is counted, apart from what finding copies takes."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pytest
from support.copying_runs import prompts_of
from support.engine_runs import greedy, run, soft, start
from support.tiny_fixture import Tiny

from headstart.engine import draft_sources


@pytest.mark.usefixtures("no_clock")
def test_every_part_of_a_prompt_counts_as_indexing(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that goes on by a second whenever it is looked at: what is timed takes one."""
    ticks, folder = count(), soft(tiny)
    monkeypatch.setattr(draft_sources, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    engine = start(folder, speculate="context", max_batched_tokens=32)
    sources, prompt = engine.loop.sources, prompts_of(folder)[0]
    assert sources is not None and 32 < len(prompt) <= 96
    for parts in (-(-len(prompt) // 32), 1):  # behind a prefix hit the last tokens are read
        before, finding = sources.index_seconds, sources.copy_seconds
        run(engine, [prompt], greedy(4))
        assert sources.index_seconds - before == parts
        assert sources.copy_seconds > finding
