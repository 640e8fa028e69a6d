"""GGUF, the format of llama.cpp: a head inside a model, or in a file of its own.

`archs.py` has the facts, `spelling.py` and `unspelling.py` the two directions, `found.py` says
what a file holds and `plans.py` what is written.
"""

from __future__ import annotations

from headstart.checkpoint.reader import Checkpoint
from headstart.families.base import Family
from headstart.families.registry import family
from headstart.heads.formats import Export, count_modules
from headstart.heads.formats.gguf.archs import arch_of, reason_against
from headstart.heads.formats.gguf.found import find_gguf_head, spelled_in
from headstart.heads.formats.gguf.model import GgufModel, is_gguf_path, open_gguf
from headstart.heads.formats.gguf.own_file import plan_own_draft_file
from headstart.heads.formats.gguf.plans import (
    plan_draft_file,
    plan_gguf_restore,
    plan_gguf_stitch,
)
from headstart.heads.formats.gguf.spelling import require_arch
from headstart.heads.formats.gguf.unspelling import unspelled
from headstart.heads.head import Head
from headstart.vocab.draft_vocab import DraftVocab

__all__ = [
    "FILE", "LOSES", "GgufModel", "is_gguf_path", "open_gguf", "plan", "plan_gguf_restore",
    "plan_gguf_stitch", "read", "recognises", "why_not",
]  # fmt: skip
FILE = None
LOSES = "quantised weights (8, 4 bits), which become BF16, and whatever --head-type quantises"


def why_not(owner: Family) -> str:
    return "" if arch_of(owner.name) else reason_against(owner.name)


def plan(
    head: Head,
    trunk: GgufModel | None = None,
    head_type: str | None = None,
    vocab: DraftVocab | None = None,
) -> Export:
    """A file with the head alone; keys and tables are those of `trunk`, else of its own model."""
    require_arch(head.family.name, head.family.title)
    if trunk is None and isinstance(head.origin, GgufModel):
        trunk = head.origin
    if trunk is None:
        made = plan_own_draft_file(head, head_type, vocab)
    else:
        made = plan_draft_file(head, trunk, head_type, vocab)
    return Export(made.plan, made.changes, made.details)


def recognises(checkpoint: Checkpoint) -> bool:
    """Whether a GGUF file holds a head alone."""
    return isinstance(checkpoint, GgufModel) and find_gguf_head(checkpoint).is_head_only


def read(checkpoint: Checkpoint, *, as_stored: bool = False) -> Head:
    """The head of a GGUF file, with or without its trunk, as it was published.

    `as_stored`: with the types of the file, to be run.
    """
    assert isinstance(checkpoint, GgufModel), "a GGUF file was opened"
    spelled = spelled_in(checkpoint)
    owner = family(spelled.arch.family)
    tensors, changes = unspelled(spelled, as_stored=as_stored)
    record = spelled.record
    past = {key: record[key] for key in ("training", "fresh") if key in record}
    return Head(
        owner, tensors, checkpoint.config.raw, checkpoint, str(record.get("root", "")),
        count_modules(tensors), left_out=tuple(record.get("left_out", ())), changes=changes,
        is_config_derived=True, past=past,
    )  # fmt: skip
