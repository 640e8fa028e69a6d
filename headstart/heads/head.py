"""A head in hand: its tensors under our names, and what it needs to be placed.

Every format reads into this and writes from it, so formats never know each other. Tensors are
sources: nothing is loaded until it is written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headstart.checkpoint.config import Config
from headstart.checkpoint.provenance import read_provenance, training_of
from headstart.checkpoint.quantized.described import quantization_of
from headstart.checkpoint.quantized.leftover import weights_among
from headstart.checkpoint.quantized.names import is_quantized
from headstart.checkpoint.quantized.reading import quantized_weights
from headstart.checkpoint.quantized.stored import StoredWeight
from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.source import TensorSource
from headstart.errors import ShapeMismatch, UnexpectedTensor, UnsupportedFamily, some
from headstart.families.base import Family
from headstart.families.names import Naming
from headstart.heads.detection import FoundHead, find_family, require_head
from headstart.heads.sharing import trunk_tensor

DRAFT_LM_HEAD = "draft.lm_head"


@dataclass(frozen=True)
class Head:
    """A whole head."""

    family: Family
    tensors: Mapping[str, TensorSource]  # our names
    config: Mapping[str, Any]  # the config of the model it belongs to, as published
    origin: Checkpoint
    root: str = ""  # prefix of its published names
    num_modules: int = 1
    # published name -> source, for formats that carry the trunk's embedding and LM head along
    trunk_tensors: Mapping[str, TensorSource] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()  # copies of trunk tensors that a format dropped (our names)
    changes: tuple[str, ...] = ()  # what differs from how it was stored, in words
    # fields of `config` that a format overwrote with the head's own values
    lost_fields: tuple[str, ...] = ()
    model: str | None = None  # path or name of the checkpoint that it belongs to, where known
    is_config_derived: bool = False  # made of a GGUF file's keys, not published so
    past: Mapping[str, Any] = field(default_factory=dict)  # `history`, where no provenance has it
    # its own quantisation config, where it is not quantised as `config` says
    quantization: Mapping[str, Any] = field(default_factory=dict)
    # a quantised copy of the trunk's LM head, for drafts alone: names begin with DRAFT_LM_HEAD
    draft_lm_head: Mapping[str, TensorSource] = field(default_factory=dict)

    @property
    def is_quantized(self) -> bool:
        return any(is_quantized(name, source) for name, source in self.tensors.items())

    @property
    def num_bytes(self) -> int:
        parts = (*self.tensors.values(), *self.draft_lm_head.values())
        return sum(source.num_bytes for source in parts)

    @property
    def history(self) -> dict[str, Any]:
        """What provenance says about it wherever it goes: how it was trained, if it was."""
        if self.past:
            return dict(self.past)
        training = training_of(self.origin.folder)
        is_fresh = training is None and read_provenance(self.origin.folder).get("fresh") is True
        return {"fresh": True} if is_fresh else {} if training is None else {"training": training}

    def naming(self, num_layers: int | None = None) -> Naming:
        """How its tensors are called in a published checkpoint."""
        fields = config_fields(self.config)
        naming = self.family.naming(fields, self.root)
        return naming if num_layers is None else replace(naming, num_layers=num_layers)

    def changed(self, tensors: Mapping[str, TensorSource], *changes: str) -> Head:
        return replace(self, tensors=tensors, changes=(*self.changes, *changes))

    def config_notes(self) -> tuple[str, ...]:
        """What to know about `config` before it is written, in words."""
        if self.is_config_derived:
            return (
                "the config is made of the GGUF file's keys and is not the published one; "
                "`headstart convert --model MODEL` supplies that",
            )
        if not self.lost_fields:
            return ()
        return (
            f"the number of trunk layers is unknown ({', '.join(self.lost_fields)} in the config "
            "hold the head's own values); `headstart convert --model MODEL` supplies it",
        )

    def side_files(self) -> dict[str, Path]:
        """Tokenizer, templates and other plain files that travel with the head."""
        return {path.name: path for path in self.origin.side_files()}


def config_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    return Config(dict(config)).fields


def head_of(
    checkpoint: Checkpoint, model_type: str | None = None, found: FoundHead | None = None
) -> Head:
    """The head inside a full checkpoint; `found`: what `find_head` gave for it before."""
    found = require_head(checkpoint, model_type, found)
    return Head(
        family=found.family,
        tensors={ours: checkpoint.source(name) for ours, name in found.tensors.items()},
        config=checkpoint.config.raw,
        origin=checkpoint,
        model=os.path.abspath(checkpoint.folder),
        root=found.naming.root,
        num_modules=found.num_modules,
        trunk_tensors=trunk_tensors(checkpoint, found.family),
    )


def trunk_tensors(checkpoint: Checkpoint, owner: Family) -> dict[str, TensorSource]:
    """The trunk's embedding and LM head, by published name."""
    infos = [trunk_tensor(checkpoint, owner, role) for role in ("embed_tokens", "lm_head")]
    return {info.name: checkpoint.source(info.name) for info in infos if info is not None}


