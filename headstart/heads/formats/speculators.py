"""The speculators project's MTP format: `mtp_layers.0.*`, fused experts, embedding half first.

Its own tools load Qwen-style heads; the format itself can hold any head with one module, one
decoder layer, one fusion matrix and an out norm. MiMo fuses hidden first, so its column halves
are exchanged on the way in and back on the way out. Embedding and LM head are never stored:
readers take the trunk's.
"""

from __future__ import annotations

from typing import Any

from headstart.checkpoint.config import text_part
from headstart.checkpoint.config_fields import check_fields
from headstart.checkpoint.local_paths import shown
from headstart.checkpoint.provenance import Made, made_by_us
from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.values import swapped_halves
from headstart.checkpoint.writer import FolderPlan, Shard
from headstart.errors import (
    BadConfig,
    MissingTensor,
    UnexpectedTensor,
    UnsupportedFamily,
    some,
)
from headstart.families.base import Family
from headstart.families.registry import family, match_family
from headstart.heads.experts import fuse_experts, has_fused_experts, split_experts
from headstart.heads.formats import Export
from headstart.heads.head import Head, dequantize

FILE = None  # the file has the name that models give theirs
LOSES = "quantised weights (8, 4 bits), which become BF16"
_PREFIX = "mtp_layers.0."
_ROLES = {
    "fuse": "input_proj",
    "embed_norm": "token_layernorm",
    "hidden_norm": "hidden_layernorm",
    "out_norm": "final_layernorm",
}
# Written by speculators' converter without meaning: never a part of the head.
_IGNORED = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight")
_THEIR_FAMILIES = ("qwen3", "qwen3_next", "qwen3_5", "qwen3_5_moe")
_DEFAULT_DEPTH = 3


def why_not(owner: Family) -> str:
    found = "; it ".join(_problems(owner, owner.default_modules))
    return f"the speculators format {found}" if found else ""


def plan(head: Head) -> Export:
    _check_fits(head.family, head.num_modules)
    head = dequantize(head)
    changes = [*head.changes, *head.config_notes()]
    kept = {n: s for n, s in head.tensors.items() if n.split(".")[2] not in head.family.copies}
    if len(kept) < len(head.tensors):
        changes.append("the head's copies of embedding and LM head were left out")
    was_fused = has_fused_experts(kept)
    fused = fuse_experts(kept)
    if has_fused_experts(fused) and not was_fused:
        changes.append("experts were fused, as the format wants them (values unchanged)")
    tensors = {_their_name(name): source for name, source in fused.items()}
    if head.family.layout.fuse_order == "hidden_first":
        name = f"{_PREFIX}input_proj.weight"
        tensors[name] = swapped_halves(tensors[name])
        changes.append("the column halves of the fusion matrix were exchanged (embedding first)")
    if head.family.name not in _THEIR_FAMILIES:
        changes.append(
            f"speculators' own tools do not load {head.family.name} heads; Headstart does"
        )
    details = {
        "family": head.family.name,
        "trunk_config": dict(head.config),
        "root": head.root,
        "experts": "fused" if was_fused else "per expert",
        "left_out": sorted({*head.left_out, *(set(head.tensors) - set(kept))}),
        "lost_fields": list(head.lost_fields),
    }
    if head.model is None:
        changes.append("the verifier has no name: which model it is, --model MODEL says")
    documents = {"config.json": _config(head, next(iter(tensors.values())).dtype)}
    return Export(
        FolderPlan({"model.safetensors": Shard(tensors)}, head.side_files(), documents),
        tuple(changes),
        details,
    )


def _problems(owner: Family, num_modules: int) -> list[str]:
    """Why the format cannot hold such a head: what follows "the format"."""
    layout = owner.layout
    problems = {
        f"holds one module, and there are {num_modules}": num_modules != 1,
        "holds one fusion matrix, and these heads add two": layout.fuse_order == "summed",
        "wants an out norm, and these heads have none": layout.out_norm == "none",
        "wants an out norm, and these heads use the trunk's": layout.out_norm == "shared",
        "wants a norm of the hidden state, and these heads have none": (
            not layout.normalises_hidden
        ),
        "holds one decoder layer, and these heads have several": owner.name == "nemotron_h",
        "has no place for an LM head, and these heads have their own": (
            "lm_head" not in layout.shares
        ),
        "has no place for an embedding, and these heads have their own": (
            "embed_tokens" not in layout.shares
        ),
    }
    return [problem for problem, applies in problems.items() if applies]


