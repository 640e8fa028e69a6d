"""What is written as GGUF: a file with a head alone, and a model with a head put in.

Every tensor and key that is not the head's is copied byte for byte. The only keys that change are
counts of blocks, modules and tensors and the arrays with one value per layer; left out are
nextn_shared_target_tensors and, from files with a head alone, those of splits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headstart.checkpoint.gguf.fields import ARRAY, STRING, UINT32, Field, field
from headstart.checkpoint.gguf.shard import GgufShard
from headstart.checkpoint.source import TensorSource, stored
from headstart.checkpoint.writer import FolderPlan
from headstart.errors import CheckpointError, MissingTensor, ShapeMismatch, UnsupportedFamily
from headstart.heads.detection import quoted
from headstart.heads.formats.gguf.arch import FUSION, PER_LAYER, SHARED
from headstart.heads.formats.gguf.found import FoundGguf, find_gguf_head, spelled_in
from headstart.heads.formats.gguf.model import SPLIT, GgufModel
from headstart.heads.formats.gguf.reduced import about_reduced, reduced
from headstart.heads.formats.gguf.spelling import (
    RECORD,
    SpelledHead,
    check_kind,
    record_text,
    retyped,
    spell,
)
from headstart.heads.head import Head
from headstart.heads.operation import Operation, counted, megabytes
from headstart.vocab.draft_vocab import DraftVocab

# Tensors that a file with a head alone needs beside it; without output.weight they are tied.
_BESIDE = ("token_embd.weight", "output_norm.weight", "output.weight", "rope_freqs.weight")


@dataclass(frozen=True)
class DraftFile:
    """A file with a head alone, and what to say about it."""

    plan: FolderPlan
    changes: tuple[str, ...]
    details: Mapping[str, Any]


def spelled_of(head: Head, head_type: str | None) -> SpelledHead:
    """As GGUF has it; a head that comes from a GGUF file keeps its bytes."""
    kind = check_kind(head_type)
    if isinstance(head.origin, GgufModel):
        return retyped(spelled_in(head.origin), kind)
    return spell(head, kind)


def plan_draft_file(
    head: Head,
    trunk: GgufModel,
    head_type: str | None = None,
    vocab: DraftVocab | None = None,
) -> DraftFile:
    """The head alone, as `llama-server --spec-draft-model` takes it, with the keys of `trunk`."""
    spelled = spelled_of(head, head_type)
    found = find_gguf_head(trunk)
    _check_fit(head, spelled, found)
    lost = [name for name in _BESIDE[:2] if name not in trunk.tensors]
    if lost:
        raise MissingTensor(
            f"{trunk.folder} has no {lost[0]}, which a file with a head alone needs. Give the "
            "whole trunk with --trunk."
        )
    tensors = {name: stored(trunk.tensors[name]) for name in _BESIDE if name in trunk.tensors}
    tensors |= placed(spelled, found.num_layers)
    if vocab is not None:
        tensors = reduced(tensors, spelled.arch, vocab)
    fields = [f for f in with_head(found, spelled) if not f.name.startswith("split.")]
    name = trunk.folder.name
    name = name if name.startswith("mtp-") else f"mtp-{_without_split(name)}"
    shard = GgufShard(tensors, tuple(fields), trunk.headers[0].alignment)
    beside = sum(tensors[each].num_bytes for each in _BESIDE if each in tensors)
    said = (
        f"keys, {', '.join(n for n in _BESIDE if n in tensors)} ({megabytes(beside)}) are those of "
        f"{trunk.folder.name}; llama.cpp needs them in a file with a head alone",
    )
    details = {"arch": spelled.arch.name, "head_type": head_type}
    changes = (*spelled.changes, *said, *about_reduced(vocab))
    return DraftFile(FolderPlan({name: shard}), changes, details)


def plan_gguf_stitch(
    head: Head, model: GgufModel, *, head_type: str | None = None, name: str = "stitch"
) -> Operation:
    """`model` with `head` in place of its own."""
    spelled = spelled_of(head, head_type)
    found = find_gguf_head(model)
    if found.is_head_only:
        raise CheckpointError(
            f"{model.folder} holds a head alone; give the GGUF file of the model it belongs to."
        )
    _check_fit(head, spelled, found)
    new = placed(spelled, found.num_layers)
    removed = set(found.names)
    shards: dict[str, GgufShard] = {}
    total = sum(len(header.tensors) for header in model.headers) - len(removed) + len(new)
    for number, header in enumerate(model.headers):
        kept = {n: stored(info) for n, info in header.tensors.items() if n not in removed}
        fields = with_head(found, spelled) if number == 0 else iter(header.fields.values())
        if number == len(model.headers) - 1:
            kept |= new
        counted_fields = tuple(_recounted(fields, total))
        shards[header.file.name] = GgufShard(kept, counted_fields, header.alignment, header.version)
    trunk_bytes = sum(i.num_bytes for n, i in model.tensors.items() if n not in removed)
    facts = {
        "head": f"{head.family.name}, {counted(spelled.num_modules, 'module')}, "
        f"{counted(len(new), 'tensor')}, {megabytes(spelled.num_bytes)}",
        "model": f"{model.arch_name}, {counted(len(model.headers), 'file')}, head {found.state}",
        "result": f"{len(removed)} tensors of the head taken out, {len(new)} put in; "
        f"{megabytes(trunk_bytes)} of the trunk copied unchanged",
    }
    return Operation(
        name,
        (model,) if head.origin.folder == model.folder else (model, head.origin),
        FolderPlan(shards),
        facts,
        spelled.changes,
        {"family": head.family.name, "modules": spelled.num_modules, "arch": model.arch_name,
         "replaced": sorted(new), **head.history},
    )  # fmt: skip


def plan_gguf_restore(head: Head, model: GgufModel, *, head_type: str | None = None) -> Operation:
    """A converted or quantised model with the head that it lost."""
    found = find_gguf_head(model)
    if found.is_usable:
        raise CheckpointError(
            f"{model.folder} has a whole head ({found.state}); there is nothing to restore. To "
            f"replace it: headstart stitch {quoted(head.origin.folder)} {quoted(model.folder)} "
            "--out DIR"
        )
    return plan_gguf_stitch(head, model, head_type=head_type, name="restore")


def placed(spelled: SpelledHead, layers: int) -> dict[str, TensorSource]:
    return {f"blk.{layers + m}.{name}": source for (m, name), source in spelled.tensors.items()}


def _without_split(name: str) -> str:
    """`x-00001-of-00003.gguf` as `x.gguf`."""
    found = SPLIT.fullmatch(name)
    return name if found is None else f"{found['stem']}.gguf"


def with_head(found: FoundGguf, spelled: SpelledHead) -> Iterator[Field]:
    """The keys of a file that holds `spelled` behind its trunk."""
    model, prefix = found.model, f"{found.model.arch_name}."
    counts = {
        f"{prefix}block_count": found.num_layers + spelled.num_modules,
        f"{prefix}nextn_predict_layers": spelled.num_modules,
    }
    for key, each in model.fields.items():
        if key in (RECORD, f"{prefix}{SHARED}"):
            continue
        if key in counts:
            yield each.changed(counts.pop(key))
        elif key.removeprefix(prefix) in PER_LAYER and each.kind == ARRAY:
            yield _extended(found, spelled, key.removeprefix(prefix), each)
        else:
            yield each
    for key, value in counts.items():
        yield field(key, value, UINT32)
    if spelled.record:
        yield field(RECORD, record_text(spelled.record), STRING)


def _extended(found: FoundGguf, spelled: SpelledHead, key: str, each: Field) -> Field:
    """An array with one value per layer, made to cover the head's blocks."""
    trunk = each.value[: found.num_layers]
    if len(trunk) < found.num_layers:
        return each  # a pattern that repeats, or an array of something else
    own = spelled.layer_values.get(key)
    if own is None or any(value is None for value in own):
        raise UnsupportedFamily(
            f"{found.model.folder} has {found.model.arch_name}.{key} with one value per layer, and "
            "what it is for the head's block is not known here. Convert the model with its head by "
            "llama.cpp's own converter."
        )
    return each.changed([*trunk, *own])


