"""Puts a head into a checkpoint; every tensor that is not the head's stays byte-identical.

Shards without head tensors are copied whole. Replaced tensors stay in their shard, new ones go
into a shard of their own (or into the only file there is). The config then declares the head, a
quantised model's list of unquantised modules names it as engines ask for it, and the index
covers everything.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from headstart.checkpoint.index import INDEX_NAME
from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.writer import FolderPlan, Shard, index_document, split_shards
from headstart.errors import (
    CheckpointError,
    MissingTensor,
    ShapeMismatch,
    UnsupportedFamily,
    some,
)
from headstart.families.base import Family, Naming
from headstart.heads.detection import (
    FoundHead,
    declared_count,
    find_head_of,
    is_dspark,
    lacking,
    require_family,
)
from headstart.heads.experts import fuse_experts, has_fused_experts, split_experts
from headstart.heads.head import Head, dequantize
from headstart.heads.operation import Operation, megabytes
from headstart.heads.quantization import is_quantized
from headstart.heads.schemes import check_scheme, relist
from headstart.heads.sharing import sharing, trunk_tensor

_NEW_SHARD = "model-mtp"


def plan_stitch(
    head: Head,
    model: Checkpoint,
    *,
    name: str = "stitch",
    dequantized: bool = False,
    model_type: str | None = None,
    extra: Mapping[str, TensorSource] | None = None,
    documents: Mapping[str, Any] | None = None,
) -> Operation:
    """`model` with `head` in place of its own; `extra` and `documents` are further new content."""
    owner = require_family(model, model_type)
    if owner.name != head.family.name:
        raise UnsupportedFamily(
            f"the head is a {head.family.name} head, {model.folder} is {owner.name}. A head only "
            "fits the family and model it was made for; compare both with `headstart inspect`."
        )
    if is_dspark(model.config):
        raise CheckpointError(
            f"{model.folder} holds a DSpark drafter under the names of a head (the config has "
            "dspark_* fields); a head would overwrite half of it. Take the original release."
        )
    existing = find_head_of(model, owner)
    if dequantized:
        head = dequantize(head)
    head = _same_experts(head, existing)
    head = _fresh_copies(head, model)
    _check_fit(head, model)
    check_scheme(head, model)
    naming = existing.naming if existing.tensors else _naming(owner, model, head)
    tensors = {owner.keys.to_published(ours, naming): s for ours, s in head.tensors.items()}
    kept_copies = _kept_copies(head, existing)
    removed = set(existing.tensors.values()) - set(tensors) - kept_copies
    plan, counts = _layout(model, {**tensors, **(extra or {})}, removed)
    config = _config(head, model)
    lists, notes = relist(head, model, naming, config)
    facts = {
        "head": f"{owner.name}, {head.num_modules} module(s), {len(tensors)} tensors, "
        f"{megabytes(head.num_bytes)}",
        "model": f"{len(model.index.metadata)} shards, head {existing.state}",
        "result": f"{counts['replaced']} tensors replaced, {counts['added']} added, "
        f"{len(removed)} removed; {counts['rewritten']} shards written, "
        f"{counts['copied']} copied unchanged",
    }
    new_documents = {"config.json": config, **lists, **plan.documents, **(documents or {})}
    copies = {n: p for n, p in plan.copies.items() if n not in new_documents}
    return Operation(
        name,
        (model,) if head.origin.folder == model.folder else (model, head.origin),
        FolderPlan(plan.shards, copies, new_documents),
        facts,
        (*head.changes, *notes),
        {"family": owner.name, "modules": head.num_modules, "replaced": sorted(tensors)},
    )


def plan_restore(
    model: Checkpoint,
    original: Checkpoint,
    head: Head,
    *,
    dequantized: bool = False,
    model_type: str | None = None,
) -> Operation:
    """A fine-tuned or quantised model with the head of its original."""
    existing = find_head_of(model, require_family(model, model_type))
    if existing.is_usable:
        raise CheckpointError(
            f"{model.folder} has a whole head ({existing.state}); there is nothing to restore. To "
            f"replace it: headstart stitch {original.folder} {model.folder} --out DIR"
        )
    return plan_stitch(head, model, name="restore", dequantized=dequantized, model_type=model_type)


def _naming(owner: Family, model: Checkpoint, head: Head) -> Naming:
    root = head.root if head.root in owner.keys.roots else None
    return owner.naming(model.config.fields, root)


def _same_experts(head: Head, existing: FoundHead) -> Head:
    """Experts in the layout that the model's own head has, if it has one."""
    if not existing.tensors or not any(".experts." in name for name in existing.tensors):
        return head
    wants_fused = has_fused_experts(existing.tensors)
    if wants_fused == has_fused_experts(head.tensors):
        return head
    if head.is_quantized:
        raise CheckpointError(
            "the head's experts are quantised and stored in another layout than the model's; "
            "expected the same layout. Add --dequantize."
        )
    tensors = fuse_experts(head.tensors) if wants_fused else split_experts(head.tensors)
    layout = "fused" if wants_fused else "one by one"
    return head.changed(tensors, f"experts are stored {layout}, as in the model (same values)")


