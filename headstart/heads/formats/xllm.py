"""What xLLM's export script writes: one file, renumbered names, a blanked quantisation config.

The same file names, tensor names, values, dtypes and config edits as tools/export_mtp.py of
xLLM, except where that script's output cannot be used: quantised GLM and Qwen heads are
dequantised here instead of losing only their description, and families for which xLLM has no
loader are refused.
"""

from __future__ import annotations

import copy
import json
from typing import Any

from headstart.checkpoint.config import read_json_object
from headstart.checkpoint.provenance import made_by_us
from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.writer import FolderPlan, Shard
from headstart.errors import ConfigError, MissingTensor, UnexpectedTensor, UnsupportedFamily, some
from headstart.families.base import Family
from headstart.families.registry import family
from headstart.heads.formats import Export, count_modules
from headstart.heads.formats import xllm_glm5_next as glm5_next
from headstart.heads.head import Head, dequantize, stored_weights

FILE = "mtp_layer_parameters.safetensors"
LOSES = "quantised weights (8, 4 bits), which become BF16 (not those of DeepSeek-V4)"
_DESCRIPTION = "quant_model_description.json"  # Ascend's own
# family -> the architecture written; the model_type written is the family's with `_mtp`
_ARCHITECTURES = {
    "deepseek_v3": "DeepseekMTPForCausalLM",
    "deepseek_v32": "DeepseekV32MtpForCausalLM",
    "deepseek_v4": "DeepseekV4MtpForCausalLM",
    "glm4_moe": "Glm4MoeMtpForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaMtpForCausalLM",
    "glm5_next": "Glm5NextMtpForCausalLM",
    "mimo": "MiMoMtpForCausalLM",
    "qwen3_5": "Qwen3_5MtpForCausalLM",
    "qwen3_5_moe": "Qwen3_5MtpForCausalLM",
}
_RENUMBERED = ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm_moe_dsa")
_QWEN = ("qwen3_5", "qwen3_5_moe")
_OUTSIDE_LAYER = {
    "embed_norm": "enorm",
    "hidden_norm": "hnorm",
    "fuse": "eh_proj",
    "out_norm": "shared_head.norm",
    "lm_head": "shared_head.head",
    "embed_tokens": "embed_tokens",
}
# What the script overwrites with facts of the head, so that the trunk's own value is gone.
_OVERWRITTEN = ("num_hidden_layers", "first_k_dense_replace", "num_hash_layers", "layer_types")
_WHY_NOT = {
    "glm4_moe_lite": "xLLM's script takes GLM-4.7-Flash for glm4_moe, whose loader has no MLA",
    "mimo_v2": "xLLM's script takes MiMo-V2 for MiMo-7B, which it does not resemble",
}


def why_not(owner: Family) -> str:
    if owner.name in _ARCHITECTURES:
        return ""
    return _WHY_NOT.get(owner.name, "xLLM has no loader for such a head")


def plan(head: Head) -> Export:
    name = head.family.name
    if reason := why_not(head.family):
        raise UnsupportedFamily(
            f"{name} cannot be exported for xLLM: {reason}. Supported: "
            f"{', '.join(_ARCHITECTURES)}. Other formats: `headstart families`."
        )
    if name not in _QWEN and head.num_modules != 1:
        raise UnsupportedFamily(f"xLLM runs one module; this {name} head has {head.num_modules}.")
    # V4's scales have other names and its FP4 experts no BF16 form that xLLM expects: kept.
    is_dequantized = name != "deepseek_v4" and bool(stored_weights(head))
    head = head if name == "deepseek_v4" else dequantize(head)
    changes = list(head.changes)
    if is_dequantized and name not in ("deepseek_v3", "deepseek_v32"):
        changes.append(
            "xLLM's own script would keep the quantised bytes and drop their description, which "
            "nothing can load"
        )
    left_out = set(head.left_out)
    if name == "glm5_next":
        tensors, copies_of_tables = glm5_next.tensors_of(head, _tables)
        left_out |= copies_of_tables
    else:
        tensors = {_name(head.family, ours, head): src for ours, src in head.tensors.items()}
    if name in _QWEN:
        tensors |= _tables(head)
    if "rot.weight" in head.origin.tensors:  # Ascend's rotation
        tensors["model.rot.weight"] = head.origin.source("rot.weight")
    documents: dict[str, Any] = {
        "config.json": json.dumps(_config(head), indent=2, ensure_ascii=False, sort_keys=True),
        "model.safetensors.index.json": json.dumps(
            {"weight_map": dict.fromkeys(tensors, FILE)}, indent=4
        ),
    }
    copies = head.side_files()
    if _DESCRIPTION in copies and name not in _QWEN:
        documents[_DESCRIPTION] = _description(head, copies.pop(_DESCRIPTION))
    details = {
        "trunk_config": dict(head.config),
        "root": head.root,
        "family": name,
        "left_out": sorted(left_out),
        "lost_fields": list(head.lost_fields),
    }
    shard = Shard(tensors, metadata={})
    return Export(FolderPlan({FILE: shard}, copies, documents), tuple(changes), details)


