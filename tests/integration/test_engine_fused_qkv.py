"""MiMo-V2.5: q, k and v in one tensor, stored for several ranks one after another. The engine says
and counts what it does where they are stored apart, plain and as block FP8."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_runs import (
    assert_head_is_alive,
    checkpoint,
    greedy,
    ids_of,
    make_prompts,
    run,
    start,
)
from support.head_edits import Tensors, edited
from support.long_runs import unless_long
from support.tiny_fixture import Tiny

from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.values import load
from headstart.heads.detection import find_head
from headstart.heads.head import head_of
from headstart.models.build import build
from headstart.models.head_parts import split_parameters

PROMPTS = make_prompts(4)
# each of four ranks has 320 rows, in layers that see all and in those with a window
WIDE = {
    "head_dim": 96, "v_head_dim": 32, "swa_head_dim": 64, "swa_v_head_dim": 32,
    "partial_rotary_factor": 0.5,
}  # fmt: skip
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def apart(tiny: Tiny, ranks: int, **sizes: Any) -> Path:
    """A checkpoint of V2-Flash with as many K/V heads as there are to be ranks."""
    kv_heads = {"num_key_value_heads": ranks, "swa_num_key_value_heads": max(8, ranks)}
    heads = {"num_attention_heads": 8, "swa_num_attention_heads": 8}
    return checkpoint(tiny, "mimo_v2", **heads, **kv_heads, **sizes)


def by_rank(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranks: int) -> torch.Tensor:
    shares = [part.chunk(ranks) for part in (q, k, v)]
    return torch.cat([share[rank] for rank in range(ranks) for share in shares])


def fused(folder: Path, out: Path, join: Callable[..., torch.Tensor], **config: Any) -> Path:
    """The same as a release of V2.5 stores it."""

    def change(own: Tensors) -> None:
        for name in [n for n in own if n.endswith("self_attn.q_proj.weight")]:
            at = name.removesuffix("q_proj.weight")
            own[f"{at}qkv_proj.weight"] = join(*(own.pop(f"{at}{p}_proj.weight") for p in "qkv"))

    def declare(document: dict[str, Any]) -> None:
        document |= {"model_type": "mimo_v2", "architectures": ["MiMoV2ForCausalLM"], **config}

    return edited(folder, out, change=change, change_config=declare)


def said(folder: Path, k: int, **settings: Any) -> tuple[list[list[int]], list[int]]:
    engine = start(folder, speculate=k, slots=6000, **settings)
    results = run(engine, PROMPTS, greedy(16))
    if k == 3:
        assert_head_is_alive(results)
    return ids_of(results), engine.stats.acceptance.accepted


@pytest.mark.parametrize("ranks", unless_long([4], [2, 4, 8]))
def test_a_fused_qkv_runs_as_if_it_were_stored_apart(
    ranks: int, tiny: Tiny, tmp_path: Path
) -> None:
    folder = apart(tiny, ranks)
    layout = {"attention_projection_layout": "fused_qkv"}
    model = fused(folder, tmp_path / "fused", lambda *parts: by_rank(*parts, ranks), **layout)
    assert find_head(Checkpoint.open(model)).missing == ()
    for k in unless_long([0, 3], [0, 1, 2, 3, 4]):
        assert said(model, k) == said(folder, k)
    assert said(model, 3, kv_bytes=800_000)[0] == said(folder, 0)[0], "with little memory"
    plain = fused(folder, tmp_path / "plain", lambda *parts: torch.cat(parts), **layout)
    assert said(plain, 3) != said(model, 3), "as if for one rank"


def test_blocks_of_scales_begin_anew_with_every_rank(tiny: Tiny, tmp_path: Path) -> None:
    """The rows of a rank are no multiple of 128: more scales than for all rows at once."""
    folder, ranks = apart(tiny, 4, **WIDE), 4
    model = fused(folder, tmp_path / "fused", lambda *parts: by_rank(*parts, ranks))
    expected: Tensors = {}

    def quantize(own: Tensors) -> None:
        for name in [n for n in own if n.endswith("qkv_proj.weight")]:
            codes, scales, values = [], [], []
            for share in own[name].chunk(ranks):
                assert len(share) % 128
                for block in share.split(128):
                    scale = block.abs().max() / 448
                    code = (block / scale).to(torch.float8_e4m3fn)
                    codes.append(code)
                    scales.append(scale.view(1, 1))
                    values.append(code.float() * scale)
            own[name], own[f"{name}_scale_inv"] = torch.cat(codes), torch.cat(scales)
            expected[name] = torch.cat(values)
            assert len(scales) > -(-len(expected[name]) // 128)

    stored = edited(
        model, tmp_path / "fp8", change=quantize,
        change_config=lambda document: document.update(quantization_config=FP8),
    )  # fmt: skip
    values = edited(model, tmp_path / "values", change=lambda own: own.update(expected))
    for k in (0, 3):
        assert said(stored, k, dtype="float32") == said(values, k, dtype="float32")


def test_a_trained_head_is_written_in_the_order_it_was_stored(tiny: Tiny, tmp_path: Path) -> None:
    model = fused(apart(tiny, 4), tmp_path / "fused", lambda *parts: by_rank(*parts, 4))
    opened = Checkpoint.open(model)
    built, stored = build(opened, device="cpu", dtype="float32"), head_of(opened)
    assert built.head is not None
    found = split_parameters(dict(built.head.named_parameters()), built.head.config, stored.tensors)
    assert set(found) == set(stored.tensors)
    assert all(torch.equal(value, load(stored.tensors[name])) for name, value in found.items())


def test_the_text_part_of_omni_runs_beside_what_it_leaves_out(tiny: Tiny, tmp_path: Path) -> None:
    folder = checkpoint(tiny, "mimo_v2")

    def change(own: Tensors) -> None:
        for name in ("visual.merger.mlp.0.weight", "speech_embeddings.0.weight"):
            own[name] = torch.ones(3, 4)

    def declare(document: dict[str, Any]) -> None:
        document |= {"model_type": "mimo_v2_omni", "architectures": ["MiMoV2OmniForCausalLM"]}

    model = edited(folder, tmp_path / "omni", change=change, change_config=declare)
    assert said(model, 3) == said(folder, 3)
    assert "2 tensors of the vision part" in " ".join(build(Checkpoint.open(model)).notes)
