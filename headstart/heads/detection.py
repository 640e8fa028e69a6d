"""Is there a head in this checkpoint, whose is it, and is it whole?

Detection goes by tensors; the config is a claim that is held against them. A fusion tensor is
the only proof of a head: layers beyond the trunk without one are something else.
"""

from __future__ import annotations

import shlex
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headstart.checkpoint.config import Config
from headstart.checkpoint.config_fields import COUNT_FIELDS
from headstart.checkpoint.quantized.names import is_scale, missing_scales, packed_names
from headstart.checkpoint.reader import Checkpoint
from headstart.errors import HeadNotFound, UnsupportedFamily, some
from headstart.families.base import Family
from headstart.families.dims import Fields, at
from headstart.families.experts import stand_ins
from headstart.families.names import Naming
from headstart.families.registry import (
    GRAFTED_AS,
    WITHOUT_HEAD,
    families,
    family,
    match_family,
)
from headstart.heads.drafters import find_drafter, refuse_drafter
from headstart.heads.operation import counted

State = Literal["absent", "declared-but-missing", "undeclared", "partial", "complete"]
_NESTED_COUNTS = (
    "mtp_config.num_nextn_predict_layers", "mtp.num_hidden_layers", "mtp.num_nextn_predict_layers",
)  # fmt: skip
_ROLES = ("embed_norm.", "hidden_norm.", "fuse.", "fuse_embed.", "fuse_hidden.", "out_norm.")


@dataclass(frozen=True)
class FoundHead:
    """What the tensors of a checkpoint say about its head."""

    family: Family
    naming: Naming
    state: State
    declared: int | None  # the count in the config, None if it has none
    num_modules: int  # modules with a fusion tensor
    tensors: dict[str, str]  # our name -> published name
    missing: tuple[str, ...]  # published names
    unexpected: tuple[str, ...]  # published names inside the head that the family does not know

    @property
    def is_usable(self) -> bool:
        return self.state in ("complete", "undeclared")


def find_family(checkpoint: Checkpoint, model_type: str | None = None) -> Family | None:
    """The family by option, by config, else by the shape of tensor names; None if unknown."""
    if model_type is not None:
        return family(model_type.lower())
    config = checkpoint.config
    if any(name in WITHOUT_HEAD for name in config.model_types):
        return None  # their architectures may be borrowed from a family that has heads
    return match_family(config.fields, config.model_types, config.architectures)


def require_family(checkpoint: Checkpoint, model_type: str | None = None) -> Family:
    """The family; UnsupportedFamily if it is not known, HeadNotFound for a drafter's checkpoint."""
    refuse_drafter(checkpoint)
    found = find_family(checkpoint, model_type)
    if found is None:
        name = checkpoint.config.model_type
        looks_like = [f.name for f in families() if f.is_complete and _looks_like(checkpoint, f)]
        hint = f" Its tensors look like {some(looks_like)}." if looks_like else ""
        hint = f" {WITHOUT_HEAD[name]}" if name in WITHOUT_HEAD else hint
        graft = (
            f" `headstart graft` gives it a head in the layout of {GRAFTED_AS[name]}."
            if name in GRAFTED_AS
            else ""
        )
        raise UnsupportedFamily(
            f"{checkpoint.folder}: model_type {name!r} is not a family with a known head.{hint}"
            f"{graft} See `headstart families`; --model-type overrides detection."
        )
    return found


def _looks_like(checkpoint: Checkpoint, candidate: Family) -> bool:
    naming = candidate.naming(checkpoint.config.fields)
    return any(
        ".fuse" in (candidate.keys.to_ours(name, naming) or "") for name in checkpoint.tensors
    )


def declared_count(config: Config) -> int | None:
    """How many modules the config claims; None if it says nothing."""
    text_paths = [config.text.get(field) for field in COUNT_FIELDS]
    nested = [at(part, path) for part in (config.text, config.raw) for path in _NESTED_COUNTS]
    top = [config.raw.get(field) for field in COUNT_FIELDS]
    for value in (*text_paths, *nested, *top):
        if type(value) is int:
            return value
    return None


def find_head(checkpoint: Checkpoint, model_type: str | None = None) -> FoundHead:
    """Look for the head of the checkpoint's family."""
    return find_head_of(checkpoint, require_family(checkpoint, model_type))


