"""A head that is swapped beside rounds on the device, interpreted: captured rounds read memory."""

from __future__ import annotations

from typing import Any

import pytest
from support.engine_runs import greedy, ids_of
from support.swapped_heads import acceptance, answered, bits_of, heads_of
from support.tiny_fixture import Tiny
from test_engine_kernels import PROMPTS, model, settings, start

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("quick_kernels")


@pytest.mark.parametrize("draft_weights", ["as-dtype", "int8"])
def test_texts_stay_and_drafts_are_those_of_the_new_head(tiny: Tiny, draft_weights: Any) -> None:
    heads = heads_of(model(tiny))
    wanted = ids_of(start(heads.model, "off", speculate=0).generate(PROMPTS[:2], settings(6)[:2]))
    options: dict[str, Any] = {
        "draft_weights": draft_weights, "draft_vocab": list(range(0, 64, 2)),
    }  # fmt: skip
    engine, fresh = (start(folder, "on", **options) for folder in (heads.weak_model, heads.model))
    assert engine.backend.name == "cuda"
    found = answered(engine, PROMPTS[:2], settings(6)[:2], [heads.good, heads.weak], every=1)
    assert found == wanted
    params = [greedy(6, draft_vocab=name) for name in ("none", "default")]
    weak, good = (acceptance(own, PROMPTS[:2], params) for own in (engine, fresh))
    assert weak != good
    before = bits_of(engine)
    engine.swap_head(heads.good)
    assert acceptance(engine, PROMPTS[:2], params) == good
    assert bits_of(engine) == bits_of(fresh)
    engine.swap_head(heads.weak)
    assert bits_of(engine) == before
