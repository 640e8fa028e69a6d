"""A plain checkpoint in a quantised format, as releases of that format are stored.

The projections of trunk layers are quantised; embeddings, LM head, norms, routers, small gates and
the head's fusion stay plain. FP8 releases quantise the head's block, too; those in 4 bits leave the
head alone, and list it under every name that engines ask for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headstart.checkpoint.config import Config
from headstart.checkpoint.quantized.writing import FORMATS, WrittenFormat, stored_in
from headstart.checkpoint.source import TensorSource
from headstart.errors import ConfigError, some
from headstart.families.base import Family
from headstart.families.names import Naming
from headstart.families.registry import match_family
from headstart.heads.ignore_lists import fused_lookups, lookups, with_unquantized

Tensors = Mapping[str, TensorSource]
PROJECTIONS = (
    "q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "q_a_proj", "q_b_proj",
    "kv_a_proj_with_mqa", "kv_b_proj", "gate_proj", "up_proj", "down_proj", "gate_up_proj",
    "in_proj_qkvz", "in_proj_qkv", "in_proj_z", "out_proj",
)  # fmt: skip


def quantized_copy(
    config: dict[str, Any], tensors: Tensors, weights: str
) -> tuple[dict[str, Any], dict[str, TensorSource]]:
    """Config and tensors of the same checkpoint with its projections in the format `weights`."""
    return copy_in(format_named(weights), config, tensors)


def format_named(weights: str) -> WrittenFormat:
    if weights not in FORMATS:
        raise ConfigError(f"--weights is {weights!r}; expected one of {', '.join(FORMATS)}.")
    return FORMATS[weights]


def copy_in(
    form: WrittenFormat, config: dict[str, Any], tensors: Tensors
) -> tuple[dict[str, Any], dict[str, TensorSource]]:
    """The same for a format that has no name."""
    head, own = _head_names(config, tensors), {}
    for name, source in tensors.items():
        module, _, parameter = name.rpartition(".")
        is_projection = module.rpartition(".")[2] in PROJECTIONS and parameter == "weight"
        fits = len(source.shape) == 2 and source.shape[0] % form.outputs == 0
        if is_projection and fits and (form.quantizes_head or name not in head):
            own[name] = source
    group = _group(own, form)
    result: dict[str, TensorSource] = {}
    for name, source in tensors.items():
        if name in own:
            result.update(stored_in(form, name.removesuffix(".weight"), source, group))
        else:
            result[name] = source
    return {**config, "quantization_config": _listed(config, tensors, own, form.config(group))}, (
        result
    )


def _group(own: Tensors, form: WrittenFormat) -> int:
    if not own:
        raise ConfigError("--weights was given and no projection of the model can be quantised.")
    fitting = [g for g in form.groups if all(s.shape[1] % g == 0 for s in own.values())]
    if form.groups and not fitting:
        odd = [name for name, s in own.items() if s.shape[1] % form.groups[-1]]
        raise ConfigError(
            f"--weights: {some(odd)} has rows that are no whole number of groups of "
            f"{', '.join(map(str, form.groups))}. Use --weights fp8-block or fp8-row, or other "
            "sizes."
        )
    return fitting[0] if fitting else 0


def _family(config: dict[str, Any], tensors: Tensors) -> tuple[Family, Naming] | None:
    parsed = Config(config)
    owner = match_family(parsed.fields, parsed.model_types, parsed.architectures)
    if owner is None:
        return None
    return owner, owner.keys.find_root(list(tensors), owner.naming(parsed.fields))


def _head_names(config: dict[str, Any], tensors: Tensors) -> dict[str, str]:
    """Published name -> our name, of the head's tensors."""
    found = _family(config, tensors)
    if found is None:
        return {}
    owner, naming = found
    ours = {name: owner.keys.to_ours(name, naming) for name in tensors}
    return {name: own for name, own in ours.items() if own is not None}


def _listed(
    config: dict[str, Any], tensors: Tensors, own: Tensors, quantization: dict[str, Any]
) -> dict[str, Any]:
    """The quantisation config with every module that stays plain on its list."""
    head = _head_names(config, tensors)
    plain = [
        name.removesuffix(".weight")
        for name, source in tensors.items()
        if name.endswith(".weight") and len(source.shape) == 2 and name not in own
        and "embed_tokens" not in name
    ]  # fmt: skip
    names = [module for module in plain if f"{module}.weight" not in head]
    found = _family(config, tensors)
    if found is not None:
        ours = [head[f"{m}.weight"].removesuffix(".weight") for m in plain if f"{m}.weight" in head]
        own_modules = [module for module in ours if not module.endswith("lm_head")]
        names += lookups(*found, own_modules)
    if quantization["quant_method"] == "awq":
        # An entry of AWQ excludes every module that it is a part of the name of.
        modules = [name.removesuffix(".weight") for name in own]
        asked = {*modules, *(fused for module in modules for fused in fused_lookups(module))}
        names = [name for name in names if not any(name in module for module in asked)]
    return with_unquantized(quantization, names)
