"""A standalone draft checkpoint for SGLang's --speculative-draft-model-path.

Appended-layer families are renumbered to layer 0 with one hidden layer, as SGLang's own export
script does for DeepSeek; the embedding and LM head are left out because SGLang binds the
target's. Other families keep their names and config: SGLang rewrites the architecture itself. A
head with a quantisation of its own is described under the names that SGLang asks for.
"""

from __future__ import annotations

import copy
import json
from typing import Any

from headstart.checkpoint.provenance import made_by_us
from headstart.checkpoint.quantized.writing import compressed_config
from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.writer import FolderPlan, Shard
from headstart.errors import UnexpectedTensor, UnsupportedFamily, some
from headstart.families.base import Family
from headstart.families.engines import served_by
from headstart.families.names import Naming
from headstart.families.registry import family
from headstart.heads.config_groups import modules_of, names_modules, own_groups
from headstart.heads.formats import Export, count_modules
from headstart.heads.head import Head, dequantize, own_quantization
from headstart.heads.ignore_lists import lookups

FILE = "nextn_layer_parameters.safetensors"
_RENUMBERED = {
    "deepseek_v3": "DeepseekV3ForCausalLMNextN",
    "deepseek_v32": "DeepseekV3ForCausalLMNextN",
    "glm4_moe": "Glm4MoeForCausalLMNextN",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLMNextN",
    "glm_moe_dsa": "GlmMoeDsaForCausalLMNextN",
}
LOSES = "what `quantize` rounded, where its names in SGLang are not known; it becomes BF16"
_LEFT_OUT = ("embed_tokens", "lm_head")
_STANDALONE = Naming(num_layers=0)


def why_not(owner: Family) -> str:
    return "" if "sglang" in served_by(owner.name) else "SGLang does not serve such heads"


def plan(head: Head) -> Export:
    name = head.family.name
    if why_not(head.family):
        raise UnsupportedFamily(
            f"SGLang does not serve {name} heads. Use --format headstart, or serve with an engine "
            f"that does: {', '.join(served_by(name)) or 'none known'}."
        )
    if name in _RENUMBERED and head.num_modules != 1:
        raise UnsupportedFamily(f"SGLang runs one {name} module; this has {head.num_modules}.")
    described = None
    if head.is_quantized and names_modules(own_quantization(head)):
        described = _described(head)
        if described is None:
            head = dequantize(head)
            note = f"dequantised: under which names SGLang asks for a {name} head is not known here"
            head = head.changed(head.tensors, note)
    config = copy.deepcopy(dict(head.config))
    tensors: dict[str, TensorSource] = {}
    dropped: dict[str, str] = {}
    stored = _stored(head)
    naming = head.family.keys.readable(stored)
    for ours, source in head.tensors.items():
        role = ours.split(".")[2]
        if role in _LEFT_OUT and role in head.family.layout.shares:
            dropped[ours] = role
            continue
        tensors[head.family.keys.to_published(ours, naming)] = source
    if described is not None:
        config["quantization_config"] = described
    if name in _RENUMBERED:
        config.update(num_hidden_layers=1, architectures=[_RENUMBERED[name]])
    documents: dict[str, Any] = {
        "config.json": json.dumps(config, indent=2, ensure_ascii=False, sort_keys=True),
        "model.safetensors.index.json": json.dumps(
            {"weight_map": dict.fromkeys(tensors, FILE)}, indent=4
        ),
    }
    changes = [*head.changes, *head.config_notes()]
    if dropped:
        changes.append(
            f"the head's copies of {' and '.join(sorted(set(dropped.values())))} were left out; "
            "SGLang uses the target's"
        )
    if naming != stored:
        changes.append(
            f"names begin with {naming.root}mtp., which SGLang reads, not with {stored.root}mtp."
        )
    details = {
        "format": "sglang",
        "family": name,
        "root": head.root,
        "trunk_config": dict(head.config),
        "left_out": sorted({*dropped, *head.left_out}),
        "lost_fields": list(head.lost_fields),
        "quantization": dict(head.quantization),
    }
    shard = Shard(tensors, metadata={})
    return Export(FolderPlan({FILE: shard}, head.side_files(), documents), tuple(changes), details)


def _stored(head: Head) -> Naming:
    return _STANDALONE if head.family.name in _RENUMBERED else head.naming()


def _described(head: Head) -> dict[str, Any] | None:
    """A config for the head alone; None where SGLang's names of its modules are not known."""
    naming = head.family.keys.readable(_stored(head))
    plain, quantized = modules_of(head)
    found = own_groups(head, naming, beside_trunk=False)
    if found is None or not lookups(head.family, naming, quantized, "sglang", beside_trunk=False):
        return None
    ignored = lookups(head.family, naming, plain, beside_trunk=False)
    return {**compressed_config(*found), "ignore": ignored}


def recognises(checkpoint: Checkpoint) -> bool:
    return any(name.endswith("NextN") for name in checkpoint.config.architectures)


def read(checkpoint: Checkpoint) -> Head:
    made = made_by_us(checkpoint.folder)
    owner = family(made.family or _family_name(checkpoint))
    config, lost = made.trunk_config or checkpoint.config.raw, made.lost_fields
    if owner.name in _RENUMBERED:
        naming = _STANDALONE
        if made.trunk_config is None:  # SGLang's own script keeps no trace of the trunk's depth
            config = {**config, "architectures": list(owner.architectures[:1])}
            lost = ("num_hidden_layers",)
    else:
        naming = owner.keys.find_root(
            list(checkpoint.tensors), owner.naming(checkpoint.config.fields)
        )
    tensors = {
        ours: checkpoint.source(published)
        for published in checkpoint.tensors
        if (ours := owner.keys.to_ours(published, naming)) is not None
    }
    unexpected = [n for n in checkpoint.tensors if owner.keys.to_ours(n, naming) is None]
    if unexpected:
        raise UnexpectedTensor(
            f"{checkpoint.folder} holds {some(unexpected)}, which is not part of a {owner.name} "
            "head. Remove it, or export the head again."
        )
    return Head(
        owner, tensors, config, checkpoint, made.root or naming.root, count_modules(tensors),
        left_out=made.left_out, lost_fields=lost, quantization=made.quantization,
    )  # fmt: skip


def _family_name(checkpoint: Checkpoint) -> str:
    """From config, for folders that SGLang's own script wrote."""
    from headstart.heads.detection import require_family

    return require_family(checkpoint).name
