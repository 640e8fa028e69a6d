"""Takes a head out of a checkpoint, or turns a standalone head into another format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from headstart.checkpoint.reader import Checkpoint
from headstart.errors import ConfigError
from headstart.heads.formats import Export, format_named, format_of
from headstart.heads.head import Head, borrowing, dequantize, without_draft_lm_head
from headstart.heads.operation import Operation, megabytes
from headstart.vocab.draft_vocab import DraftVocab
from headstart.vocab.files import read_one

_WITH_COPIES = ("xllm", "headstart")  # formats that keep copies of embedding and LM head


def plan_export(
    head: Head,
    format_name: str,
    *,
    name: str = "export",
    dequantized: bool = False,
    trunk: Checkpoint | None = None,
    head_type: str | None = None,
    draft_vocab: str | None = None,
) -> Operation:
    """The head as a folder of `format_name`; `trunk` is GGUF's, `head_type` also MLX's."""
    if dequantized:
        head = dequantize(head)
    if format_name != "headstart":
        head = without_draft_lm_head(head, f"{format_name} has no place for it")
    export = _export(head, format_name, trunk, head_type, draft_vocab)
    written = sum(s.num_bytes for sh in export.plan.shards.values() for s in sh.tensors.values())
    count = sum(len(shard.tensors) for shard in export.plan.shards.values())
    modules = f"{head.num_modules} module{'s' if head.num_modules > 1 else ''}"
    facts = {
        "head": f"{head.family.name}, {modules}, {len(head.tensors)} tensors, "
        f"{megabytes(head.num_bytes)}",
        "format": f"{format_name}, {count} tensors, {megabytes(written)}",
    }
    return Operation(
        name, (head.origin,), export.plan, facts, export.changes,
        {"format": format_name, "of_model": head.model, **export.details, **head.history},
    )  # fmt: skip


def _export(
    head: Head,
    format_name: str,
    trunk: Checkpoint | None,
    head_type: str | None,
    draft_vocab: str | None,
) -> Export:
    if format_name == "gguf":
        from headstart.heads.formats.gguf import GgufModel, plan

        if trunk is not None and not isinstance(trunk, GgufModel):
            raise ConfigError(f"--trunk is {trunk.folder}; expected a GGUF file.")
        return plan(head, trunk, head_type, _vocab(draft_vocab))
    if format_name == "mlx" and trunk is None and draft_vocab is None:
        from headstart.heads.formats.mlx import plan as plan_drafter

        return plan_drafter(head, head_type)
    if format_name == "vllm" and trunk is None and head_type is None:
        from headstart.heads.formats.vllm import plan as plan_for_vllm

        return plan_for_vllm(head, _vocab(draft_vocab))
    gguf = "--format gguf"
    for option, given, of in (
        ("--trunk", trunk, gguf), ("--draft-vocab", draft_vocab, "--format gguf and vllm"),
        ("--head-type", head_type, "--format gguf and mlx"),
    ):  # fmt: skip
        if given is not None:
            raise ConfigError(f"{option} belongs to {of}, not to {format_name}.")
    return format_named(format_name).plan(head)


def _vocab(path: str | None) -> DraftVocab | None:
    return None if path is None else read_one(Path(path))


def plan_convert(
    head: Head,
    format_name: str,
    *,
    model: Checkpoint | None = None,
    dequantized: bool = False,
    trunk: Checkpoint | None = None,
    head_type: str | None = None,
    draft_vocab: str | None = None,
) -> Operation:
    """A standalone head in another format; `model` lends trunk tensors that the format wants."""
    if model is not None:
        head = borrowing(head, model)
    if head.left_out and format_name in _WITH_COPIES:
        lost = sorted({name.split(".")[2] for name in head.left_out})
        note = f"the head's copies of {' and '.join(lost)} are not at hand; --model adds them"
        head = head.changed(head.tensors, note)
    operation = plan_export(
        head, format_name, name="convert", dequantized=dequantized, trunk=trunk,
        head_type=head_type, draft_vocab=draft_vocab,
    )  # fmt: skip
    source = format_of(head.origin) or "full checkpoint"
    return replace(operation, facts={"from": source, **operation.facts})
