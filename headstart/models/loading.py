"""Checkpoint tensors into modules, strictly: nothing missing, nothing left over, no wrong shape.

Tensors are streamed one at a time into their place, which for q, k, v and gate, up is a part of
a merged matrix. Quantised weights arrive here as sources that dequantise while they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import nn

from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.values import load
from headstart.errors import MissingTensor, ShapeMismatch, UnexpectedTensor, some
from headstart.models.config import ModelConfig
from headstart.models.mtp import MTPHead
from headstart.models.trunk import Trunk

# our parameter -> the published parts that follow one another in its rows
LAYER_PARTS = {
    "attention_norm.weight": ("input_layernorm.weight",),
    "attention.qkv.weight": tuple(f"self_attn.{p}_proj.weight" for p in "qkv"),
    "attention.qkv.bias": tuple(f"self_attn.{p}_proj.bias" for p in "qkv"),
    "attention.o.weight": ("self_attn.o_proj.weight",),
    "attention.o.bias": ("self_attn.o_proj.bias",),
    "attention.q_norm.weight": ("self_attn.q_norm.weight",),
    "attention.k_norm.weight": ("self_attn.k_norm.weight",),
    "mlp_norm.weight": ("post_attention_layernorm.weight",),
    "mlp.gate_up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.gate_up.bias": ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
    "mlp.down.weight": ("mlp.down_proj.weight",),
    "mlp.down.bias": ("mlp.down_proj.bias",),
}
_READERS = 8  # tensors on their way to a GPU at once
# Stored by some exporters, computed from the config by everybody.
_DERIVED = (".rotary_emb.inv_freq",)


@dataclass(frozen=True)
class Place:
    """Where one published tensor goes: rows [start, stop) of a parameter."""

    parameter: str
    start: int
    stop: int


def load_trunk(
    trunk: Trunk, tensors: Mapping[str, TensorSource], *, prefix: str = "model."
) -> None:
    """Fill a trunk from published tensors (the head's own must not be among them)."""
    names: dict[str, tuple[str, ...]] = {
        "embed": (f"{prefix}embed_tokens.weight",),
        "final_norm.weight": (f"{prefix}norm.weight",),
    }
    if not trunk.config.is_tied:
        names["lm_head.weight"] = ("lm_head.weight",)
    for layer in range(trunk.config.num_layers):
        for ours, theirs in LAYER_PARTS.items():
            at = f"{prefix}layers.{layer}."
            names[f"layers.{layer}.{ours}"] = tuple(at + name for name in theirs)
    ignored = {"lm_head.weight"} if trunk.config.is_tied else set()
    _fill(trunk, tensors, names, trunk.config, ignored)


def load_head(head: MTPHead, tensors: Mapping[str, TensorSource], config: ModelConfig) -> None:
    """Fill a head from tensors under our names; copies of trunk tensors are left out."""
    names: dict[str, tuple[str, ...]] = {}
    for module in range(head.num_modules):
        at = f"modules.{module}."
        for role in ("embed_norm", "hidden_norm", "fuse", "out_norm"):
            names[f"modules_.{module}.{role}.weight"] = (f"{at}{role}.weight",)
        for ours, theirs in LAYER_PARTS.items():
            names[f"modules_.{module}.block.{ours}"] = tuple(f"{at}block.{n}" for n in theirs)
    copies = {n for n in tensors if n.split(".")[2] in ("embed_tokens", "lm_head")}
    _fill(head, tensors, names, config, copies)


def _fill(
    module: nn.Module,
    tensors: Mapping[str, TensorSource],
    names: Mapping[str, tuple[str, ...]],
    config: ModelConfig,
    ignored: set[str],
) -> None:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    wanted = {ours: theirs for ours, theirs in names.items() if ours in parameters}
    unplaced = set(parameters) - set(wanted) - {"lm_head.weight"}
    assert not unplaced, f"parameters without a published name: {unplaced}"
    places = {t: p for ours, theirs in wanted.items() for t, p in places_of(ours, theirs, config)}
    missing = [name for name in places if name not in tensors]
    if missing:
        raise MissingTensor(
            f"{len(missing)} tensors are missing: {some(missing)}. The config does not describe "
            "these files; download the checkpoint again."
        )
    left = [n for n in tensors if n not in places and n not in ignored and not n.endswith(_DERIVED)]
    if left:
        raise UnexpectedTensor(
            f"{len(left)} tensors have no place in this model: {some(left)}. Running without them "
            "would give wrong text."
        )

    def copy(name: str) -> None:
        _copy(tensors[name], name, places[name], parameters[places[name].parameter])

    if next(iter(parameters.values())).is_cuda:
        # One thread cannot read and send as fast as files and bus allow.
        with ThreadPoolExecutor(_READERS) as pool:
            list(pool.map(copy, places))
        return
    for name in places:
        copy(name)


def places_of(ours: str, theirs: tuple[str, ...], config: ModelConfig) -> list[tuple[str, Place]]:
    if len(theirs) == 1:
        return [(theirs[0], Place(ours, 0, -1))]
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sizes = [q, kv, kv] if len(theirs) == 3 else [config.intermediate] * 2
    result, start = [], 0
    for name, size in zip(theirs, sizes, strict=True):
        result.append((name, Place(ours, start, start + size)))
        start += size
    return result


def _copy(source: TensorSource, name: str, place: Place, parameter: nn.Parameter) -> None:
    target = parameter.data if place.stop < 0 else parameter.data[place.start : place.stop]
    if tuple(target.shape) != source.shape:
        raise ShapeMismatch(
            f"{name} has shape {source.shape}; the config asks for {tuple(target.shape)}. Config "
            "and weights do not belong together."
        )
    target.copy_(load(source).to(target.dtype))


def materialize(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Give a module built on the meta device real, uninitialised memory of one dtype."""
    return module.to_empty(device=device).to(dtype)