def _check_fits(owner: Family, num_modules: int) -> None:
    found = _problems(owner, num_modules)
    if found:
        raise UnsupportedFamily(
            f"the speculators format cannot carry a {owner.name} head: it {'; it '.join(found)}. "
            "Use --format headstart."
        )


def _their_name(ours: str) -> str:
    role, _, rest = ours.removeprefix("modules.0.").partition(".")
    if role != "block" and role not in _ROLES:
        raise UnexpectedTensor(
            f"the speculators format has no place for {ours}. Use --format headstart."
        )
    return _PREFIX + (rest if role == "block" else f"{_ROLES[role]}.{rest}")


def _our_name(theirs: str) -> str:
    rest = theirs.removeprefix(_PREFIX)
    role, _, parameter = rest.partition(".")
    back = {their: our for our, their in _ROLES.items()}
    return f"modules.0.{back[role]}.{parameter}" if role in back else f"modules.0.block.{rest}"


def _config(head: Head, dtype: str) -> dict[str, Any]:
    layer = dict(text_part(dict(head.config)))
    layer.pop("quantization_config", None)
    return {
        "architectures": ["MTPDraftModel"],
        "dtype": {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}.get(dtype, "bfloat16"),
        "num_nextn_predict_layers": 1,
        "speculators_model_type": "mtp",
        "speculators_config": {
            "algorithm": "mtp",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": _DEFAULT_DEPTH,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": None if head.model is None else shown(head.model),
                "architectures": list(head.config.get("architectures") or []),
            },
        },
        "transformer_layer_config": layer,
    }


def recognises(checkpoint: Checkpoint) -> bool:
    return checkpoint.config.raw.get("speculators_model_type") == "mtp"


def read(checkpoint: Checkpoint) -> Head:
    made = made_by_us(checkpoint.folder)
    layer = checkpoint.config.raw.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise BadConfig(
            f"{checkpoint.folder / 'config.json'}: transformer_layer_config is missing; expected "
            "the config of the head's decoder layer. Convert the head again."
        )
    check_fields(checkpoint.folder / "config.json", layer, "transformer_layer_config.")
    owner = _owner(checkpoint, made, layer)
    _check_fits(owner, 1)
    unexpected = [
        name for name in checkpoint.tensors if not name.startswith(_PREFIX) and name not in _IGNORED
    ]
    if unexpected:
        raise UnexpectedTensor(
            f"{checkpoint.folder} holds {some(unexpected)}; expected only {_PREFIX}* tensors."
        )
    tensors: dict[str, TensorSource] = {
        _our_name(name): checkpoint.source(name)
        for name in checkpoint.tensors
        if name.startswith(_PREFIX)
    }
    if owner.layout.fuse_order == "hidden_first":
        if "modules.0.fuse.weight" not in tensors:
            raise MissingTensor(
                f"{checkpoint.folder} lacks {_PREFIX}input_proj.weight, the fusion matrix; a "
                f"{owner.name} head has it. Export the head again."
            )
        tensors["modules.0.fuse.weight"] = swapped_halves(tensors["modules.0.fuse.weight"])
    if made.experts != "fused":  # published heads mostly keep experts apart
        tensors = split_experts(tensors)
    config = made.trunk_config or {
        **layer,
        "architectures": _verifier_architectures(checkpoint),
    }
    verifier = checkpoint.config.at("speculators_config.verifier.name_or_path")
    return Head(
        owner, tensors, config, checkpoint, made.root, 1,
        left_out=made.left_out, lost_fields=made.lost_fields,
        model=verifier if isinstance(verifier, str) else None,
    )  # fmt: skip


def _owner(checkpoint: Checkpoint, made: Made, layer: dict[str, Any]) -> Family:
    if made.family:
        return family(made.family)
    model_type = str(layer.get("model_type") or "")
    found = match_family(layer, (model_type,), _verifier_architectures(checkpoint))
    if found is None:
        raise UnsupportedFamily(
            f"{checkpoint.folder}: transformer_layer_config.model_type {model_type!r} is not a "
            "known family. See `headstart families`."
        )
    return found


def _verifier_architectures(checkpoint: Checkpoint) -> list[str]:
    found = checkpoint.config.at("speculators_config.verifier.architectures")
    return [str(name) for name in found] if isinstance(found, list) else []
