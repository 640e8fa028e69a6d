"""Models that MLX converted, in the engine: plain, quantised, with the head given back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import mlx_models
from support.engine_runs import assert_head_is_alive, greedy, ids_of
from support.gguf_trunks import SLIDING
from support.long_runs import unless_long
from support.tiny_fixture import Tiny

from headstart.checkpoint.affine import Affine
from headstart.engine.engine import Engine
from headstart.errors import BadConfig, MissingTensor, ShapeMismatch, UnsupportedFamily
from headstart.heads.digest import trunk_digest
from headstart.heads.formats import open_any, open_head, open_runnable
from headstart.heads.stitch import plan_restore
from headstart.models.build import build
from headstart.models.documents import Documents
from headstart.models.unroll import trunk_states

FAMILIES: dict[str, dict[str, Any]] = {
    "mimo": {}, "qwen3_5": {}, "qwen3_5_moe": {}, "qwen3_next": {}, "glm4_moe": {},
    "glm4_moe_lite": {}, "deepseek_v3": {}, "deepseek_v32": {}, "glm_moe_dsa": {},
    "step3p5": SLIDING,
}  # fmt: skip
Q4, Q8 = Affine(4, 64), Affine(8, 32)
USUAL = [("mimo", Q4), ("qwen3_5", None), ("glm4_moe", Q8)]
ALL = [(family, how) for family in FAMILIES for how in (None, Q4, Q8)]


def logits(path: Path) -> torch.Tensor:
    built = build(open_runnable(path), device="cpu", dtype="float32", max_model_len=64)
    ids = torch.tensor([3, 17, 42, 99, 5, 8, 61])
    states = trunk_states(built.trunk, ids, Documents((len(ids),)), "after_final_norm")
    return built.trunk.logits(states)


@pytest.mark.parametrize(("family", "how"), unless_long(USUAL, ALL))
def test_logits_are_those_of_the_dequantised_checkpoint(
    tiny: Tiny, family: str, how: Affine | None, tmp_path: Path
) -> None:
    model = tiny(family, **FAMILIES[family])
    plain = mlx_models.dequantised(model, family, tmp_path / "plain", how)
    found = mlx_models.converted(model, family, tmp_path / "mlx", how)
    assert torch.equal(logits(found), logits(plain))
    if how is not None or family in mlx_models.CENTRED:  # control: the format shows
        assert not torch.equal(logits(found), logits(model))


def test_a_head_that_was_given_back_drafts_and_costs_are_said(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("qwen3_5")
    bare = mlx_models.converted(model, "qwen3_5", tmp_path / "mlx", Q8)
    source = open_head(model)
    plan_restore(open_any(bare), source.origin, source).write(tmp_path / "whole")
    prompts, params = [[3, 17, 42], [7]], greedy(8)
    texts = []
    for num_drafts in unless_long((0, 2), (0, 1, 2, 3)):
        engine = Engine(
            tmp_path / "whole", device="cpu", dtype="float32", speculate=num_drafts,
            max_model_len=32,
        )  # fmt: skip
        found = engine.generate(prompts, params)
        texts.append(ids_of(found))
        assert any("MLX, 8 bits in groups of 32" in note for note in engine.notes)
    assert texts == [texts[0]] * len(texts)
    assert_head_is_alive(found)
    with_head, without = (open_runnable(path) for path in (tmp_path / "whole", bare))
    assert trunk_digest(with_head) == trunk_digest(without)


def test_modules_may_be_quantised_in_their_own_way(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("mimo")
    found = mlx_models.converted(model, "mimo", tmp_path / "mlx", Q8)
    config = json.loads((found / "config.json").read_text())
    own = {"group_size": 32, "bits": 8}
    config["quantization"] = {"group_size": 64, "bits": 4} | {
        name.removesuffix(".scales"): own
        for name in load_file(found / "model.safetensors")
        if name.endswith(".scales")
    }
    right = logits(found)
    (found / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits(found), right)
    config["quantization"] = {"group_size": 64, "bits": 4}
    (found / "config.json").write_text(json.dumps(config))
    with pytest.raises(ShapeMismatch, match=r"has shape \(128, 512\); the config asks for"):
        logits(found)


def damaged(tiny: Tiny, out: Path, change: Any, **config: Any) -> Path:
    found = mlx_models.converted(tiny("mimo"), "mimo", out, Q4)
    own = load_file(found / "model.safetensors")
    change(own)
    save_file(own, found / "model.safetensors", metadata={"format": "mlx"})
    document = json.loads((found / "config.json").read_text())
    (found / "config.json").write_text(json.dumps({**document, **config}))
    return found


_AT = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("change", "config", "error", "said"),
    [
        (lambda own: own.pop(f"{_AT}.biases"), {}, UnsupportedFamily, "scales and no biases"),
        (lambda own: own.pop(f"{_AT}.scales"), {}, MissingTensor, "no scales are beside it"),
        (lambda own: [own.pop(f"{_AT}.{each}") for each in ("scales", "biases")], {},
         MissingTensor, "no scales are beside it"),
        (lambda own: None, {"quantization": {"mode": "mxfp4", "bits": 4, "group_size": 32}},
         BadConfig, "has mode mxfp4, bits 4, group_size 32; expected affine"),
        (lambda own: own.pop(f"{_AT}.weight"), {}, MissingTensor, "1 tensors are missing"),
    ],
    ids=["biases", "scales", "both", "mode", "weight"],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_by_name(
    tiny: Tiny, tmp_path: Path, change: Any, config: Any, error: Any, said: str
) -> None:
    with pytest.raises(error, match=said):
        logits(damaged(tiny, tmp_path / "x", change, **config))


def test_a_convolution_of_no_shape_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    found = mlx_models.converted(tiny("qwen3_5"), "qwen3_5", tmp_path / "mlx")
    own = load_file(found / "model.safetensors")
    name = next(name for name in own if name.endswith("conv1d.weight"))
    own[name] = torch.tensor(1.0)
    save_file(own, found / "model.safetensors", metadata={"format": "mlx"})
    with pytest.raises(ShapeMismatch, match=r"has shape \[\]; expected channels, taps and 1"):
        open_runnable(found)