def find_head_of(checkpoint: Checkpoint, owner: Family) -> FoundHead:
    fields = checkpoint.config.fields
    names = list(checkpoint.tensors)
    naming = owner.keys.find_root(names, owner.naming(fields))
    tensors = {
        ours: name for name in names if (ours := owner.keys.to_ours(name, naming)) is not None
    }
    has_roles = any(part in name for name in tensors for part in _ROLES)
    has_drafter = find_drafter(checkpoint) is not None  # under the same names, and no head
    if has_drafter or not has_roles:
        tensors = {}
    declared = declared_count(checkpoint.config)
    modules = {name.split(".")[1] for name in tensors if ".fuse" in name}
    num_modules = len(modules)
    wanted = max(num_modules, declared or owner.default_modules)
    if owner.may_count_one_more and num_modules and wanted == num_modules + 1:
        wanted = num_modules
    missing = _missing(checkpoint, owner, naming, tensors, wanted) if tensors else ()
    return FoundHead(
        owner,
        naming,
        "absent" if has_drafter else _state(bool(tensors), bool(missing), declared),
        declared,
        num_modules,
        tensors,
        missing,
        _unexpected(checkpoint, owner, tensors, wanted) if tensors else (),
    )


def restore_command(checkpoint: Checkpoint) -> str:
    """What gets a lost head back."""
    return f"headstart restore {quoted(checkpoint.folder)} --from ORIGINAL --out DIR"


def quoted(path: Path) -> str:
    """A path as it can be pasted into a shell."""
    return shlex.quote(str(path))


def require_head(
    checkpoint: Checkpoint, model_type: str | None = None, found: FoundHead | None = None
) -> FoundHead:
    """The head, whole; HeadNotFound says what is wrong and what to do.

    `found`: what `find_head` gave for this checkpoint before.
    """
    refuse_drafter(checkpoint)
    head = find_head(checkpoint, model_type) if found is None else found
    where = f"{checkpoint.folder} ({head.family.name})"
    if head.state == "partial":
        raise HeadNotFound(
            f"{where}: the head is not whole, {counted(len(head.missing), 'tensor')} missing: "
            f"{some(head.missing)}. Restore it: {restore_command(checkpoint)}"
        )
    if head.state == "declared-but-missing":
        raise HeadNotFound(
            f"{where}: the config declares {counted(head.declared or 0, 'head module')} and no "
            "head tensor exists; fine-tuning or quantisation dropped it. Restore it: "
            f"{restore_command(checkpoint)}"
        )
    if head.state == "absent":
        raise HeadNotFound(
            f"{where} has no head. Restore a lost one (headstart restore), or add a fresh one "
            f"and train it (headstart graft {quoted(checkpoint.folder)} --out DIR)."
        )
    return head


def _state(has_tensors: bool, is_partial: bool, declared: int | None) -> State:
    if not has_tensors:
        return "declared-but-missing" if declared else "absent"
    if is_partial:
        return "partial"
    return "complete" if declared else "undeclared"


def _missing(
    checkpoint: Checkpoint, owner: Family, naming: Naming, tensors: dict[str, str], modules: int
) -> tuple[str, ...]:
    absent = lacking(owner, checkpoint.config.fields, modules, tensors)
    published = [owner.keys.to_published(name, naming) for name in absent]
    infos = {name: checkpoint.info(found) for name, found in tensors.items()}
    scales = [owner.keys.to_published(name, naming) for name in missing_scales(infos)]
    return tuple(published + scales)


def lacking(owner: Family, fields: Fields, modules: int, tensors: Container[str]) -> list[str]:
    """Tensors of a whole head, under our names, that `tensors` has in no form."""
    expected = expected_of(owner, fields, modules, tensors)
    return [name for name in expected if not _is_present(name, tensors)]


def expected_of(
    owner: Family, fields: Fields, modules: int, tensors: Container[str]
) -> dict[str, tuple[int, ...] | None]:
    """What a whole head has, with the block that `tensors` are of.

    A variant of the block is meant where something only it has is stored, and nothing that only
    the usual one has; where that does not tell, the usual one is.
    """
    usual = owner.expected(fields, modules)
    for block in owner.block_variants:
        variant = owner.expected(fields, modules, block)
        own, others = variant.keys() - usual.keys(), usual.keys() - variant.keys()
        if any(_is_present(name, tensors) for name in own) and not any(
            _is_present(name, tensors) for name in others
        ):
            return variant
    return usual


def _is_present(name: str, tensors: Container[str]) -> bool:
    candidates = [name, *stand_ins(name)]
    return any(option in tensors for candidate in candidates for option in packed_names(candidate))


def _unexpected(
    checkpoint: Checkpoint, owner: Family, tensors: dict[str, str], modules: int
) -> tuple[str, ...]:
    fields = checkpoint.config.fields
    if not owner.block(owner.fields_of_head(fields)):
        return ()
    known: set[str] = set()
    for name in expected_of(owner, fields, modules, tensors):
        for candidate in [name, *stand_ins(name)]:
            known.update(packed_names(candidate))
    copies = tuple(f".{copy}." for copy in owner.copies)
    return tuple(
        published
        for ours, published in tensors.items()
        if ours not in known and not is_scale(ours) and not any(c in ours for c in copies)
    )
