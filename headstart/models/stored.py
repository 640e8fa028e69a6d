"""Trunk and head as a checkpoint stores them: the trunk's tensors, and a head into modules."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Literal

import torch

from headstart.checkpoint.config import Config
from headstart.checkpoint.quantized.described import quantization_of
from headstart.checkpoint.quantized.names import is_quantized, is_scale, packed_names, scale_of
from headstart.checkpoint.quantized.reading import quantized_weights
from headstart.checkpoint.quantized.stored import StoredWeight
from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.source import TensorSource
from headstart.errors import ConfigError, some
from headstart.families.base import Family
from headstart.heads.head import Head, stored_weights
from headstart.models.as_stored import Sources
from headstart.models.config import ModelConfig, model_config
from headstart.models.loading import Loading, fill_head
from headstart.models.mtp import MTPHead
from headstart.models.rope import RotaryTable

# Scales of what this engine keeps in full precision: activations, keys and values.
_UNUSED_SCALES = {
    "activations": ("input_scale", "input_global_scale"),
    "keys and values": ("k_scale", "v_scale", "q_scale", "kv_scale"),
}


def trunk_tensors(
    checkpoint: Checkpoint, family: Family | None, head: Collection[str], notes: list[str]
) -> Sources:
    """Tensors of the trunk, a quantised weight as one; `head`: published names of the head's."""
    vision_prefixes = family.trunk.beside if family is not None else ()
    vision = {name for name in checkpoint.tensors if name.startswith(vision_prefixes)}
    if vision:
        notes.append(f"text only: {len(vision)} tensors of the vision part are not loaded")
    left_out = {*head, *vision}
    stored = {n: checkpoint.source(n) for n in checkpoint.tensors if n not in left_out}
    quantized = quantized_weights(stored, quantization_of(checkpoint))
    result: dict[str, TensorSource | StoredWeight] = {
        name: source
        for name, source in stored.items()
        if not is_scale(name) and not is_quantized(name, source)
    }
    result.update(quantized)
    used = {name for weight in quantized.values() for name in weight.tensors}
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


Layout = Literal["own", "vllm", "sglang"]


def head_modules(head: Head, trunk: ModelConfig, run_as: Layout) -> MTPHead:
    """The head's modules without memory, as its family or an engine runs it; it must fit."""
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
    is_one = layout.topology == "recursive" and head.family.layout.topology != "recursive"
    # An engine may run the first of several modules again and again.
    with torch.device("meta"):
        return MTPHead(config, layout, 1 if is_one else head.num_modules)


def load_stored_head(
    module: MTPHead, head: Head, trunk: ModelConfig, loading: Loading, max_len: int
) -> list[str]:
    """Load the weights of a head into modules without memory; notes about how they are held."""
    found = stored_weights(head)
    tensors: dict[str, TensorSource | StoredWeight] = {
        name: source
        for name, source in head.tensors.items()
        if not is_scale(name) and not is_quantized(name, source)
    }
    tensors.update(found)
    if module.num_modules < head.num_modules:
        tensors = {n: t for n, t in tensors.items() if n.startswith("modules.0.")}
    notes = fill_head(module, tensors, loading)
    rope = module.config.shape(module.config.head_layer).rope
    if module.layout.rotates_halves:
        rope = replace(rope, is_interleaved=False)
    if rope != trunk.rope:  # other head_dim, or other pairs
        table = RotaryTable(rope, max_len, loading.dtype)
        module.rotate_by(table.to(loading.device))
    return [f"head: {note}" for note in notes]


def _as_stored(config: ModelConfig, head: Head) -> ModelConfig:
    """Some heads have a dense block where the family's usual one has experts: tensors decide."""
    dense = packed_names("modules.0.block.mlp.gate_proj.weight")
    if not any(name in head.tensors for name in dense):
        return config
    return replace(config, head_layer=replace(config.head_layer, feed="dense"))
