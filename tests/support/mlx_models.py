"""Tiny checkpoints as mlx-lm converts them, plain or quantised, and what is left of their values.

Written down apart from the reader that is tested; the real mlx-lm is held against the engine by
scripts/interop/mlx_model_check.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from headstart.checkpoint.affine import Affine, dequantized, quantized
from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.values import as_bytes, load
from support.head_edits import Tensors, edited, head_names, tensors

CENTRED = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "step3p5")
_NORM = re.compile(r".*((input|post_attention)_layernorm|[qk]_norm|model\.norm)\.weight")
_EXPERT = re.compile(r"(.*\.mlp)\.experts\.([0-9]+)\.(.*)")
_STEP = {".moe.gate.": ".mlp.gate.gate.", ".moe.router_bias": ".mlp.gate.router_bias",
         ".moe.": ".mlp.switch_mlp.", ".share_expert.": ".mlp.share_expert."}  # fmt: skip


def _source(value: torch.Tensor) -> TensorSource:
    names = {torch.bfloat16: "BF16", torch.float32: "F32", torch.uint32: "U32"}
    return TensorSource(
        names[value.dtype], tuple(value.shape), lambda: (as_bytes(value),), is_copy=False
    )


def _trunk(folder: Path, family: str) -> Tensors:
    own = tensors(folder)
    beyond = set(head_names(folder).values())
    return {n: v for n, v in own.items() if n not in beyond}


def _shifted(name: str, value: torch.Tensor, family: str) -> torch.Tensor:
    is_norm = "norm" in name if family == "step3p5" else _NORM.fullmatch(name)
    return value + 1 if family in CENTRED and is_norm and value.dim() == 1 else value


def _renamed(name: str, family: str) -> str:
    if family.startswith("qwen3_5"):
        if name.startswith("lm_head"):
            return f"language_model.{name}"
        return name.replace("model.language_model.", "language_model.model.")
    for theirs, ours in _STEP.items() if family == "step3p5" else ():
        if theirs in name:
            return name.replace(theirs, ours)
    return name


def converted(
    folder: Path, family: str, out: Path, how: Affine | None = None, **config: Any
) -> Path:
    """The model without its head; its matrices quantised where `how` is given."""
    document = json.loads((folder / "config.json").read_text())
    fields = document.get("text_config", document)
    made: Tensors = {}
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for name, value in _trunk(folder, family).items():
        stacked = _EXPERT.fullmatch(name)
        if stacked is not None:
            at = f"{_renamed(stacked[1], family)}.switch_mlp.{stacked[3]}"
            stacks.setdefault(at, {})[int(stacked[2])] = value
        elif name.endswith("kv_b_proj.weight"):
            heads, nope = fields["num_attention_heads"], fields["qk_nope_head_dim"]
            parts = value.view(heads, -1, value.shape[1])
            stem = name.removesuffix("kv_b_proj.weight")
            made[f"{stem}embed_q.weight"] = parts[:, :nope].transpose(1, 2).contiguous()
            made[f"{stem}unembed_out.weight"] = parts[:, nope:].contiguous()
        elif name.endswith("conv1d.weight"):
            made[_renamed(name, family)] = value.transpose(1, 2).contiguous()
        else:
            made[_renamed(name, family)] = _shifted(name, value, family)
    for name, each in stacks.items():
        made[name] = torch.stack([each[number] for number in range(len(each))])
    if how is not None:
        made = _quantised(made, how)
        config["quantization"] = {"group_size": how.group_size, "bits": how.bits}
    out.mkdir()
    (out / "config.json").write_text(json.dumps({**document, **config}))
    save_file({n: v.contiguous() for n, v in made.items()}, out / "model.safetensors",
              metadata={"format": "mlx"})  # fmt: skip
    return out


def _is_quantised(name: str, value: torch.Tensor, how: Affine) -> bool:
    is_weight = name.endswith(".weight") and "conv1d" not in name and "router" not in name
    return is_weight and value.dim() > 1 and how.fits(tuple(value.shape))


def _quantised(made: Tensors, how: Affine) -> Tensors:
    result: Tensors = {}
    for name, value in made.items():
        if not _is_quantised(name, value, how):
            result[name] = value
            continue
        for part, source in quantized(_source(value), how).items():
            result[f"{name.removesuffix('weight')}{part}"] = load(source)
    return result


def _rounded(value: torch.Tensor, how: Affine) -> torch.Tensor:
    parts = quantized(_source(value), how)
    return load(dequantized("x", parts["weight"], parts["scales"], parts["biases"], how))


def dequantised(folder: Path, family: str, out: Path, how: Affine | None) -> Path:
    """The checkpoint with the values that MLX kept: norms rounded beside 1, matrices in groups."""
    document = json.loads((folder / "config.json").read_text())
    fields = document.get("text_config", document)
    trunk = _trunk(folder, family)

    def change(own: Tensors) -> None:
        for name, value in trunk.items():
            moved = _shifted(name, value, family)
            if moved is not value:
                own[name] = moved.float() - 1
            elif how is None or not name.endswith(".weight") or value.dim() < 2:
                continue
            elif name.endswith("kv_b_proj.weight"):
                heads, nope = fields["num_attention_heads"], fields["qk_nope_head_dim"]
                parts = value.view(heads, -1, value.shape[1])
                key = _rounded(parts[:, :nope].transpose(1, 2).contiguous(), how).transpose(1, 2)
                both = torch.cat([key, _rounded(parts[:, nope:].contiguous(), how)], dim=1)
                own[name] = both.reshape(value.shape).contiguous()
            elif _is_quantised(name, value, how):
                own[name] = _rounded(value, how)

    return edited(folder, out, change=change)
