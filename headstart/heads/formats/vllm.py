"""A head's folder for vLLM's `--speculative-config {"model": ...}`, beside a trunk as it was.

vLLM knows no heads of Llama, Qwen2, Qwen3 (dense and MoE) or Mistral trunks. Its class for MiMo-7B
runs them all the same, from a folder of their own, where their attention has the geometry that it
assumes: heads of hidden_size / num_attention_heads. For others, and beside a quantised trunk, the
folder names our own class, which Headstart's plugin brings (docs/vllm.md).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headstart.checkpoint.provenance import made_by_us
from headstart.checkpoint.reader import Checkpoint, torch_dtype
from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.values import as_bytes, load
from headstart.checkpoint.writer import FolderPlan, split_shards
from headstart.errors import BadConfig, ConfigError, UnexpectedTensor, UnsupportedFamily, some
from headstart.families.base import Family
from headstart.families.dims import dims
from headstart.families.registry import family
from headstart.heads.experts import split_experts
from headstart.heads.formats import Export, count_modules
from headstart.heads.head import Head, config_fields, dequantize
from headstart.vocab.draft_vocab import DraftVocab
from headstart.vocab.files import document

FILE = None
LOSES = "quantised weights (8, 4 bits), which become BF16"
KEY = "headstart_head"  # in config.json: whose head it is, and which class of vLLM's runs it
SETTINGS = "headstart"  # in config.json: what is asked of the plugin
VOCAB_FILE = "draft_vocab.json"
STOCK, PLUGIN = "MiMoForCausalLM", "HeadstartMTPModel"  # architectures
PLUGIN_TYPE = "mtp"  # the one type of config that vLLM takes for a head and rewrites by no rule
_STOCK_TYPE = "qwen2"  # a config class that transformers has; vLLM goes by the architecture
# family -> what must be added to the trunk's config for vLLM's class, beside the head's count; None
# where that class has no such layer
FAMILIES: dict[str, dict[str, Any] | None] = {
    "mimo": {},
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {"qk_norm": True},
    "bailing_moe": None,
}
COUNT = "num_nextn_predict_layers"
# vLLM takes a draft for one of another method by these parts of its path
MISREAD = ("eagle-", "eagle3", "dflash", "dspark")
_BIASED = ("q_proj", "k_proj", "v_proj")


def why_not(owner: Family) -> str:
    if owner.name in FAMILIES:
        return ""
    return "vLLM reads such heads inside their model, or not at all"


def check_folder_name(path: Path | str) -> None:
    """ConfigError for a path that would make vLLM take the head for a draft of another kind."""
    found = next((part for part in MISREAD if part in str(path).lower()), None)
    if found is not None:
        raise ConfigError(
            f"{path} has {found!r} in its name, by which vLLM takes a draft for one of another "
            "method. Give the folder another name."
        )


def overrides(owner: Family, architecture: str) -> dict[str, Any]:
    """What `--hf-overrides` must add to the trunk's config so that vLLM's own class runs it."""
    return {COUNT: 1, **(FAMILIES[owner.name] or {})} if architecture == STOCK else {}


def plan(head: Head, vocab: DraftVocab | None = None) -> Export:
    """`vocab`: the only tokens that it may propose, which the plugin sees to."""
    if reason := why_not(head.family) or _why_inside(head):
        raise UnsupportedFamily(
            f"{head.family.name} cannot be written for vLLM by itself: {reason}. Put the head into "
            "the model instead: headstart stitch."
        )
    if head.num_modules != 1:
        raise UnsupportedFamily(f"vLLM runs one module here; this has {head.num_modules}.")
    head = dequantize(head)
    reason = _why_plugin(head)
    architecture = PLUGIN if reason else STOCK
    config = copy.deepcopy(dict(head.config))
    for name in ("quantization_config", "auto_map", "compression_config"):
        config.pop(name, None)
    config |= {
        "architectures": [architecture],
        "model_type": PLUGIN_TYPE if reason else _STOCK_TYPE,
        COUNT: 1,
        KEY: {"family": head.family.name},
    }
    changes = [*head.changes, *head.config_notes()]
    changes.append(
        f"vLLM needs Headstart's plugin to run it: {reason}"
        if reason
        else "stock vLLM runs it, as a head of MiMo-7B's kind beside the trunk"
    )
    details = {
        "format": "vllm", "family": head.family.name, "trunk_config": dict(head.config),
        "root": head.root, "left_out": sorted(head.left_out),
        "lost_fields": list(head.lost_fields),
    }  # fmt: skip
    tensors = split_experts(head.tensors) if reason else _as_mimo(head)
    documents: dict[str, Any] = {"config.json": config}
    if vocab is not None:
        vocab.check(vocab_size=config_fields(head.config)["vocab_size"], tokenizer_sha=None)
        config[SETTINGS] = {"draft_vocab": VOCAB_FILE}
        documents[VOCAB_FILE] = document([vocab])
        changes.append(f"drafts from {len(vocab.ids)} tokens, which needs Headstart's plugin")
    return Export(FolderPlan(split_shards(tensors), {}, documents), tuple(changes), details)


def _why_inside(head: Head) -> str:
    """Why a head of a family that vLLM reads in part is not one for our class; empty if it is."""
    unread = head.family.variants.get("vllm", {})
    model_type = str(config_fields(head.config).get("model_type"))
    if "vllm" not in head.family.served_apart or "vllm" not in head.family.served:
        return ""
    is_unread = model_type in unread and unread[model_type] is None
    return "" if is_unread else f"vLLM reads heads of {model_type} inside their model"


def _why_plugin(head: Head) -> str:
    """Why vLLM's class for MiMo-7B cannot run the head, in words; empty where it can."""
    if FAMILIES[head.family.name] is None:
        return "vLLM has no class for such heads"
    known = dims(config_fields(head.config))
    hidden, heads, size = known.get("hidden"), known.get("heads"), known.get("head_dim")
    if None in (hidden, heads, size):
        raise BadConfig("the config does not say hidden_size or num_attention_heads; add them.")
    assert hidden is not None and heads is not None and size is not None
    if size * heads != hidden:
        return f"{heads} heads of {size} are not the hidden size {hidden}, which its classes assume"
    if head.config.get("quantization_config"):
        return "its classes would run a plain head as quantised as the trunk"
    return ""


