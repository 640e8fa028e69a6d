"""Our own format: our tensor names, and the contract in config.json (docs/checkpoint-format.md)."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from headstart.checkpoint.config_fields import check_fields
from headstart.checkpoint.provenance import is_our_name, made_by_us
from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.writer import FolderPlan, index_document, split_shards
from headstart.errors import BadConfig, MissingTensor, UnexpectedTensor, some
from headstart.families.base import Family, HeadLayout
from headstart.families.registry import family
from headstart.heads.formats import Export, count_modules, format_of
from headstart.heads.head import DRAFT_LM_HEAD, Head

FILE = None  # one file or many shards
LOSES = ""
FORMAT_VERSION = 1
MODEL_TYPE = "headstart_head"
_MAX_MODULES = 64
# parts of the contract that heads of older releases do not state
_LATER = ("zero_embed_at_position_0", "rotates_halves", "out_norm", "out_norm_mean", "shares")
_TRUNK = "trunk."  # tensors of the trunk that another format carried along


def why_not(owner: Family) -> str:
    return ""


def contract(layout: HeadLayout) -> dict[str, Any]:
    """The layout as JSON has it, without what engines make of it."""
    whole = {each.name: getattr(layout, each.name) for each in fields(HeadLayout)}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in whole.items()
        if name not in ("deviations", "former", "unsettled")
    }


def plan(head: Head) -> Export:
    config = {
        "headstart_format": FORMAT_VERSION,
        "model_type": MODEL_TYPE,
        "family": head.family.name,
        "modules": head.num_modules,
        "root": head.root,
        "layout": contract(head.family.layout),
        "trunk_config": dict(head.config),
    }
    if head.quantization:
        config["quantization_config"] = dict(head.quantization)
    tensors = dict(sorted({**head.tensors, **head.draft_lm_head}.items()))
    tensors |= {_TRUNK + name: source for name, source in _carried(head).items()}
    shards = split_shards(tensors, stem="head")
    documents: dict[str, Any] = {"config.json": config}
    if len(shards) > 1:
        weight_map = {name: file for file, shard in shards.items() for name in shard.tensors}
        total = sum(source.num_bytes for source in tensors.values())
        documents["model.safetensors.index.json"] = index_document(weight_map, total)
    details = {"left_out": sorted(head.left_out), "lost_fields": list(head.lost_fields)}
    changes = (*head.changes, *head.config_notes())
    return Export(FolderPlan(shards, head.side_files(), documents), changes, details)


def _carried(head: Head) -> dict[str, TensorSource]:
    """Trunk tensors that a standalone head brought along; those of a full model stay with it."""
    if format_of(head.origin) is None:
        return {}
    brought = head.origin.tensors
    return {n: s for n, s in head.trunk_tensors.items() if n in brought or _TRUNK + n in brought}


def recognises(checkpoint: Checkpoint) -> bool:
    return "headstart_format" in checkpoint.config.raw


def read(checkpoint: Checkpoint) -> Head:
    raw = checkpoint.config.raw
    where = checkpoint.folder / "config.json"
    if raw["headstart_format"] != FORMAT_VERSION:
        raise BadConfig(
            f"{where}: headstart_format is {raw['headstart_format']!r}; this release reads "
            f"{FORMAT_VERSION}. Use the release that wrote it, or export the head again."
        )
    config, modules, root = raw.get("trunk_config"), raw.get("modules"), raw.get("root")
    if not isinstance(config, dict) or not isinstance(root, str):
        raise BadConfig(
            f"{where}: trunk_config or root is missing or of the wrong type; expected an object "
            "and a string. Export the head again."
        )
    if type(modules) is not int or not 1 <= modules <= _MAX_MODULES:
        raise BadConfig(
            f"{where}: modules is {repr(modules)[:60]}; expected a whole number from 1 to "
            f"{_MAX_MODULES}. Export the head again."
        )
    check_fields(where, config, "trunk_config.")
    owner = family(str(raw.get("family")))
    _check_contract(checkpoint, owner.layout, raw.get("layout"))
    names = [n for n in checkpoint.tensors if not n.startswith(f"{DRAFT_LM_HEAD}.")]
    tensors = {n: checkpoint.source(n) for n in names if not n.startswith(_TRUNK)}
    carried = {n.removeprefix(_TRUNK): checkpoint.source(n) for n in names if n not in tensors}
    drafting = {n: checkpoint.source(n) for n in checkpoint.tensors if n not in names}
    unexpected = [n for n in tensors if not is_our_name(n)]
    if unexpected:
        raise UnexpectedTensor(
            f"{checkpoint.folder} holds {some(unexpected)}; expected names such as "
            "modules.0.fuse.weight, or names that start with shared., trunk. or "
            f"{DRAFT_LM_HEAD}. Remove what does not belong to the head."
        )
    found = count_modules(tensors)
    if found != modules:
        raise MissingTensor(
            f"{where} says {modules} module(s), but {found} hold a fuse tensor; expected as many. "
            "Export the head again."
        )
    made = made_by_us(checkpoint.folder)
    return Head(
        owner, tensors, config, checkpoint, root, modules, carried, made.left_out,
        lost_fields=made.lost_fields, quantization=checkpoint.config.quantization,
        draft_lm_head=drafting,
    )  # fmt: skip


def _check_contract(checkpoint: Checkpoint, layout: HeadLayout, stored: Any) -> None:
    """A head trained under another contract than the family's would draft nonsense."""
    stored = stored if isinstance(stored, dict) else {}
    stored = {"normalises_hidden": True, **stored}  # heads written before it was asked had one
    for key, ours in contract(layout).items():
        if key in _LATER and key not in stored:
            continue
        if stored.get(key) != ours:
            raise BadConfig(
                f"{checkpoint.folder / 'config.json'}: layout.{key} is "
                f"{repr(stored.get(key))[:60]}; the family has {ours!r}. The head was made "
                "under another contract; export or train it again."
            )