def _fresh_copies(head: Head, model: Checkpoint) -> Head:
    """Stored copies of embedding and LM head must be copies of *this* trunk's."""
    tensors = dict(head.tensors)
    changes = []
    for role in head.family.copies:
        own = trunk_tensor(model, head.family, role)
        if own is None:
            continue
        stored = [name for name in tensors if name.split(".")[2] == role]
        wanted = [name for name in head.left_out if name.split(".")[2] == role]
        if not stored and not wanted:
            continue
        is_copy = bool(wanted) or _was_copy(head, role)
        if is_copy:
            replaced = {name: model.source(own.name) for name in {*stored, *wanted}}
            if stored and not _same_place(tensors[stored[0]], replaced[stored[0]]):
                changes.append(f"the head's copy of {role} is now a copy of this trunk's")
            tensors.update(replaced)
    return head.changed(tensors, *changes) if tensors != dict(head.tensors) else head


def _was_copy(head: Head, role: str) -> bool:
    """Whether the head stored a mere copy of its own trunk's tensor; unknown counts as no."""
    from headstart.heads.detection import find_family, find_head_of

    if find_family(head.origin) is not head.family:
        return False
    return sharing(head.origin, find_head_of(head.origin, head.family)).get(role) == (
        "identical copy"
    )


def _same_place(left: TensorSource, right: TensorSource) -> bool:
    return list(left.pieces()) == list(right.pieces())


def _check_fit(head: Head, model: Checkpoint) -> None:
    lost = lacking(head.family, model.config.fields, head.num_modules, head.tensors)
    if lost:
        raise MissingTensor(
            f"the head lacks {some(lost)}, which {model.folder} asks for by its config. The head "
            "comes from another model size; compare both with `headstart inspect`."
        )
    tensors = split_experts(head.tensors)
    expected = head.family.expected(model.config.fields, head.num_modules)
    for name, shape in expected.items():
        source = tensors.get(name)
        if source is None or shape is None or is_quantized(name, source):
            continue
        if source.shape != shape:
            raise ShapeMismatch(
                f"{name}: the head has {source.shape}, {model.folder} asks for {shape}. The head "
                "comes from another model size; compare both with `headstart inspect`."
            )


def _kept_copies(head: Head, existing: FoundHead) -> set[str]:
    """Copies in the model's own head that the new head does not bring: they stay."""
    return {
        published
        for ours, published in existing.tensors.items()
        if ours.split(".")[2] in head.family.copies and ours not in head.tensors
    }


def _layout(
    model: Checkpoint, tensors: Mapping[str, TensorSource], removed: set[str]
) -> tuple[FolderPlan, dict[str, int]]:
    """Which shard holds what in the result."""
    shards: dict[str, Shard] = {}
    copies = {path.name: path for path in model.side_files()}
    placed: dict[str, str] = {}
    touched = set(tensors) | removed
    duplicated = {
        shard
        for name, files in model.index.duplicates.items()
        if name in touched
        for shard in files
    }
    total = copied = 0
    for file, infos in model.index.shards.items():
        names = {info.name for info in infos}
        keep = {n: model.source(n) for n in sorted(names - removed)}
        new = {n: tensors[n] for n in names & set(tensors)}
        total += sum(s.num_bytes for s in {**keep, **new}.values())
        if not new and not names & removed and file not in duplicated:
            copies[file] = model.folder / file
            copied += 1
        elif keep or new:
            shards[file] = Shard({**keep, **new}, model.index.metadata[file])
        placed.update(dict.fromkeys({**keep, **new}, file))
    added = {name: source for name, source in tensors.items() if name not in placed}
    total += sum(source.num_bytes for source in added.values())
    single = len(model.index.metadata) == 1 and not model.index.has_index
    if added and single:
        # A model of one file stays one: loaders would not look for a second without an index.
        file = next(iter(model.index.metadata))
        base = shards.get(file)
        old = base.tensors if base else {n: model.source(n) for n in sorted(model.tensors)}
        shards[file] = Shard({**old, **added}, model.index.metadata[file])
        copied -= file in copies
        copies.pop(file, None)
        placed.update(dict.fromkeys(added, file))
    elif added:
        for file, shard in split_shards(added, stem=_free_stem(model)).items():
            shards[file] = shard
            placed.update(dict.fromkeys(shard.tensors, file))
    documents = {} if single else {INDEX_NAME: index_document(placed, total)}
    counts = {
        "replaced": len(set(tensors) - set(added)),
        "added": len(added),
        "rewritten": len(shards),
        "copied": copied,
    }
    return FolderPlan(shards, copies, documents), counts


def _free_stem(model: Checkpoint) -> str:
    stem, count = _NEW_SHARD, 2
    while any(file.startswith(stem) for file in model.index.metadata):
        stem, count = f"{_NEW_SHARD}-{count}", count + 1
    return stem


def _config(head: Head, model: Checkpoint) -> dict[str, Any]:
    config = copy.deepcopy(model.config.raw)
    field = head.family.count_field
    if field is not None and declared_count(model.config) != head.num_modules:
        text = config.get("text_config")
        place = text if isinstance(text, dict) and "." not in field else config
        *path, last = field.split(".")
        for key in path:
            place = place.setdefault(key, {})
        place[last] = head.num_modules
    return config
