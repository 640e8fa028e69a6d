"""The `mtp/` folder that transformers' MtpModel saves, as LlamaFactory does beside a model; read.

What tensors are called there depends on the release of transformers, because it turns its own
renaming around as it saves: 5.22 writes `layers.0..)self_attn...`, and other names for the first
module than for later ones. All spellings that were seen are taken.
"""

from __future__ import annotations

import re

from headstart.checkpoint.reader import Checkpoint
from headstart.errors import UnexpectedTensor, UnsupportedFamily, some
from headstart.families.base import Family
from headstart.families.registry import match_family
from headstart.heads.formats import count_modules
from headstart.heads.head import Head

_CLASS = "MtpModel"
_MODULE = re.compile(r"layers\.(?P<module>0|[1-9][0-9]{0,3})\.(?P<rest>.+)")
_BLOCK = ("mtp_block.", "transformer_block.", ".)")
_ROLES = {
    "fuse": ("eh_proj", "input_proj", "fc"),
    "embed_norm": ("enorm", "embed_norm", "pre_fc_norm_embedding"),
    "hidden_norm": ("hnorm", "hidden_norm", "pre_fc_norm_hidden"),
    "out_norm": ("post_norm", "shared_head.norm", "norm"),
}
_OURS = {theirs: ours for ours, names in _ROLES.items() for theirs in names}
_TRUNK = ("embed_tokens.weight", "shared_head.weight")  # the trunk's own tables, written again
# what the class computes: a head of another contract would draft nonsense
_CONTRACT = {
    "fuse_order": "embed_first", "trunk_hidden": "after_final_norm",
    "recycled_hidden": "after_out_norm", "out_norm": "own",
}  # fmt: skip


def recognises(checkpoint: Checkpoint) -> bool:
    return _CLASS in checkpoint.config.architectures


def read(checkpoint: Checkpoint) -> Head:
    config = checkpoint.config
    owner = match_family(config.fields, config.model_types, ())
    if owner is None:
        raise UnsupportedFamily(
            f"{checkpoint.folder} is a head that transformers saved, of model_type "
            f"{config.model_type!r}, which is not a family with a known head. See `headstart "
            "families`."
        )
    _check_contract(checkpoint, owner)
    names = {name: _our_name(name) for name in checkpoint.tensors if name not in _TRUNK}
    unexpected = [name for name, ours in names.items() if ours is None]
    if unexpected:
        raise UnexpectedTensor(
            f"{checkpoint.folder} holds {some(unexpected)}, which is not part of a head that "
            "transformers saves. Remove what does not belong to it."
        )
    tensors = {ours: checkpoint.source(name) for name, ours in names.items() if ours is not None}
    raw = {**config.raw, "architectures": list(owner.architectures[:1])}
    said = [name for name in _TRUNK if name in checkpoint.tensors]
    changes = (f"left out: {' and '.join(said)}, which are the trunk's",) if said else ()
    return Head(
        owner, tensors, raw, checkpoint, owner.keys.roots[0], count_modules(tensors),
        changes=changes, lost_fields=("num_hidden_layers",),
    )  # fmt: skip


def _our_name(name: str) -> str | None:
    found = _MODULE.fullmatch(name)
    module, rest = (found["module"], found["rest"]) if found else ("0", name)
    bare = rest
    for prefix in _BLOCK:
        bare = bare.removeprefix(prefix)
    role, _, parameter = bare.rpartition(".")
    if role in _OURS and (found is None or role != "norm"):
        return f"modules.{module}.{_OURS[role]}.{parameter}"
    return f"modules.{module}.block.{bare}" if found and bare != rest else None


def _check_contract(checkpoint: Checkpoint, owner: Family) -> None:
    for key, value in _CONTRACT.items():
        if getattr(owner.layout, key) != value:
            raise UnsupportedFamily(
                f"{checkpoint.folder}: transformers' {_CLASS} computes heads with {key} {value}, "
                f"and {owner.title} has {getattr(owner.layout, key)}. No engine runs it so."
            )