def _name(owner: Family, ours: str, head: Head) -> str:
    role, _, rest = ours.removeprefix("modules.0.").partition(".")
    if owner.name == "glm5_next":
        return glm5_next.their_name(ours)
    if owner.name in _RENUMBERED:
        if role == "block":
            return f"model.layers.0.{rest}"
        if role not in _OUTSIDE_LAYER:
            raise UnexpectedTensor(
                f"xLLM's export has no place for {ours}. Remove it, or use --format headstart."
            )
        return f"model.{_OUTSIDE_LAYER[role]}.{rest}"
    published = owner.keys.to_published(ours, head.naming())
    if owner.name == "deepseek_v4":
        return "model.layers.0." + published.removeprefix("mtp.0.")
    return published


def _tables(head: Head) -> dict[str, TensorSource]:
    """xLLM's drafts of these families want the trunk's embedding and LM head in the export."""
    names = list(head.trunk_tensors)
    if not any("embed" in name for name in names):
        raise MissingTensor(
            f"an xLLM export of a {head.family.name} head carries the trunk's embedding and LM "
            "head, and this head came without them. Give the model they belong to with --model."
        )
    if not head.config.get("tie_word_embeddings") and not any("lm_head" in n for n in names):
        raise MissingTensor(
            "embeddings are not tied and there is no LM head to carry. Give the model with --model."
        )
    return dict(head.trunk_tensors)


def _config(head: Head) -> dict[str, Any]:
    name, count = head.family.name, head.num_modules
    config = copy.deepcopy(dict(head.config))
    config.update(
        num_hidden_layers=count,
        num_nextn_predict_layers=count,
        architectures=[_ARCHITECTURES[name]],
        model_type=f"{name}_mtp",
        quantization_config="",  # xLLM's reader wants this field, empty
        first_k_dense_replace=0,
    )
    if name == "deepseek_v4":
        config["num_hash_layers"] = 0
    if name in _QWEN:
        config["mtp_num_hidden_layers"] = count
        text = config.get("text_config")
        if isinstance(text, dict):
            text.update(
                num_hidden_layers=count,
                mtp_num_hidden_layers=count,
                layer_types=["full_attention"] * count,
            )
    if name in ("deepseek_v32", "glm_moe_dsa"):
        _share_indexer(config)
    if name == "glm5_next":
        glm5_next.describe(config, count)
    return config


def _share_indexer(config: dict[str, Any]) -> None:
    """Draft steps after the first reuse its top-k: the exported layer must compute them itself."""
    fields = ("index_head_dim", "index_n_heads", "index_topk")
    if config.get("index_share_for_mtp_iteration") is not True or not all(
        isinstance(config.get(field), int) and config[field] > 0 for field in fields
    ):
        return
    frequency = config.get("index_topk_freq")
    edits = {
        "index_topk_freq": max(frequency, 2) if isinstance(frequency, int) else 2,
        "index_skip_topk_offset": 0,
        "index_topk_pattern": "S",
        "indexer_types": ["full"],
    }
    config.update({field: value for field, value in edits.items() if field in config})


