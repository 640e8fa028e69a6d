"""A head put into a model that MLX converted, in one of the layouts that runtimes of MLX read.

The trunk's files are copied byte for byte. `sidecar` and `vllm-mlx` put the head where mlx-lm does
not look; `embedded` is for runtimes that read nothing else, and is said to be a trap for some
releases of mlx-lm (`mlx_model.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headstart.checkpoint.config import text_part
from headstart.checkpoint.index import INDEX_NAME
from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.writer import FolderPlan, Shard, index_document
from headstart.errors import CheckpointError, ConfigError, UnsupportedFamily
from headstart.families.registry import family
from headstart.heads.detection import quoted
from headstart.heads.formats.mlx import spelled_of
from headstart.heads.formats.mlx_drafters import DRAFTERS
from headstart.heads.formats.mlx_model import (
    GAMMA,
    SUB_FILE,
    SUB_MANIFEST,
    TRAP,
    TRAP_TYPES,
    head_tensors,
)
from headstart.heads.formats.mlx_spelling import GROUP_SIZE, SpelledMlx, affine_of
from headstart.heads.head import Head
from headstart.heads.operation import Operation, counted, megabytes

LAYOUTS = {
    "sidecar": "mtp.safetensors beside the model (mlx-vlm, MTPLX, OptiQ)",
    "vllm-mlx": "mtp/weights.safetensors with a manifest (vllm-mlx, MTPLX)",
    "embedded": "mtp.* in the model's index (mlx-vlm, oMLX)",
}
_FILES = {"sidecar": "mtp.safetensors", "vllm-mlx": SUB_FILE, "embedded": "model-mtp.safetensors"}


def plan_mlx_stitch(
    head: Head, model: Checkpoint, *, layout: str, head_type: str | None, name: str
) -> Operation:
    """`model` with `head` in place of its own."""
    _check(head, model, layout)
    spelled = _spelled(head, model, layout, head_type)
    new = {f"mtp.{each}": source for each, source in spelled.tensors.items()}
    removed = head_tensors(model)
    shards, copies = _trunk_files(model, set(removed))
    shards[_FILES[layout]] = Shard(new, metadata={"format": "mlx"})
    copies.pop(_FILES[layout], None)
    documents: dict[str, Any] = {"config.json": _config(head, model, layout, spelled)}
    if layout == "vllm-mlx":
        documents[SUB_MANIFEST] = GAMMA
    if layout == "embedded" or model.index.has_index:
        documents[INDEX_NAME] = _index(model, new if layout == "embedded" else {}, set(removed))
    notes = [*spelled.changes]
    if layout == "embedded" and head.family.name in TRAP_TYPES:
        notes.append(f"{TRAP}. Use a newer or an older one, or --mlx-layout sidecar")
    trunk = sum(i.num_bytes for n, i in model.tensors.items() if n not in removed)
    size = sum(source.num_bytes for source in new.values())
    facts = {
        "head": f"{head.family.name}, {counted(len(new), 'tensor')}, {megabytes(size)}",
        "model": f"MLX, {counted(len(model.index.metadata), 'file')}, "
        f"{counted(len(removed), 'tensor')} of a head",
        "result": f"{LAYOUTS[layout]}; {megabytes(trunk)} of the trunk copied unchanged",
    }
    return Operation(
        name,
        (model,) if head.origin.folder == model.folder else (model, head.origin),
        FolderPlan(shards, {n: p for n, p in copies.items() if n not in documents}, documents),
        facts,
        tuple(notes),
        {"family": head.family.name, "modules": head.num_modules, "layout": layout,
         "replaced": sorted(new), **head.history},
    )  # fmt: skip


def refuse_whole(model: Checkpoint, head: Head) -> None:
    """CheckpointError for a model that has a head, to which nothing has to be given back."""
    if head_tensors(model):
        raise CheckpointError(
            f"{model.folder} has a head; there is nothing to restore. To replace it: headstart "
            f"stitch {quoted(head.origin.folder)} {quoted(model.folder)} --out DIR"
        )


def _check(head: Head, model: Checkpoint, layout: str) -> None:
    if layout not in LAYOUTS:
        raise ConfigError(f"--mlx-layout is {layout[:40]!r}; expected one of {', '.join(LAYOUTS)}.")
    drafter = DRAFTERS.get(head.family.name)
    if drafter is None or not drafter.layouts:
        known = [name for name, each in DRAFTERS.items() if each.layouts]
        instead = "headstart export ORIGINAL --format mlx" if drafter else "the original model"
        raise UnsupportedFamily(
            f"{model.folder}: no runtime of MLX is known to read a head of {head.family.title} "
            f"inside a model; expected one of {', '.join(known)}. Use {instead}."
        )
    if layout not in drafter.layouts:
        raise UnsupportedFamily(
            f"--mlx-layout {layout}: no runtime of MLX is known to run {head.family.title} so; "
            f"expected {' or '.join(drafter.layouts)}."
        )


def _spelled(head: Head, model: Checkpoint, layout: str, head_type: str | None) -> SpelledMlx:
    settings = model.config.get("quantization")
    settings = settings if isinstance(settings, dict) else {}
    group = settings.get("group_size")
    spelled = spelled_of(head, affine_of(head_type, group if type(group) is int else GROUP_SIZE))
    one = {key: spelled.quantization.get(key) for key in ("bits", "group_size")}
    other = {key: settings.get(key) for key in one}
    if layout == "vllm-mlx" and spelled.is_quantized and settings and one != other:
        # vllm-mlx dequantises heads by the model's own numbers, whatever the head's are.
        raise ConfigError(
            f"vllm-mlx reads quantised heads as the model is quantised ({other['bits']} bits, "
            f"groups of {other['group_size']}), and this head has {one['bits']} bits, groups of "
            f"{one['group_size']}. Leave --head-type out, or give q{other['bits']}."
        )
    return spelled


def _trunk_files(model: Checkpoint, removed: set[str]) -> tuple[dict[str, Shard], dict[str, Path]]:
    """Files that are written anew because a head is taken out of them, and those copied whole."""
    shards: dict[str, Shard] = {}
    copies = {name: path for name, path in model.files_below().items() if not _is_old(name)}
    for name, infos in model.index.shards.items():
        kept = [info.name for info in infos if info.name not in removed]
        if len(kept) == len(infos):
            copies[name] = model.folder / name
        elif kept:
            tensors: Mapping[str, TensorSource] = {each: model.source(each) for each in kept}
            shards[name] = Shard(tensors, model.index.metadata[name])
    return shards, copies


def _is_old(name: str) -> bool:
    """What described the head that was there."""
    return name in (SUB_FILE, SUB_MANIFEST, "mtplx_runtime.json")


def _index(model: Checkpoint, new: Mapping[str, TensorSource], removed: set[str]) -> dict[str, Any]:
    listed = {
        name: info.file.name
        for name, info in model.tensors.items()
        if name not in removed and info.file.name not in model.index.unlisted
    }
    total = sum(model.tensors[name].num_bytes for name in listed)
    listed |= dict.fromkeys(new, _FILES["embedded"])
    total += sum(source.num_bytes for source in new.values())
    return index_document(listed, total, model.index.index_metadata)


def _config(head: Head, model: Checkpoint, layout: str, spelled: SpelledMlx) -> dict[str, Any]:
    config = copy.deepcopy(model.config.raw)
    text = text_part(config)
    field = family(head.family.name).count_field
    if field is not None:
        text[field] = head.num_modules
    if layout == "vllm-mlx":
        config["num_nextn_predict_layers"] = text["num_nextn_predict_layers"] = head.num_modules
    config.pop("mtplx_mtp_quantization", None)
    if spelled.is_quantized:
        config["mtplx_mtp_quantization"] = dict(spelled.quantization)
    return config
