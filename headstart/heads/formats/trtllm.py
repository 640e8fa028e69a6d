"""A head for TensorRT-LLM's `speculative_model`: a folder of tensors that are called `mtp.*`.

It takes such tensors from the folder and leaves everything else to the target; of config.json it
reads how many modules there are and of which kinds their layers are. Heads that are published under
other names (appended layers) are not found there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headstart.checkpoint.provenance import made_by_us
from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.writer import FolderPlan, split_shards
from headstart.errors import UnexpectedTensor, UnsupportedFamily, some
from headstart.families.base import Family
from headstart.families.engines import served_by
from headstart.families.names import Naming
from headstart.heads.detection import require_family
from headstart.heads.formats import Export, count_modules
from headstart.heads.head import Head, config_fields, dequantize

FILE = None
LOSES = ""
_PREFIX = "mtp."
_COUNT = "num_nextn_predict_layers"
_MODULE = "mtp.layers."  # what its mapping is made for, beside Qwen's few names outside of it


def why_not(owner: Family) -> str:
    if "trtllm" not in served_by(owner.name):
        return "TensorRT-LLM does not serve such heads"
    if not any(published.startswith(_MODULE) for published in owner.keys.pairs):
        return "TensorRT-LLM takes tensors called mtp.layers.* alone, and these have other names"
    return ""


def plan(head: Head) -> Export:
    if reason := why_not(head.family):
        raise UnsupportedFamily(
            f"{head.family.name} cannot be written for TensorRT-LLM: {reason}. Put the head into "
            "the model instead: headstart stitch."
        )
    if head.quantization:  # of compressed-tensors, which TensorRT-LLM does not read
        head = dequantize(head)
    naming = _naming(head.family, head.config)
    tensors = {head.family.keys.to_published(n, naming): s for n, s in head.tensors.items()}
    config = {**head.config, _COUNT: head.num_modules}
    details = {
        "format": "trtllm", "family": head.family.name, "trunk_config": dict(head.config),
        "root": head.root, "left_out": sorted(head.left_out),
        "lost_fields": list(head.lost_fields),
    }  # fmt: skip
    changes = [*head.changes, *head.config_notes()]
    if head.family.name != "nemotron_h":
        changes.append("TensorRT-LLM's authors tried standalone heads of Nemotron-H alone")
    documents = {"config.json": config}
    return Export(FolderPlan(split_shards(tensors), {}, documents), tuple(changes), details)


def recognises(checkpoint: Checkpoint) -> bool:
    """Whether there is nothing but a head, under the names that TensorRT-LLM takes."""
    names = checkpoint.tensors
    return bool(names) and all(name.startswith(_PREFIX) for name in names)


def read(checkpoint: Checkpoint) -> Head:
    made = made_by_us(checkpoint.folder)
    owner = require_family(checkpoint)
    config: Mapping[str, Any] = made.trunk_config or checkpoint.config.raw
    naming = _naming(owner, config)
    names = {name: owner.keys.to_ours(name, naming) for name in checkpoint.tensors}
    unexpected = [name for name, ours in names.items() if ours is None]
    if unexpected:
        raise UnexpectedTensor(
            f"{checkpoint.folder} holds {some(unexpected)}, which is not part of a {owner.name} "
            "head. Remove it, or export the head again."
        )
    tensors = {ours: checkpoint.source(name) for name, ours in names.items() if ours is not None}
    return Head(
        owner, tensors, config, checkpoint, made.root, count_modules(tensors),
        left_out=made.left_out, lost_fields=made.lost_fields,
    )  # fmt: skip


def _naming(owner: Family, config: Mapping[str, Any]) -> Naming:
    """Without a prefix: names that begin otherwise are passed over."""
    return owner.naming(config_fields(config), "")