def _description(head: Head, path: Any) -> str:
    """Ascend's per-tensor description, for the head's tensors under their new names."""
    naming = head.naming()
    kept = {}
    for published, value in read_json_object(path).items():
        ours = head.family.keys.to_ours(published, naming)
        if published == "rot.weight":
            kept["model.rot.weight"] = value
        elif ours is not None:
            kept[_name(head.family, ours, head)] = value
    return json.dumps(kept, indent=2, ensure_ascii=False, sort_keys=True)


def recognises(checkpoint: Checkpoint) -> bool:
    name = checkpoint.config.model_type
    return name.endswith("_mtp") and name.removesuffix("_mtp") in _ARCHITECTURES


def read(checkpoint: Checkpoint) -> Head:
    name = checkpoint.config.model_type.removesuffix("_mtp")
    if name not in _ARCHITECTURES:
        raise ConfigError(
            f"{checkpoint.folder}: model_type {checkpoint.config.model_type!r} is not one that "
            f"xLLM's export writes ({', '.join(n + '_mtp' for n in _ARCHITECTURES)})."
        )
    owner = family(name)
    made = made_by_us(checkpoint.folder)
    config = made.trunk_config or _config_before(checkpoint.config.raw, owner)
    lost = made.lost_fields if made.trunk_config else _lost_fields(config)
    root = made.root or _root(checkpoint, owner)
    tensors: dict[str, TensorSource] = {}
    trunk: dict[str, TensorSource] = {}
    for published in checkpoint.tensors:
        ours = _ours(owner, published, root)
        if ours is not None:
            tensors[ours] = checkpoint.source(published)
        elif published != "model.rot.weight":
            trunk[published] = checkpoint.source(published)
    unexpected = [name for name in trunk if name not in _trunk_names(owner)]
    if unexpected:
        raise UnexpectedTensor(
            f"{checkpoint.folder} holds {some(unexpected)}, which xLLM's export of a {name} head "
            "does not have. Remove it, or export the head again."
        )
    return Head(
        owner, tensors, config, checkpoint, root, max(count_modules(tensors), 1), trunk,
        made.left_out, lost_fields=lost,
    )  # fmt: skip


def _config_before(raw: dict[str, Any], owner: Family) -> dict[str, Any]:
    """The trunk's config as far as the export left it: the inverse of `_config`."""
    config = copy.deepcopy(raw)
    config.update(model_type=owner.name, architectures=list(owner.architectures[:1]))
    if config.get("quantization_config") == "":
        del config["quantization_config"]
    if owner.name in (*_QWEN, "mimo"):  # never had dense layers to count
        config.pop("first_k_dense_replace", None)
    return config


def _lost_fields(config: dict[str, Any]) -> tuple[str, ...]:
    text = config.get("text_config")
    present = {*config, *(text if isinstance(text, dict) else ())}
    return tuple(field for field in _OVERWRITTEN if field in present)


def _trunk_names(owner: Family) -> set[str]:
    """Names under which a Qwen3.5 export carries the trunk's embedding and LM head."""
    trunk = owner.trunk
    return {prefix + trunk.embed for prefix in trunk.prefixes} | set(trunk.lm_heads)


def _root(checkpoint: Checkpoint, owner: Family) -> str:
    return owner.keys.find_root(list(checkpoint.tensors), owner.naming({})).root


def _ours(owner: Family, published: str, root: str) -> str | None:
    if owner.name == "glm5_next":
        return glm5_next.our_name(published)
    if owner.name in _RENUMBERED:
        if published.startswith("model.layers.0."):
            return "modules.0.block." + published.removeprefix("model.layers.0.")
        for role, theirs in _OUTSIDE_LAYER.items():
            if published.startswith(f"model.{theirs}."):
                return f"modules.0.{role}." + published.removeprefix(f"model.{theirs}.")
        return None
    if owner.name == "deepseek_v4" and published.startswith("model.layers.0."):
        published = "mtp.0." + published.removeprefix("model.layers.0.")
    return owner.keys.to_ours(published, owner.naming({}, root))
