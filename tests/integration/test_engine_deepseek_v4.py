"""DeepSeek-V4 as released: experts in 4-bit floats, other matrices in 8-bit ones, each with powers
of two beside it. The engine says what it says of the values that they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.engine_runs import greedy, ids_of, make_prompts, run, start
from support.head_edits import Tensors, edited
from support.tiny_fixture import Tiny

_CODES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_FP8 = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3", "e_proj", "h_proj")
BLOCKS = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
    "weight_block_size": [128, 128], "scale_fmt": "ue8m0",
}  # fmt: skip


def four_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, exponents and values of a matrix."""
    groups = weight.unflatten(1, (-1, 32))
    exponents = (groups.abs().amax(-1) / 6).clamp_min(1e-9).log2().ceil()
    size = exponents.exp2().unsqueeze(-1)
    nearest = (groups.abs() / size).unsqueeze(-1).sub(_CODES).abs().argmin(-1)
    values = (_CODES[nearest] * size * groups.sign()).flatten(1)
    codes = (nearest + 8 * (groups < 0)).flatten(1).to(torch.uint8)
    packed = (codes[:, ::2] | (codes[:, 1::2] << 4)).view(torch.int8)
    scales = (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    return packed, scales, values


def eight_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    high, wide = (-(-n // 128) for n in weight.shape)
    codes, values = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    scales = torch.empty(high, wide)
    for i in range(high):
        for j in range(wide):
            part = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scales[i, j] = (weight[part].abs().max() / 448).clamp_min(1e-9).log2().ceil().exp2()
            codes[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
            values[part] = codes[part].float() * scales[i, j]
    return codes, scales.to(torch.float8_e8m0fnu), values


def test_what_is_stored_in_4_and_8_bits_says_what_its_values_say(
    tiny: Tiny, tmp_path: Path
) -> None:
    folder = tiny("deepseek_v4", rate=0.9, seed=1, dtype="F32", index_topk=3, sliding_window=6)
    plain: Tensors = {}

    def quantize(own: Tensors) -> None:
        for name in [n for n in own if n.split(".")[-2:][0] in _FP8 and "compressor" not in n]:
            form = four_bits if ".ffn.experts." in name else eight_bits
            stem = name.removesuffix("weight")
            own[name], own[f"{stem}scale"], plain[name] = form(own[name].float())

    def describe(document: dict[str, Any]) -> None:
        document |= {"quantization_config": BLOCKS, "expert_dtype": "fp4"}

    stored = edited(folder, tmp_path / "stored", change=quantize, change_config=describe)
    values = edited(folder, tmp_path / "values", change=lambda own: own.update(plain))
    prompts, found = make_prompts(2), []
    for model, k in ((values, 0), (stored, 0), (stored, 3)):
        engine = start(model, speculate=k, dtype="float32", slots=4000)
        found.append(ids_of(run(engine, prompts, greedy(8))))
    assert found[0] == found[1] == found[2]
    assert sum(engine.stats.acceptance.accepted) > 0