def borrowing(head: Head, model: Checkpoint) -> Head:
    """The head with what `model` lends: config, trunk tensors, copies that a format left out."""
    if find_family(model) is not head.family:
        raise UnsupportedFamily(
            f"the head is a {head.family.name} head, {model.folder} has model_type "
            f"{model.config.model_type!r}. Give the model that the head belongs to."
        )
    widths = config_fields(head.config).get("hidden_size"), model.config.get("hidden_size")
    if widths[0] != widths[1]:
        raise ShapeMismatch(
            f"the head belongs to a model of width {widths[0]}, {model.folder} has {widths[1]}. "
            "Give the model that the head belongs to."
        )
    copies = {}
    for name in head.left_out:
        own = trunk_tensor(model, head.family, name.split(".")[2])
        if own is not None:
            copies[name] = model.source(own.name)
    return replace(
        head,
        model=os.path.abspath(model.folder),
        tensors={**head.tensors, **copies},
        config=model.config.raw,
        lost_fields=(),
        is_config_derived=False,
        trunk_tensors=trunk_tensors(model, head.family),
        left_out=tuple(name for name in head.left_out if name not in copies),
    )


def stored_weights(head: Head) -> dict[str, StoredWeight]:
    """The quantised weights of a head, by our names of the weights."""
    naming = head.naming()
    return quantized_weights(
        head.tensors,
        own_quantization(head),
        lambda name: head.family.keys.to_published(name, naming),
    )


def own_quantization(head: Head) -> Mapping[str, Any]:
    """The quantisation config that describes a head's tensors."""
    published = Config(dict(head.config)).quantization
    return head.quantization or published or quantization_of(head.origin)


def stored_draft_lm_head(head: Head) -> StoredWeight | None:
    """The LM head that a head brings for its drafts, if it does."""
    if not head.draft_lm_head:
        return None
    found = quantized_weights(head.draft_lm_head, head.quantization)
    name = f"{DRAFT_LM_HEAD}.weight"
    if list(found) != [name]:
        raise UnexpectedTensor(
            f"{some(head.draft_lm_head)} are beside the head; expected one quantised "
            f"{name}. Quantise the head again."
        )
    return found[name]


def without_draft_lm_head(head: Head, reason: str) -> Head:
    """The head for a place where drafts use the trunk's LM head."""
    if not head.draft_lm_head:
        return head
    note = f"the LM head for drafts is left out: {reason}"
    return replace(head.changed(head.tensors, note), draft_lm_head={})


def dequantize(head: Head) -> Head:
    """The head with every quantised weight in BF16 and without scales."""
    head = without_draft_lm_head(head, "it is a quantised copy of the trunk's")
    found, notes = stored_weights(head), list[str]()
    weights, left = weights_among(head.tensors, found, notes)
    if not found:
        return replace(head, quantization={})
    if left:
        raise UnexpectedTensor(
            f"{len(left)} scales belong to no weight of the head: {some(left)}. Without them its "
            "values would be wrong; take the head from its own release."
        )
    tensors = {
        name: weight.source() if isinstance(weight, StoredWeight) else weight
        for name, weight in weights.items()
    }
    notes.insert(0, f"{len(found)} quantised weights were dequantised to BF16")
    if any(name.endswith("qkv_proj.weight") for name in tensors):
        notes.append(
            "q, k and v stay in chunks, one for each K/V head: vLLM reads such a plain qkv_proj "
            "right only with a tensor parallel size of as many"
        )
    return replace(head.changed(tensors, *notes), quantization={})
