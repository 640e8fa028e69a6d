"""int8 on a CPU without kernels: verifying gives every row the bits that it would get alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.engine_runs import assert_head_is_alive, greedy, make_prompts, run, soft, start
from support.tiny_fixture import Tiny

from headstart.engine.options import MAX_DRAFTS
from headstart.models import attention

PROMPTS = make_prompts()[:3]


def answers(folder: Path, drafts: int) -> list[tuple[list[int], list[float]]]:
    """Texts, and the log-probability of each token."""
    engine = start(folder, speculate=drafts, weights="int8", dtype="float32", kernels="off")
    results = run(engine, PROMPTS, greedy(40, logprobs=1))
    if drafts:
        assert_head_is_alive(results)
    outputs = [result.outputs[0] for result in results]
    return [(o.token_ids, [entry.logprob for entry in o.logprobs or ()]) for o in outputs]


def test_the_most_drafts_change_no_bit(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: 16 drafts are 17 rows, which attended together."""
    folder = soft(tiny)
    plain = answers(folder, 0)
    assert answers(folder, MAX_DRAFTS) == plain
    # The control: rows that attend as those of a prompt do show in the last bits.
    monkeypatch.setattr(attention, "MAX_LONE_ROWS", 0)
    assert answers(folder, MAX_DRAFTS) != answers(folder, 0)
