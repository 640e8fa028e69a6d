"""Drafting with rounded weights changes what is accepted at most, never the text."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from support.engine_runs import assert_head_is_alive, ids_of
from support.tiny_fixture import Tiny
from test_engine_kernels import PROMPTS, model, settings, start

pytest.importorskip("triton")

from headstart.backends.cuda import forward
from headstart.backends.cuda.kernels import int8_choice
from headstart.errors import ConfigError
from headstart.models.linear import Linear

pytestmark = pytest.mark.usefixtures("quick_kernels")


def test_the_text_is_that_of_unrounded_weights(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model(tiny)
    wanted = ids_of(start(folder, "off", speculate=0).generate(PROMPTS[:2], settings()[:2]))
    rounded = start(folder, "on", draft_weights="int8")
    used: Counter[str] = Counter()

    def counted(name: str, own: Any) -> Any:
        def run(*given: Any) -> Any:
            used[name] += 1
            return own(*given)

        return run

    for place, name in (
        (int8_choice, "choose_int8"), (forward, "partial_int8"), (forward, "gated_int8"),
    ):  # fmt: skip
        monkeypatch.setattr(place, name, counted(name, getattr(place, name)))
    found = rounded.generate(PROMPTS[:2], settings()[:2])
    assert all(used[name] > 0 for name in ("choose_int8", "partial_int8", "gated_int8"))
    assert ids_of(found) == wanted
    assert_head_is_alive(found)
    drafting = rounded.loop.rounds._device.graphs.model
    assert drafting.drafting[0].lm_head(1).int8.weight.dtype == torch.int8
    assert drafting.head.module(1).fuse.int8.weight.dtype == torch.int8
    kept = [m for m in rounded.model.trunk.modules() if isinstance(m, Linear)]
    assert kept and all(layer.int8 is None for layer in kept), "only what drafts is rounded"


@pytest.mark.parametrize(
    ("options", "words"),
    [({"exact": True}, "exact runs everything"), ({"speculate": 0}, "runs without a head")],
)
def test_an_option_without_effect_is_refused(
    options: dict[str, Any], words: str, tiny: Tiny
) -> None:
    with pytest.raises(ConfigError, match=words):
        start(model(tiny), "on", draft_weights="int8", **options)


def test_the_plain_path_does_not_round_drafts(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match="only the kernels of the GPU path have it"):
        start(model(tiny), "off", draft_weights="int8")
