"""A GGUF file as the checkpoint that it was converted from: what the engine runs.

Trunk and head get their published names, and every change of values is undone, rows and columns
of quantised types included; matrices keep their types. What would be lost by that (a transposed
matrix of blocks) is computed in FP32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from headstart.checkpoint.config_fields import check_fields
from headstart.checkpoint.gguf.values import regrouped, shifted
from headstart.checkpoint.source import TensorSource, reshaped, stored
from headstart.errors import (
    CheckpointError,
    MissingTensor,
    ShapeMismatch,
    UnexpectedTensor,
    UnsupportedFamily,
    some,
)
from headstart.families.registry import family
from headstart.heads.detection import quoted
from headstart.heads.experts import unstack_experts
from headstart.heads.formats.gguf.found import FoundGguf, find_gguf_head, spelled_in
from headstart.heads.formats.gguf.model import GgufModel
from headstart.heads.formats.gguf.tokenizer import token_ids, tokenizer_of
from headstart.heads.formats.gguf.trunk_keys import Keys
from headstart.heads.formats.gguf.trunks import TRUNKS, Trunk
from headstart.heads.formats.gguf.unspelling import unspelled
from headstart.heads.latent import joined_kv_b
from headstart.heads.published import PublishedModel, published_model

_ROOT = {"token_embd.weight": "embed_tokens.weight", "output_norm.weight": "norm.weight"}
_LM_HEAD = "lm_head.weight"
_READ = ("output.weight", "rope_freqs.weight")  # in other ways
_KV_B = ("attn_k_b.weight", "attn_v_b.weight")


def as_published(model: GgufModel) -> PublishedModel:
    """The model as a checkpoint; UnsupportedFamily for what llama.cpp alone runs."""
    trunk = TRUNKS.get(model.arch_name)
    if trunk is None:
        raise UnsupportedFamily(
            f"{model.folder}: the engine runs no GGUF files of the architecture "
            f"{model.arch_name[:40]!r}; expected one of {', '.join(TRUNKS)}. llama.cpp does: "
            f"headstart launch {quoted(model.folder)} --engine llamacpp"
        )
    found = find_gguf_head(model)
    if not found.has_trunk:
        raise CheckpointError(
            f"{model.folder} is a standalone gguf head, not a model. Give its trunk, and this file "
            "with --head."
        )
    config = _config(model, trunk, found)
    tensors = dict(_trunk_tensors(model, trunk, found, config))
    if found.arch is not None and found.blocks:
        tensors |= _head_tensors(model, config)
    documents, notes = tokenizer_of(model)
    beyond = set(found.names)
    kept = [info for name, info in model.tensors.items() if name not in beyond]
    return published_model(model.folder, config, tensors, kept, documents, notes)


def _config(model: GgufModel, trunk: Trunk, found: FoundGguf) -> dict[str, Any]:
    keys = Keys(model, found.num_layers)
    config = trunk.config(keys)
    kind = trunk.model_type if trunk.chosen is None else trunk.chosen(model)
    config |= {"model_type": kind, **token_ids(model)}
    keys.refuse_others()
    if found.arch is not None:
        owner = family(found.arch.family)
        config["architectures"] = list(owner.architectures[:1])
        if owner.count_field is not None:
            config[owner.count_field] = found.declared or len(found.blocks)
    check_fields(model.folder, config)
    return config


def _trunk_tensors(
    model: GgufModel, trunk: Trunk, found: FoundGguf, config: Mapping[str, Any]
) -> Iterator[tuple[str, TensorSource]]:
    prefix = "model."
    blocks, seen = model.blocks(), set()
    for theirs, ours in _ROOT.items():
        source = _stored(model, theirs)
        is_norm = trunk.shifts_norms and ours == "norm.weight"
        yield prefix + ours, shifted(source, -1.0) if is_norm else source
    if "output.weight" in model.tensors:
        yield _LM_HEAD, stored(model.tensors["output.weight"])
    for layer in range(found.num_layers):
        own = {name: stored(info) for name, info in blocks.get(layer, {}).items()}
        seen |= {f"blk.{layer}.{name}" for name in own}
        for name, source in _layer(own, trunk, config, layer):
            yield f"{prefix}layers.{layer}.{name}", source
    left = model.tensors.keys() - seen - set(found.names) - set(_ROOT) - set(_READ)
    if left:
        raise UnexpectedTensor(
            f"{model.folder} holds {some(sorted(left))}, for which {config['model_type']} has no "
            "place here. llama.cpp runs the file."
        )


def _stored(model: GgufModel, name: str) -> TensorSource:
    if name not in model.tensors:
        raise MissingTensor(f"{model.folder} has no {name}. Download or convert it again.")
    return stored(model.tensors[name])


def _layer(
    own: dict[str, TensorSource], trunk: Trunk, config: Mapping[str, Any], layer: int
) -> Iterator[tuple[str, TensorSource]]:
    """Tensors of one layer under published names."""
    if trunk.change is not None:
        changed, read = trunk.change(own, config)
        yield from changed.items()
        own = {name: source for name, source in own.items() if name not in read}
    if trunk.kv_b:
        lost = next((name for name in _KV_B if name not in own), None)
        if lost is not None:
            raise UnsupportedFamily(
                f"blk.{layer}.{lost} is missing: the file was converted before llama.cpp stored "
                "kv_b in two parts. Convert it again, or use llama.cpp."
            )
        yield trunk.kv_b, joined_kv_b(*(own.pop(name) for name in _KV_B))
    back = {theirs: ours for ours, theirs in trunk.names.items()}
    for name, source in own.items():
        module, _, parameter = name.rpartition(".")
        ours = back.get(name) or (f"{back[module]}.{parameter}" if module in back else None)
        if ours is None:
            raise UnexpectedTensor(
                f"blk.{layer}.{name} has no place in a layer of {config['model_type']} here: the "
                "file was made by another tool or a newer llama.cpp, which runs it."
            )
        if trunk.shifts_norms and name.endswith("norm.weight") and name != "ssm_norm.weight":
            source = shifted(source, -1.0)
        elif trunk.is_paired and module in ("attn_q", "attn_k"):
            source = _halves(f"blk.{layer}.{name}", source, int(config["head_dim"]))
        yield from unstack_experts({ours: source}).items()


def _halves(name: str, source: TensorSource, head_dim: int) -> TensorSource:
    """Rows of each attention head from pairs back to two halves."""
    count = source.shape[0] if source.shape else 0
    if not head_dim or head_dim % 2 or not count or count % head_dim:
        raise ShapeMismatch(
            f"{name} has shape {list(source.shape)} and heads are {head_dim} wide; expected whole "
            "heads. Convert the model again."
        )
    flat = reshaped(source, (count, prod(source.shape[1:])))
    return reshaped(regrouped(flat, head_dim // 2, 2), source.shape)


def _head_tensors(model: GgufModel, config: Mapping[str, Any]) -> dict[str, TensorSource]:
    spelled = spelled_in(model)
    owner = family(spelled.arch.family)
    naming = owner.naming(config, str(spelled.record.get("root", owner.keys.roots[0])))
    tensors, _ = unspelled(spelled, as_stored=True)
    return {owner.keys.to_published(name, naming): source for name, source in tensors.items()}
