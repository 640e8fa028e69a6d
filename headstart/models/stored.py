"""Trunk and head as a checkpoint stores them: the trunk's tensors, and a head into modules.

Tensors that are stored in 8 bits are dequantised while they are read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Literal

import torch

from headstart.checkpoint.config import Config
from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.source import TensorSource
from headstart.errors import ConfigError, UnsupportedFamily, some
from headstart.families.base import Family
from headstart.heads.head import Head, dequantize
from headstart.checkpoint.quantized.names import dequantized, is_quantized, is_scale, scale_of
from headstart.models.config import ModelConfig, model_config
from headstart.models.loading import load_head, materialize
from headstart.models.mtp import MTPHead
from headstart.models.rope import RotaryTable

# Scales of what this engine keeps in full precision: activations, keys and values.
_UNUSED_SCALES = {
    "activations": ("input_scale", "input_global_scale"),
    "keys and values": ("k_scale", "v_scale", "q_scale", "kv_scale"),
}


def trunk_tensors(
    checkpoint: Checkpoint, family: Family | None, head: Collection[str], notes: list[str]
) -> dict[str, TensorSource]:
    """Published tensors of the trunk; `head` are the published names of the head's own."""
    vision_prefixes = family.trunk.beside if family is not None else ()
    vision = {name for name in checkpoint.tensors if name.startswith(vision_prefixes)}
    if vision:
        notes.append(f"text only: {len(vision)} tensors of the vision part are not loaded")
    left_out = {*head, *vision}
    stored = {n: checkpoint.source(n) for n in checkpoint.tensors if n not in left_out}
    offsets = [name for name in stored if name.endswith("weight_zero_point")]
    if offsets:
        raise UnsupportedFamily(
            f"the weights have zero points ({some(offsets)}), which are not dequantised here; "
            "expected a symmetric scheme. Take another quantisation of the model."
        )
    quantized = [name for name, source in stored.items() if is_quantized(name, source)]
    for name in quantized:
        _refuse_groups(name, stored)
    result = {
        name: dequantized(name, stored) if name in quantized else source
        for name, source in stored.items()
        if not is_scale(name)
    }
    used = {scale_of(name, stored) for name in quantized}
    left = [name for name in stored if is_scale(name) and name not in used]
    for what, endings in _UNUSED_SCALES.items():
        own = [name for name in left if name.rpartition(".")[2] in endings]
        if own:
            notes.append(f"{what} stay unquantised here; not used: {some(own)}")
        left = [name for name in left if name not in own]
    beside = {scale_of(name, stored) for name in result if name not in quantized}
    stale = [name for name in left if name in beside]
    if stale:
        notes.append(f"not applied, their weights are stored unquantised: {some(stale)}")
    # Anything else is refused by name when the trunk is filled.
    return {**result, **{name: stored[name] for name in left if name not in stale}}


def _refuse_groups(name: str, stored: Mapping[str, TensorSource]) -> None:
    scale = stored.get(scale_of(name, stored) or "")
    if scale is None or len(scale.shape) != 2 or len(stored[name].shape) != 2:
        return
    rows, columns = stored[name].shape
    groups = scale.shape[1]
    if scale.shape[0] == rows > 1 and groups > 1 and columns % groups == 0:
        raise UnsupportedFamily(
            f"{name} is quantised in groups of {columns // groups} columns ({groups} scales per "
            "row), which is not dequantised here; expected one scale per row, per 128x128 block "
            "or per tensor. Take another quantisation of the model."
        )


Layout = Literal["own", "vllm", "sglang"]


def load_stored_head(
    head: Head,
    trunk: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    run_as: Layout,
    max_len: int,
) -> MTPHead:
    """The head on the device, run as its family or as an engine does; it must fit the trunk."""
    head = dequantize(head)
    config = _as_stored(model_config(Config(dict(head.config)).fields), head)
    if (config.hidden, config.vocab) != (trunk.hidden, trunk.vocab):
        raise ConfigError(
            f"the head is for hidden {config.hidden} and {config.vocab} tokens, the model has "
            f"{trunk.hidden} and {trunk.vocab}. Take the head of this model."
        )
    if replace(config.rope, dim=trunk.rope.dim) != trunk.rope:
        raise ConfigError(
            f"the head rotates positions by {config.rope}, the model by {trunk.rope}. Take the "
            "head of this model, or correct the head's config."
        )
    layout = head.family.layout
    if run_as != "own":
        layout = layout.as_(run_as)
    count, tensors = head.num_modules, head.tensors
    if layout.topology == "recursive" and head.family.layout.topology != "recursive":
        # the way of an engine that runs the first module again and again
        count, tensors = 1, {n: t for n, t in tensors.items() if n.startswith("modules.0.")}
    with torch.device("meta"):
        module = MTPHead(config, layout, count)
    materialize(module, device, dtype)
    load_head(module, tensors, config)
    rope = config.shape(config.head_layer).rope
    if layout.rotates_halves:
        rope = replace(rope, is_interleaved=False)
    if rope != trunk.rope:  # other head_dim, or other pairs
        module.rotate_by(RotaryTable(rope, max_len, dtype).to(device))
    return module


def _as_stored(config: ModelConfig, head: Head) -> ModelConfig:
    """Some heads have a dense block where the family's usual one has experts: tensors decide."""
    if "modules.0.block.mlp.gate_proj.weight" not in head.tensors:
        return config
    return replace(config, head_layer=replace(config.head_layer, feed="dense"))
