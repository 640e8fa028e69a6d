"""Is there a head in this GGUF file, and is it whole?"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from headstart.checkpoint.gguf.fields import ARRAY, STRING
from headstart.checkpoint.provenance import is_our_name
from headstart.checkpoint.source import stored
from headstart.errors import BadConfig, HeadNotFound, UnsupportedFamily, some
from headstart.families.experts import fused_slot
from headstart.families.registry import family
from headstart.heads.detection import State, quoted
from headstart.heads.formats.gguf.arch import PER_LAYER, Arch
from headstart.heads.formats.gguf.model import GgufModel, fused_blocks, trunk_layers
from headstart.heads.formats.gguf.spelling import RECORD, SpelledHead
from headstart.heads.head import config_fields
from headstart.heads.operation import counted


@dataclass(frozen=True)
class FoundGguf:
    """What tensors and keys of a file say about its head."""

    model: GgufModel
    arch: Arch | None
    state: State
    declared: int | None
    num_layers: int  # of the trunk
    blocks: tuple[int, ...]  # those of the head, by their fusion tensor
    names: tuple[str, ...]  # all tensors of the head
    missing: tuple[str, ...]
    has_trunk: bool

    @property
    def is_usable(self) -> bool:
        return self.state in ("complete", "undeclared")

    @property
    def is_head_only(self) -> bool:
        return bool(self.blocks) and not self.has_trunk


def find_gguf_head(model: GgufModel) -> FoundGguf:
    blocks = model.blocks()
    total, declared = model.count("block_count"), model.count("nextn_predict_layers")
    if total is None:
        raise BadConfig(
            f"{model.folder} has no key {f'{model.arch_name[:40]}.block_count'!r}; expected a "
            "model of llama.cpp. Download or convert it again."
        )
    if declared is not None and declared > total:
        raise BadConfig(
            f"{model.folder} declares {declared} modules and {total} blocks; expected fewer "
            "modules than blocks. Convert it again."
        )
    fused = fused_blocks(blocks)
    layers = trunk_layers(total, declared, fused)
    first = min([*fused, layers])
    last = first + max(len(fused), declared or 0) if fused else first
    numbers = [number for number in sorted(blocks) if first <= number < last]
    names = [f"blk.{number}.{name}" for number in numbers for name in blocks[number]]
    lost = _missing(model, fused, declared) if fused else []
    state: State
    if not fused:
        state = "declared-but-missing" if declared else "absent"
    elif lost:
        state = "partial"
    else:
        state = "complete" if declared else "undeclared"
    has_trunk = any(number < first for number in blocks)
    return FoundGguf(
        model, model.arch, state, declared, layers, tuple(fused), tuple(names), tuple(lost),
        has_trunk,
    )  # fmt: skip


def _missing(model: GgufModel, fused: list[int], declared: int | None) -> list[str]:
    """Tensors that a whole head has and the file has not."""
    arch = model.arch
    if arch is None:
        return []
    fields = config_fields(model.config.raw)
    wanted = expected_names(arch, fields)
    numbers = range(fused[0], fused[0] + max(len(fused), declared or 0))
    names = [f"blk.{number}.{name}" for number in numbers for name in sorted(wanted)]
    return [name for name in names if name not in model.tensors]


def expected_names(arch: Arch, fields: dict[str, Any]) -> set[str]:
    """The names below `blk.N.` that every whole module has."""
    owner = family(arch.family)
    result: set[str] = set()
    for name in owner.expected({**fields, "num_experts": 1, "n_routed_experts": 1}, 1):
        rest = name.split(".", 2)[2]
        slot = fused_slot(rest)
        if slot is not None:
            rest = f"{slot.name.rpartition('.')[0]}.{slot.projection}_proj.weight"
        if arch.kv_b and rest == f"{arch.kv_b}.weight":
            result |= {"attn_k_b.weight", "attn_v_b.weight"}
        elif rest in arch.names:
            result.add(arch.names[rest])
        else:
            module, _, parameter = rest.rpartition(".")
            if module in arch.names:
                result.add(f"{arch.names[module]}.{parameter}")
    return result


def require_gguf_head(model: GgufModel) -> FoundGguf:
    """The head, whole; HeadNotFound says what is wrong and what to do."""
    found = find_gguf_head(model)
    restore = f"headstart restore {quoted(model.folder)} --from ORIGINAL --out DIR"
    if found.arch is None:
        raise UnsupportedFamily(
            f"{model.folder}: the architecture {model.arch_name[:40]!r} is none whose heads are "
            "known here. See the table of GGUF in `headstart families`."
        )
    if found.state == "partial":
        raise HeadNotFound(
            f"{model.folder}: the head is not whole, {counted(len(found.missing), 'tensor')} "
            f"missing: {some(found.missing)}. Restore it: {restore}"
        )
    if not found.is_usable:
        said = (
            f"declares {counted(found.declared or 0, 'module')} and holds no head"
            if found.declared
            else "has no head"
        )
        raise HeadNotFound(f"{model.folder} {said}. Restore it: {restore}")
    return found


def spelled_in(model: GgufModel) -> SpelledHead:
    """The head of a file, as it is stored there."""
    found = require_gguf_head(model)
    assert found.arch is not None
    first = found.blocks[0]
    tensors = {}
    for name in found.names:
        _, number, rest = name.split(".", 2)
        tensors[int(number) - first, rest] = stored(model.tensors[name])
    count = len(found.blocks)
    values = {}
    for key in PER_LAYER:
        each = model.fields.get(f"{model.arch_name}.{key}")
        if each is not None and each.kind == ARRAY and each.length == found.num_layers + count:
            values[key] = each.value[found.num_layers :]
    head_dim = model.config.get("head_dim", 0)
    return SpelledHead(
        found.arch, tensors, count, found.num_layers, head_dim, values, record_of(model)
    )


def _is_record(record: object, arch: Arch) -> bool:
    """Files are not trusted: only what we would have written is used."""
    if not isinstance(record, dict) or record.get("family") != arch.family:
        return False
    roots = ("", *family(arch.family).keys.roots)
    left_out, dtypes = record.get("left_out", []), record.get("dtypes", {})
    return (
        record.get("root") in roots
        and isinstance(dtypes, dict)
        and isinstance(left_out, list)
        and isinstance(record.get("training", {}), dict)
        and record.get("fresh", True) is True
        and all(isinstance(name, str) and is_our_name(name) for name in left_out)
    )


def record_of(model: GgufModel) -> dict[str, Any]:
    """What Headstart wrote down in the file about its head; empty where it did not."""
    found = model.fields.get(RECORD)
    if found is None or found.kind != STRING:
        return {}
    record: dict[str, Any] = {}
    with suppress(ValueError, RecursionError):
        record = json.loads(found.value)
    arch = model.arch
    if arch is None or not _is_record(record, arch):
        raise BadConfig(
            f"{model.folder}: the key {RECORD} is not what Headstart writes for "
            f"{model.arch_name[:40]!r}. Export or stitch the head again."
        )
    return record
