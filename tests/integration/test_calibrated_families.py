"""Calibrated checkpoints of families beyond dense: the engine counts what the cycle says."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.engine_runs import AGREEING, SIZES, VOCAB, checkpoint, greedy, run, start
from support.long_runs import one_of_each, unless_long
from support.tiny_fixture import Tiny

from headstart.calibrate.agreement import make_agreement, walk
from headstart.calibrate.calibrated import write_calibrated
from headstart.calibrate.tensors import EXACT

FAMILIES = (
    "glm4_moe", "ernie4_5_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "deepseek_v3",
    "glm4_moe_lite", "mimo_v2", "deepseek_v32", "glm_moe_dsa", "step3p5",
    "nemotron_h", "bailing_moe_v3", "exaone_moe", "exaone4_5",
    "mellum", "hy_v4", "glm5_next", "qwen4_exp", "deepseek_v4", "bailing_moe_v2",
    "qwen3_moe",
)  # fmt: skip


@pytest.mark.parametrize("family", one_of_each(3, FAMILIES))
def test_calibrated_counters_are_those_of_the_walk(family: str, tiny: Tiny) -> None:
    folder = checkpoint(tiny, family, rate=0.7, disturbance=EXACT)
    known = make_agreement(VOCAB, SIZES["hidden_size"], rate=0.7, seed=AGREEING["seed"])
    engine = start(folder, speculate=3)
    for last in (4, 21, 50):
        (result,) = run(engine, [[3, 9, last]], greedy(30))
        found = result.stats.acceptance
        assert [found.drafted, found.accepted] == walk(known, last, 30, 3)


# what of a released shape is made smaller, and what then mixes the rows of its layers
SMALL = "hidden=128,intermediate=96,heads=2,vocab=64"
NAMED = {
    "qwen3.5-27b": ("layers=4,kv_heads=1,head_dim=16", ["delta"] * 3 + ["attention"]),
    "deepseek-v3": ("layers=4,experts=16", ["latent"] * 4),
    "mimo-v2.5": ("layers=2,kv_heads=2,experts=8", ["attention", "sliding"]),
    "glm-5.3-flash": ("layers=4,experts=16", ["delta"] * 3 + ["latent"]),
    "hy4-preview": ("layers=3,experts=16", ["latent"] * 3),
    "qwen3.8-flash-next": (
        "layers=4,experts=16,kv_heads=1,head_dim=16", ["delta"] * 3 + ["indexed"],
    ),
    "deepseek-v4-flash": (
        "layers=4,experts=16,heads=8,head_dim=128,kv_heads=1", ["compressed"] * 4,
    ),
    "mellum-2": ("layers=4,experts=16,kv_heads=1,head_dim=16", ["sliding"] * 3 + ["attention"]),
    "qwen3-30b-a3b": ("layers=3,experts=16,kv_heads=1,head_dim=16", ["attention"] * 3),
    "k-exaone-236b": (
        "layers=4,experts=16,kv_heads=1,head_dim=16", ["sliding"] * 3 + ["attention"],
    ),
    "exaone-4.5-33b": ("layers=4,kv_heads=1,head_dim=16", ["sliding"] * 3 + ["attention"]),
    "ling-3-flash": ("layers=6,experts=16", ["delta"] * 5 + ["latent"]),
    "ling-mini-2": ("layers=3,experts=16,kv_heads=1,head_dim=16", ["attention"] * 3),
    "nemotron-3-super": (
        "layers=8,experts=32,kv_heads=1,head_dim=16",
        ["mamba", "none"] * 3 + ["mamba", "attention"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", unless_long(list(NAMED)[:2], list(NAMED)))
def test_a_named_shape_of_fewer_layers_runs(name: str, tmp_path: Path) -> None:
    sizes, mixers = NAMED[name]
    write_calibrated(f"{name},{SMALL},{sizes}", 0.7, tmp_path / "out", dtype="F32")
    known = make_agreement(64, 128, rate=0.7, seed=0, active=62)
    engine = start(
        tmp_path / "out", speculate=3, dtype="float32", kv_bytes=400_000_000, max_model_len=256
    )
    assert [kind.mixer for kind in engine.model.config.layers] == mixers
    (result,) = run(engine, [[3, 9, 21]], greedy(30))
    found = result.stats.acceptance
    assert [found.drafted, found.accepted] == walk(known, 21, 30, 3)
