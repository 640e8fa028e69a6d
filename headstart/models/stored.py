"""Trunk and head as a checkpoint stores them: the trunk's tensors, and a head into modules."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from headstart.checkpoint.config import Config
from headstart.checkpoint.quantized.described import quantization_of, refuse_turned
from headstart.checkpoint.quantized.leftover import weights_among
from headstart.checkpoint.quantized.names import packed_names
from headstart.checkpoint.quantized.reading import quantized_weights
from headstart.checkpoint.reader import Checkpoint
from headstart.errors import ConfigError, ShapeMismatch
from headstart.families.base import Family
from headstart.heads.head import Head, stored_draft_lm_head, stored_weights
from headstart.models.as_stored import Sources
from headstart.models.config import ModelConfig
from headstart.models.config_reader import model_config
from headstart.models.linear import Linear
from headstart.models.loading import Loading, fill_head
from headstart.models.mtp import MTPHead, MTPModule
from headstart.models.quantized import linear_of
from headstart.models.rope import RotaryTable


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
    refuse_turned(checkpoint)
    quantized = quantized_weights(stored, quantization_of(checkpoint))
    result, left = weights_among(stored, quantized, notes)
    # Scales that nothing was read with are refused by name when the trunk is filled.
    return {**result, **{name: stored[name] for name in left}}


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


@dataclass(frozen=True)
class HeadLoading:
    """How a head is loaded beside its trunk."""

    loading: Loading
    layout: Layout = "own"
    draft_lm_head: bool = True  # whether drafts go through the LM head that it may bring for them


def load_stored_head(
    module: MTPHead, head: Head, trunk: ModelConfig, how: HeadLoading, max_len: int
) -> list[str]:
    """Load the weights of a head into modules without memory; notes about how they are held."""
    notes: list[str] = []
    loading = how.loading
    tensors, left = weights_among(head.tensors, stored_weights(head), notes)
    tensors.update({name: head.tensors[name] for name in left})  # refused by name below
    if module.num_modules < head.num_modules:
        tensors = {n: t for n, t in tensors.items() if n.startswith("modules.0.")}
    notes += fill_head(module, tensors, loading)
    if how.draft_lm_head:
        notes += _load_draft_lm_head(module, head, trunk, loading)
    rope = module.config.rope_of_head
    if module.layout.rotates_halves:
        rope = replace(rope, is_interleaved=False)
    if rope != trunk.rope:  # other head_dim, or other pairs
        table = RotaryTable(rope, max_len, loading.dtype)
        module.rotate_by(table.to(loading.device))
    return [f"head: {note}" for note in notes]


def _load_draft_lm_head(
    module: MTPHead, head: Head, trunk: ModelConfig, loading: Loading
) -> list[str]:
    """Give modules that share the trunk's LM head the one that the head brings for drafts."""
    stored = stored_draft_lm_head(head)
    if stored is None:
        return []
    if stored.shape != (trunk.vocab, trunk.hidden):
        raise ShapeMismatch(
            f"{stored.name} is {stored.shape}; the model asks for {(trunk.vocab, trunk.hidden)}. "
            "Quantise the head with this model."
        )
    is_held = stored.form in loading.forms
    made = Linear(0, 0)
    if is_held:
        made = linear_of(stored.quantized(), None, loading.dtype)
    else:
        made.weight = nn.Parameter(stored.values(loading.dtype), requires_grad=False)
    made.to(loading.device)
    for part in module.modules_:
        if isinstance(part, MTPModule) and part.lm_head is None:
            part.lm_head = made
    how = "as stored" if is_held else f"dequantised at load: {loading.why_not}"
    return [f"drafts go through an LM head of their own, {how} ({stored.words})"]


def _as_stored(config: ModelConfig, head: Head) -> ModelConfig:
    """Some heads have a dense block where the family's usual one has experts: tensors decide."""
    dense = packed_names("modules.0.block.mlp.gate_proj.weight")
    if not any(name in head.tensors for name in dense):
        return config
    return replace(config, head_layer=replace(config.head_layer, feed="dense"))