def _as_mimo(head: Head) -> dict[str, TensorSource]:
    """The head under MiMo's names: the state first in the fusion, biases of q, k and v."""
    keys, naming = family("mimo").keys, family("mimo").naming({})
    tensors = dict(head.tensors)
    for name in list(tensors):
        if name.endswith(".fuse.weight") and head.family.layout.fuse_order == "embed_first":
            tensors[name] = _swapped(tensors[name])
        if name.endswith(tuple(f".{part}.weight" for part in _BIASED)):
            bias = name.removesuffix("weight") + "bias"
            tensors.setdefault(bias, _zeros(tensors[name]))
    return {keys.to_published(name, naming): source for name, source in tensors.items()}


def _swapped(source: TensorSource) -> TensorSource:
    def pieces() -> Iterator[memoryview]:
        import torch

        one, other = load(source).chunk(2, dim=1)
        yield as_bytes(torch.cat([other, one], dim=1))

    return TensorSource(source.dtype, source.shape, pieces, is_copy=False)


def _zeros(weight: TensorSource) -> TensorSource:
    def pieces() -> Iterator[memoryview]:
        import torch

        yield as_bytes(torch.zeros(weight.shape[0], dtype=torch_dtype(weight.dtype)))

    return TensorSource(weight.dtype, weight.shape[:1], pieces, is_copy=False)


def recognises(checkpoint: Checkpoint) -> bool:
    return KEY in checkpoint.config.raw


def architecture_of(config: Mapping[str, Any]) -> str | None:
    """Which class runs the head in such a folder; None if the folder is another one."""
    return str((config.get("architectures") or [""])[0]) if KEY in config else None


def read(checkpoint: Checkpoint) -> Head:
    made = made_by_us(checkpoint.folder)
    said = checkpoint.config.raw.get(KEY)
    owner = family(str(said.get("family") if isinstance(said, Mapping) else said))
    config = made.trunk_config or checkpoint.config.raw
    is_stock = architecture_of(checkpoint.config.raw) == STOCK
    tensors = {name: checkpoint.source(name) for name in checkpoint.tensors}
    if is_stock:
        tensors = _from_mimo(checkpoint, owner)
    return Head(
        owner, tensors, config, checkpoint, made.root, count_modules(tensors),
        left_out=made.left_out, lost_fields=made.lost_fields,
    )  # fmt: skip


def _from_mimo(checkpoint: Checkpoint, owner: Family) -> dict[str, TensorSource]:
    keys, naming = family("mimo").keys, family("mimo").naming({})
    names = {name: keys.to_ours(name, naming) for name in checkpoint.tensors}
    unexpected = [name for name, ours in names.items() if ours is None]
    if unexpected:
        raise UnexpectedTensor(
            f"{checkpoint.folder} holds {some(unexpected)}, which is not part of a {owner.name} "
            "head. Remove it, or export the head again."
        )
    tensors = {ours: checkpoint.source(name) for name, ours in names.items() if ours is not None}
    has_biases = "modules.0.block.self_attn.q_proj.bias" in owner.expected(
        checkpoint.config.fields, 1
    )
    for name in list(tensors):
        if name.endswith(".fuse.weight") and owner.layout.fuse_order == "embed_first":
            tensors[name] = _swapped(tensors[name])
        if not has_biases and name.endswith(tuple(f".{part}.bias" for part in _BIASED)):
            del tensors[name]  # the zeros that vLLM's class asked for
    return tensors