def _recounted(fields: Iterator[Field], total: int) -> Iterator[Field]:
    for each in fields:
        yield each.changed(total) if each.name == "split.tensors.count" else each


def _check_fit(head: Head, spelled: SpelledHead, found: FoundGguf) -> None:
    model = found.model
    compare = "A head only fits the model it was made for; compare both with `headstart inspect`."
    if spelled.arch.name != model.arch_name:
        raise UnsupportedFamily(
            f"the head is one of {head.family.title} ({spelled.arch.name} in llama.cpp), "
            f"{model.folder} is {model.arch_name[:40]!r}. {compare}"
        )
    if spelled.num_layers != found.num_layers:
        raise ShapeMismatch(
            f"the head belongs to a trunk of {spelled.num_layers} layers, {model.folder} has "
            f"{found.num_layers}. {compare}"
        )
    hidden = model.value("embedding_length")
    fuse = spelled.tensors[0, FUSION].shape
    if len(fuse) != 2 or hidden != fuse[0]:
        raise ShapeMismatch(
            f"the head's {FUSION} is {list(fuse)}, {model.folder} has width {hidden}. {compare}"
        )
    embed = model.tensors.get("token_embd.weight")
    for (_, name), source in spelled.tensors.items():
        is_table = name.startswith(("nextn.embed_tokens", "nextn.shared_head_head"))
        if is_table and embed is not None and source.shape != embed.shape:
            raise ShapeMismatch(
                f"{name} is {list(source.shape)}, the embedding of {model.folder} "
                f"{list(embed.shape)}: another vocabulary. {compare}"
            )
    if isinstance(head.origin, GgufModel):
        tokens = "tokenizer.ggml.tokens"
        if head.origin.fields.get(tokens) != model.fields.get(tokens):
            raise ShapeMismatch(
                f"{head.origin.folder} and {model.folder} have other tokens. {compare}"
            )
