"""Tiny checkpoints in every quantised format: those that `calibrate` writes, and some more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from headstart.calibrate.folder import write_made
from headstart.checkpoint.quantized.packing import pack
from headstart.checkpoint.quantized.writing import FORMATS, stored_in
from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.values import in_memory, load
from headstart.heads.ignore_lists import without
from headstart.heads.quantized_copy import copy_in
from support.engine_runs import checkpoint
from support.head_edits import Tensors, edited
from support.quantized_formats import ALSO_READ
from support.tiny_fixture import Tiny


def _is_projection(name: str) -> bool:
    return "model.layers." in name and name.endswith("_proj.weight")


def _sorted_gptq(own: Tensors) -> None:
    """GPTQ with activation order and asymmetric zero points; inputs of one layer sort alike."""
    for name in [n for n in own if _is_projection(n)]:
        module, values = name.removesuffix(".weight"), own.pop(name).float()
        columns = values.shape[1]
        draw = torch.Generator().manual_seed(columns)
        group = torch.randperm(columns, generator=draw) % (columns // 32)
        low = torch.stack([values[:, group == g].amin(1) for g in range(columns // 32)], 1)
        high = torch.stack([values[:, group == g].amax(1) for g in range(columns // 32)], 1)
        scales = ((high - low) / 15).clamp(min=1e-4).half()
        zeros = (-low / scales.float()).round().clamp(0, 15)
        codes = (values / scales[:, group].float()).round() + zeros[:, group]
        own[f"{module}.qweight"] = pack(codes.clamp(0, 15).byte(), 4).t().contiguous()
        own[f"{module}.qzeros"] = pack(zeros.byte().t().contiguous(), 4)
        own[f"{module}.scales"] = scales.t().contiguous()
        own[f"{module}.g_idx"] = group.int()


def _asymmetric_int8(own: Tensors) -> None:
    for name in [n for n in own if _is_projection(n)]:
        values = own[name].float()
        scales = ((values.amax(1) - values.amin(1)) / 255).clamp(min=1e-6)[:, None]
        zeros = (-128 - values.amin(1, keepdim=True) / scales).round().clamp(-128, 127)
        own[name] = ((values / scales).round() + zeros).clamp(-128, 127).to(torch.int8)
        own[f"{name}_scale"] = scales
        own[f"{name}_zero_point"] = zeros.to(torch.int8)


def _grouped_int8(own: Tensors) -> None:
    for name in [n for n in own if _is_projection(n)]:
        groups = own[name].float().unflatten(1, (-1, 32))
        scales = (groups.abs().amax(2) / 127).clamp(min=1e-6).bfloat16()
        codes = (groups / scales.float()[..., None]).round().clamp(-128, 127)
        own[name], own[f"{name}_scale"] = codes.flatten(1).to(torch.int8), scales


_INT8 = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "channel"}
_INT8_GROUPS = {
    "num_bits": 8, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32,
}  # fmt: skip
_MADE: dict[str, tuple[Callable[[Tensors], None], dict[str, Any]]] = {
    "gptq-sorted": (
        _sorted_gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True,
         "checkpoint_format": "gptq_v2", "dynamic": {"-:.*mtp.*": {}}},
    ),
    "int8-asymmetric": (
        _asymmetric_int8,
        {"quant_method": "compressed-tensors", "format": "int-quantized",
         "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT8}},
         "ignore": ["lm_head", "re:.*mtp.*"]},
    ),
    "int8-group-plain": (
        _grouped_int8,
        {"quant_method": "compressed-tensors", "format": "int-quantized",
         "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT8_GROUPS}},
         "ignore": ["lm_head", "re:.*mtp.*"]},
    ),
}  # fmt: skip
_BY_MATRIX = {**FORMATS, **ALSO_READ}
ALL = (*_BY_MATRIX, *_MADE)
assert len(set(ALL)) == len(ALL)
VALUES = ("nvfp4", "mxfp4", "mxfp8", "fp8-small-blocks")  # those that no backend computes with


def quantized_model(tiny: Tiny, form: str, family: str = "mimo", **changes: Any) -> Path:
    """A tiny model with its head, its projections in `form`; made once in a session."""
    plain = plain_model(tiny, family, **changes)
    out = plain.parent / f"{plain.name}-{form}"
    if out.exists():
        return out
    if form in _BY_MATRIX:
        model = Checkpoint.open(plain)
        sources = {name: model.source(name) for name in model.tensors}
        config, made = copy_in(_BY_MATRIX[form], model.config.raw, sources)
        write_made(config, made, out, facts={})
        return out
    change, method = _MADE[form]
    return edited(
        plain, out, change=change, change_config=lambda c: c.update(quantization_config=method)
    )


def plain_model(tiny: Tiny, family: str = "mimo", **changes: Any) -> Path:
    return checkpoint(tiny, family, **changes)


def with_quantized_lm_head(tiny: Tiny, form: str, **changes: Any) -> Path:
    """The same with its LM head in that format, too."""
    folder = quantized_model(tiny, form, **changes)
    out = folder.parent / f"{folder.name}-lm-head"
    if out.exists():
        return out

    def change(own: Tensors) -> None:
        columns = own["lm_head.weight"].shape[1]
        made = stored_in(
            FORMATS[form], "lm_head", in_memory(own.pop("lm_head.weight")), _group(own, columns)
        )
        own.update({name: load(source) for name, source in made.items()})

    def change_config(config: dict[str, Any]) -> None:
        quantization = without(config["quantization_config"], ["lm_head"])
        config["quantization_config"] = quantization | (
            {"lm_head": True} if "lm_head" in quantization else {}
        )

    return edited(folder, out, change=change, change_config=change_config)


def _group(own: Tensors, columns: int) -> int:
    """How many columns of the model's matrices share a scale, where a row has several."""
    at = "model.layers.0.self_attn.q_proj."
    for name, dim in (("scales", 0), ("weight_scale", 1)):
        scales = own.get(f"{at}{name}")
        if scales is not None and scales.dim() == 2:
            return columns // scales.shape[dim]
    return 0
