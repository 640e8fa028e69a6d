"""A model that MLX converted, as the checkpoint that it was made of: what the engine runs.

What mlx-lm's and mlx-vlm's `sanitize` change is undone: experts stacked as `switch_mlp`, norms of
Qwen and Step with the one added, the channels of convolutions last, latent attention's
up-projection in two. Quantised weights stay as they are until they are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from headstart.checkpoint.affine import dequantized, setting_of
from headstart.checkpoint.gguf.encoding import PLAIN
from headstart.checkpoint.gguf.values import shifted
from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.source import TensorSource, reshaped, rows
from headstart.errors import MissingTensor, ShapeMismatch, UnsupportedFamily
from headstart.families.base import Family
from headstart.heads.detection import find_family
from headstart.heads.formats.mlx_drafters import DRAFTERS, EXPERTS, KEYS, STACKS, VALUES
from headstart.heads.formats.mlx_model import head_tensors, read_mlx_model
from headstart.heads.latent import joined_kv_b
from headstart.heads.published import PublishedModel, published_model

Tensors = Mapping[str, TensorSource]
_VISION = ("vision_tower.", "audio_tower.", "multi_modal_projector.")
_QUANTIZED = ("weight", "scales", "biases")
_STACK = re.compile(r"(?P<stem>.*\.mlp)\.switch_mlp\.(?P<rest>.*)")
_CONV = "conv1d.weight"
_NORM = re.compile(r"(.*\.)?((input|post_attention)_layernorm|q_norm|k_norm|model\.norm)\.weight")
# Step's own names of its experts -> MLX's
_STEP = {
    ".moe.gate_proj.": ".mlp.switch_mlp.gate_proj.", ".moe.up_proj.": ".mlp.switch_mlp.up_proj.",
    ".moe.down_proj.": ".mlp.switch_mlp.down_proj.", ".moe.gate.": ".mlp.gate.gate.",
    ".moe.router_bias": ".mlp.gate.router_bias", ".share_expert.": ".mlp.share_expert.",
}  # fmt: skip
_STACKED_EXPERTS = ("step3p5",)  # families that publish experts in stacks of their own


def mlx_as_published(model: Checkpoint) -> PublishedModel:
    """The model as a checkpoint, with its head if it has one that is known."""
    owner = find_family(model)
    beyond = head_tensors(model)
    own = {n: model.source(n) for n in model.tensors if n not in beyond}
    vision = [name for name in own if name.startswith(_VISION)]
    said = (f"text only: {len(vision)} tensors of MLX's vision part are left out",)
    settings = model.config.raw.get("quantization") or model.config.quantization
    settings = settings if isinstance(settings, dict) else {}
    trunk = {n: source for n, source in own.items() if n not in vision}
    tensors = dict(_published(trunk, owner, settings))
    if beyond and owner is not None and owner.name in DRAFTERS:
        tensors |= _head(model, owner)
    names = {_renamed(f"{key}.", owner).removesuffix("."): value for key, value in settings.items()}
    config = {**model.config.raw, **({"quantization_config": names} if settings else {})}
    kept = [info for name, info in model.tensors.items() if name in trunk]
    return published_model(model.folder, config, tensors, kept, {}, said if vision else ())


def _published(
    trunk: Tensors, owner: Family | None, settings: Mapping[str, Any]
) -> Iterator[tuple[str, TensorSource]]:
    is_raw = any(n.endswith(_CONV) and s.shape[2:] not in ((), (1,)) for n, s in trunk.items())
    shifts = owner is not None and owner.layout.zero_centred_norms and not is_raw
    for name, source in trunk.items():
        stem, _, parameter = name.rpartition(".")
        if stem.endswith((KEYS.removesuffix(".weight"), VALUES.removesuffix(".weight"))):
            if name.endswith(KEYS):
                at = name.removesuffix(KEYS)
                parts = [_plain(f"{at}{each}", trunk, settings) for each in (KEYS, VALUES)]
                yield f"{at}kv_b_proj.weight", joined_kv_b(*parts)
        elif name.endswith(_CONV) and not is_raw:
            channels, taps, _ = source.shape if len(source.shape) == 3 else (0, 0, 0)
            yield name, reshaped(_checked(name, source, channels * taps), (channels, 1, taps))
        elif shifts and _is_norm(name, owner) and source.dtype in PLAIN:
            yield _renamed(name, owner), shifted(source, -1.0)
        elif parameter in _QUANTIZED and _is_stack(name, owner):
            yield from _unstacked(name, source)
        else:
            yield _renamed(name, owner), source


def _checked(name: str, source: TensorSource, count: int) -> TensorSource:
    if not count:
        raise ShapeMismatch(
            f"{name} has shape {list(source.shape)}; expected channels, taps and 1, as MLX stores "
            "a convolution. Convert the model again."
        )
    return source


def _is_norm(name: str, owner: Family | None) -> bool:
    if owner is not None and owner.name in _STACKED_EXPERTS:  # every one
        return "norm" in name and name.endswith(".weight")
    return _NORM.fullmatch(name) is not None


def _is_stack(name: str, owner: Family | None) -> bool:
    is_own = owner is not None and owner.name in _STACKED_EXPERTS
    return STACKS in name and not is_own


def _renamed(name: str, owner: Family | None) -> str:
    if owner is not None and owner.name in _STACKED_EXPERTS:
        for ours, theirs in _STEP.items():
            name = name.replace(theirs, ours)
    return name


def _unstacked(name: str, source: TensorSource) -> Iterator[tuple[str, TensorSource]]:
    """One tensor for each expert."""
    found = _STACK.fullmatch(name)
    if found is None or len(source.shape) != 3 or 0 in source.shape:
        raise ShapeMismatch(
            f"{name} has shape {list(source.shape)}; expected a stack of matrices, none of them "
            "empty. Download or convert the model again."
        )
    count, height, width = source.shape
    flat = reshaped(source, (count * height, width))
    for expert in range(count):
        one = f"{found['stem']}{EXPERTS}{expert}.{found['rest']}"
        yield one, rows(flat, expert * height, (expert + 1) * height)


def _plain(name: str, trunk: Tensors, settings: Mapping[str, Any]) -> TensorSource:
    """A part of latent attention, dequantised where it is quantised."""
    stem = name.removesuffix("weight")
    if name not in trunk:
        raise MissingTensor(f"{name} is missing. Download or convert the model again.")
    if f"{stem}scales" not in trunk:
        return trunk[name]
    if f"{stem}biases" not in trunk:
        raise UnsupportedFamily(
            f"{name} has scales and no biases: quantised in another way than MLX's affine one, "
            "which is not read here. Take another quantisation of the model."
        )
    how = setting_of(settings, stem.removesuffix("."), name)
    weight, scales, biases = (trunk[f"{stem}{each}"] for each in _QUANTIZED)
    return dequantized(name, weight, scales, biases, how)


def _head(model: Checkpoint, owner: Family) -> dict[str, TensorSource]:
    """The head under published names; its quantised weights are dequantised."""
    head = read_mlx_model(model)
    naming = head.naming()
    return {owner.keys.to_published(n, naming): source for n, source in head.tensors.items()}
