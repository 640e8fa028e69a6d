"""A head that is swapped beside rounds on the device, interpreted: captured rounds read memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.engine_runs import greedy, ids_of
from support.kernel_runs import BLOCK_BYTES
from support.long_runs import unless_long
from support.swapped_heads import acceptance, answered, bits_of, heads_of
from support.tiny_fixture import Tiny
from test_engine_kernels import PROMPTS, model, settings, start

from headstart.vocab.draft_vocab import DraftVocab

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("quick_kernels")


@pytest.mark.parametrize("draft_weights", unless_long(["int8"], ["as-dtype", "int8"]))
def test_texts_stay_and_drafts_are_those_of_the_new_head(tiny: Tiny, draft_weights: Any) -> None:
    """With another draft vocabulary in the end; of greedy and seeded requests, and of one by the
    rejection rule."""
    heads = heads_of(model(tiny))
    wanted = ids_of(start(heads.model, "off", speculate=0).generate(PROMPTS[:2], settings()[:2]))
    old, new = (DraftVocab.of(range(first, 64, 2), vocab_size=64) for first in (0, 1))
    engine, fresh = (
        start(folder, "on", draft_weights=draft_weights, draft_vocab=[vocab])
        for folder, vocab in ((heads.weak_model, old), (heads.model, new))
    )
    assert engine.backend.name == "cuda"
    before = bits_of(engine)
    swaps = [engine.prepare_head(*each) for each in ((heads.good, new), (heads.weak, old))]
    assert answered(engine, PROMPTS[:2], settings()[:2], swaps, every=1) == wanted
    assert bits_of(engine) == before, "there and back leaves every bit as it was"
    asked = [greedy(6), replace(settings()[1], acceptance="rejection")]
    weak = acceptance(engine, PROMPTS[1:4:2], asked)
    engine.swap_head(heads.good)
    other = acceptance(engine, PROMPTS[1:4:2], asked)
    engine.swap_head(swaps[0])
    good = [acceptance(own, PROMPTS[1:4:2], asked) for own in (engine, fresh)]
    assert good[0] == good[1] and weak != good[0] != other
    assert bits_of(engine) == bits_of(fresh)


def test_texts_stay_through_swaps_preemptions_and_prefix_hits(tiny: Tiny) -> None:
    """Memory is short and the first and third prompt begin alike; greedy and seeded in turns."""
    heads = heads_of(model(tiny))
    params = [greedy(8), settings(8)[1], greedy(8)]
    plain = start(heads.model, "off", speculate=0)
    wanted = ids_of(plain.generate(PROMPTS[:3], params))
    engine = start(heads.model, "on", kv_bytes=12 * BLOCK_BYTES)
    assert engine.backend.name == "cuda"
    assert answered(engine, PROMPTS[:3], params, [heads.weak, heads.good], every=3) == wanted
    stats = engine.stats
    assert engine.head_version == 2 and not engine.loop.rounds.requests
    assert stats.preemptions > 0 and stats.cached_tokens > 0
    assert stats.fast_rounds > 0 and sum(stats.acceptance.accepted) > 0
