"""Latent attention through the kernels against the plain modules; on the CPU interpreted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.tiny_fixture import Tiny

pytest.importorskip("triton")

from support.kernel_sizes import LATENT

from headstart.backends.cuda import prompts
from headstart.backends.cuda.forward import Kernels, Rows
from headstart.backends.cuda.latent import paged_latent
from headstart.backends.cuda.prompts import heads_at_once, latent_rows
from headstart.backends.cuda.support import why_unsupported
from headstart.calibrate.tiny_configs import TINY_CONFIGS
from headstart.checkpoint.reader import Checkpoint
from headstart.models.attention import LayerCache, PagedContext, Span, empty_cache
from headstart.models.build import build
from headstart.models.config_reader import model_config

pytestmark = pytest.mark.usefixtures("quick_kernels")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE, SLOTS = 4, 160


class Rig:
    """One layer of random weights, and the same cache for both ways."""

    def __init__(self, tiny: Tiny, **changes: Any):
        folder = tiny("deepseek_v3", seed=1, dtype="F32", **{**LATENT, **changes})
        built = build(Checkpoint.open(folder), device=DEVICE, dtype="float32", with_head=False)
        self.trunk, config = built.trunk, built.config
        draw = torch.Generator(DEVICE).manual_seed(0)
        for weight in self.trunk.parameters():  # attention shall count
            if weight.dim() > 1:
                weight.normal_(std=0.3, generator=draw)
        device = torch.device(DEVICE)
        self.cache = empty_cache(config.kept(config.layers[0]), SLOTS, torch.float32, device)
        self.cache.k.normal_(generator=draw)

    @torch.inference_mode()
    def plain(self, ids: torch.Tensor, positions: torch.Tensor, spans: list[Span]) -> torch.Tensor:
        cache = LayerCache(self.cache.k.clone(), self.cache.v)
        return self.trunk.final_norm(self.trunk(ids, positions, [PagedContext(cache, spans)]))

    @torch.inference_mode()
    def fused(self, ids: torch.Tensor, rows: Rows) -> torch.Tensor:
        return Kernels().trunk(self.trunk, ids, rows, [self.cache])[1]


def numbers(*values: int, kind: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=kind, device=DEVICE)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None}], ids=["latent", "no latent"])
def test_rows_of_a_round_get_the_plain_states(
    rows: int, changes: dict[str, Any], tiny: Tiny
) -> None:
    """Two requests of other lengths, and an unused index between them."""
    rig = Rig(tiny, **changes)
    seen = [37, -1, 9]
    tables = numbers(*range(30, 10, -1), *range(10), *range(10), kind=torch.int32).view(-1, 10)
    tables = torch.stack([tables[0], tables[2], tables[2]])
    positions, kv_slots, spans = [], [], []
    for index, first in enumerate(seen):
        own = [max(0, first) + row for row in range(rows)]
        positions += own
        if first < 0:
            kv_slots += [-1] * rows
            continue
        context = torch.arange(own[-1] + 1, device=DEVICE)
        context = tables[index, context // PAGE].long() * PAGE + context % PAGE
        kv_slots += context[-rows:].tolist()
        spans.append(Span(index * rows, index * rows + rows, context[-rows:], context))
    ids = torch.arange(3, 3 + 3 * rows, device=DEVICE)
    taken = [row for span in spans for row in range(span.start, span.stop)]
    moved = [replace(span, start=i * rows, stop=(i + 1) * rows) for i, span in enumerate(spans)]
    wanted = rig.plain(ids[taken], numbers(*positions)[taken], moved)
    attend = paged_latent(
        tables, numbers(*seen, kind=torch.int32), rows, block_size=PAGE, max_context=40,
        first_slot=0,
    )  # fmt: skip
    where = Rows(numbers(*positions), numbers(*kv_slots, kind=torch.int32), _unused, latent=attend)
    found = rig.fused(ids, where)[taken]
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    rig.cache.k.copy_(rig.cache.k.roll(5, 0))  # the control: another context, other states
    assert (rig.fused(ids, where)[taken] - wanted).abs().max() > 1e-1


def _unused(q: torch.Tensor, cache: LayerCache) -> torch.Tensor:
    raise AssertionError("there are no keys and values")


@pytest.mark.parametrize("most", [1 << 28, 1], ids=["at once", "head by head"])
@pytest.mark.parametrize("counts", [(20,), (2, 1), (3, 20, 1, 18)], ids=str)
def test_ragged_rows_get_the_plain_states(
    counts: tuple[int, ...], most: int, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of prompts unfold what they see, a few rows of a request do not."""
    monkeypatch.setattr(prompts, "MOST_UNFOLDED", most)
    rig = Rig(tiny)
    lengths = [count + 5 * (index % 2) for index, count in enumerate(counts)]
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    spans, positions, start = [], [], 0
    for count, length, own in zip(counts, lengths, slots.split(40), strict=False):
        spans.append(Span(start, start + count, own[length - count : length], own[:length]))
        positions += range(length - count, length)
        start += count
    ids = torch.arange(3, 3 + start, device=DEVICE)
    wanted = rig.plain(ids, numbers(*positions), spans)
    found = rig.fused(ids, latent_rows(spans, numbers(*positions)))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def test_as_many_heads_are_unfolded_as_there_is_room_for() -> None:
    assert heads_at_once(128, 512, 256) == 128
    assert heads_at_once(128, 1 << 16, 256) == 16
    assert heads_at_once(128, 1 << 22, 256) == 1


def test_what_there_are_no_kernels_for_is_refused() -> None:
    config = model_config(TINY_CONFIGS["glm4_moe_lite"])
    assert why_unsupported(config) is None and config.mla is not None
    wide = replace(config, mla=replace(config.mla, kv_rank=576))
    assert why_unsupported(wide) == "the model keeps latents of 576 + 64 numbers"
    wide = replace(config, mla=replace(config.mla, v_dim=320))
    assert why_unsupported(wide) == "the model has heads of size 320"
    sparse = model_config(TINY_CONFIGS["deepseek_v32"])
    assert why_unsupported(sparse) is None and sparse.mla is not None and sparse.mla.index
    pooled = replace(sparse.mla, index=replace(sparse.mla.index, pool=4))
    reason = why_unsupported(replace(sparse, mla=pooled))
    assert reason == "deepseek_v32 models choose pools of tokens by an indexer"
