"""Puts a head into a checkpoint; every tensor that is not the head's stays byte-identical.

`heads/placement.py` says which file holds what. The config then declares the head, and a quantised
model's list of unquantised modules names it as engines ask for it.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from headstart.checkpoint.compare import as_slice, equal_slices
from headstart.checkpoint.config import text_part
from headstart.checkpoint.header import TensorInfo
from headstart.checkpoint.provenance import digest
from headstart.checkpoint.quantized.names import is_quantized
from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.source import FileSlice, TensorSource
from headstart.checkpoint.writer import FolderPlan
from headstart.errors import (
    CheckpointError,
    ConfigError,
    HeadstartError,
    MissingTensor,
    ShapeMismatch,
    UnsupportedFamily,
    some,
)
from headstart.families.base import Family
from headstart.families.names import Naming
from headstart.heads.detection import (
    FoundHead,
    declared_count,
    expected_of,
    find_head_of,
    lacking,
    quoted,
    require_family,
)
from headstart.heads.experts import fuse_experts, has_fused_experts, split_experts
from headstart.heads.formats.gguf import GgufModel, plan_gguf_restore, plan_gguf_stitch
from headstart.heads.formats.mlx_layouts import plan_mlx_stitch, refuse_whole
from headstart.heads.formats.mlx_model import is_mlx_model
from headstart.heads.head import Head, dequantize, without_draft_lm_head
from headstart.heads.operation import Operation, counted, megabytes
from headstart.heads.placement import placement
from headstart.heads.schemes import check_scheme, relist
from headstart.heads.sharing import sharing, trunk_tensor


def plan_stitch(
    head: Head,
    model: Checkpoint,
    *,
    name: str = "stitch",
    dequantized: bool = False,
    model_type: str | None = None,
    head_type: str | None = None,
    mlx_layout: str | None = None,
    extra: Mapping[str, TensorSource] | None = None,
    documents: Mapping[str, Any] | None = None,
) -> Operation:
    """`model` with `head` in place of its own; `extra` and `documents` are further new content.

    `head_type` is the type that a head gets in a GGUF file or a model of MLX, `mlx_layout` where
    it lies in the latter.
    """
    if mlx_layout is not None and (isinstance(model, GgufModel) or not is_mlx_model(model)):
        raise ConfigError(f"--mlx-layout: {model.folder} is no model that MLX converted; drop it.")
    if isinstance(model, GgufModel):
        return plan_gguf_stitch(head, model, head_type=head_type, name=name)
    owner = require_family(model, model_type)
    if owner.name != head.family.name:
        raise UnsupportedFamily(
            f"the head is a {head.family.name} head, {model.folder} is {owner.name}. A head only "
            "fits the family and model it was made for; compare both with `headstart inspect`."
        )
    if is_mlx_model(model):
        _check_fit(head, model)
        layout = mlx_layout or "sidecar"
        return plan_mlx_stitch(head, model, layout=layout, head_type=head_type, name=name)
    _refuse_head_type(head_type, model)
    existing = find_head_of(model, owner)
    if dequantized:
        head = dequantize(head)
    head = without_draft_lm_head(head, "inside a model engines use the trunk's")
    head = _same_experts(head, existing)
    head = _fresh_copies(head, model)
    _check_fit(head, model)
    check_scheme(head, model)
    stored = existing.naming if existing.tensors else _naming(owner, model, head)
    naming = owner.keys.readable(stored)
    tensors = {owner.keys.to_published(ours, naming): s for ours, s in head.tensors.items()}
    kept_copies = _kept_copies(head, existing)
    removed = set(existing.tensors.values()) - set(tensors) - kept_copies
    placed = placement(model, {**tensors, **(extra or {})}, removed)
    config = _config(head, model)
    lists, notes = relist(head, model, naming, config)
    if naming != stored:
        notes.append(
            f"the head is stored below {naming.root}mtp., which engines read, not {stored.root}mtp."
        )
    if name == "stitch":
        notes += _from_elsewhere(head, model)
    facts = {
        "head": f"{owner.name}, {counted(head.num_modules, 'module')}, "
        f"{counted(len(tensors), 'tensor')}, {megabytes(head.num_bytes)}",
        "model": f"{counted(len(model.index.metadata), 'shard')}, head {existing.state}",
        "result": placed.summary,
    }
    new_documents = {"config.json": config, **lists, **placed.documents, **(documents or {})}
    copies = {n: p for n, p in placed.copies.items() if n not in new_documents}
    return Operation(
        name,
        (model,) if head.origin.folder == model.folder else (model, head.origin),
        FolderPlan(placed.shards, copies, new_documents),
        facts,
        (*head.changes, *notes, *placed.notes),
        {
            "family": owner.name,
            "modules": head.num_modules,
            "replaced": sorted(tensors),
            **head.history,
        },
    )


def plan_restore(
    model: Checkpoint,
    original: Checkpoint,
    head: Head,
    *,
    dequantized: bool = False,
    model_type: str | None = None,
    head_type: str | None = None,
    mlx_layout: str | None = None,
) -> Operation:
    """A fine-tuned or quantised model with the head of its original."""
    if isinstance(model, GgufModel):
        return plan_gguf_restore(head, model, head_type=head_type)
    existing = find_head_of(model, require_family(model, model_type))
    if is_mlx_model(model):
        refuse_whole(model, head)
    elif existing.is_usable:
        raise CheckpointError(
            f"{model.folder} has a whole head ({existing.state}); there is nothing to restore. To "
            f"replace it: headstart stitch {quoted(original.folder)} {quoted(model.folder)} "
            "--out DIR"
        )
    return plan_stitch(
        head, model, name="restore", dequantized=dequantized, model_type=model_type,
        head_type=head_type, mlx_layout=mlx_layout,
    )  # fmt: skip


def _refuse_head_type(head_type: str | None, model: Checkpoint) -> None:
    if head_type is not None:
        raise ConfigError(
            f"--head-type is for GGUF and MLX, and {model.folder} is a folder of published "
            "safetensors; drop it."
        )


def _from_elsewhere(head: Head, model: Checkpoint) -> list[str]:
    """A word about a head of another model, which fits by its sizes and may still be worthless."""
    owner = head.model
    if owner is None or os.path.realpath(owner) == os.path.realpath(model.folder):
        return []
    with suppress(OSError, ValueError, HeadstartError):  # it may be gone, or broken: no matter
        if digest(Checkpoint.open(owner)) == digest(model):
            return []  # the same model in another place
    return [f"the head comes from {owner}; `headstart inspect DIR --probe` says what it is worth"]


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
            if stored and not all(_is_stored_as(tensors[name], own) for name in stored):
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


def _is_stored_as(source: TensorSource, info: TensorInfo) -> bool:
    """Whether `source` has the bytes that the checkpoint stores as `info`."""
    if not source.is_copy or (source.dtype, source.shape) != (info.dtype, info.shape):
        return False
    slices = [piece for piece in source.pieces() if isinstance(piece, FileSlice)]
    whole = as_slice(info)
    return slices == [whole] or equal_slices(whole, slices)


def _check_fit(head: Head, model: Checkpoint) -> None:
    lost = lacking(head.family, model.config.fields, head.num_modules, head.tensors)
    if lost:
        raise MissingTensor(
            f"the head lacks {some(lost)}, which {model.folder} asks for by its config. The head "
            "comes from another model size; compare both with `headstart inspect`."
        )
    tensors = split_experts(head.tensors)
    expected = expected_of(head.family, model.config.fields, head.num_modules, tensors)
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


def _config(head: Head, model: Checkpoint) -> dict[str, Any]:
    config = copy.deepcopy(model.config.raw)
    field = head.family.count_field
    if field is not None and declared_count(model.config) != head.num_modules:
        place = config if "." in field else text_part(config)
        *path, last = field.split(".")
        for key in path:
            place[key] = place.get(key) or {}  # null is as good as absent
            place = place[key]
        place[last] = head.num_modules
    return config
