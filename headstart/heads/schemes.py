"""Makes a model's quantisation config describe the head that is put into it.

A quantised head can be read only through a config of its own scheme. An unquantised one must be
on the list of modules that are left alone, wherever the method keeps that list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headstart.checkpoint.config import text_part
from headstart.checkpoint.quantized.described import (
    MODELOPT_FILE,
    modelopt_document,
    quantization_of,
)
from headstart.checkpoint.quantized.names import PACKED, Typed, is_quantized, scale_of
from headstart.checkpoint.quantized.writing import compressed_config
from headstart.checkpoint.reader import Checkpoint
from headstart.errors import CheckpointError, some
from headstart.families.engines import served_by
from headstart.families.names import Naming
from headstart.heads.config_groups import modules_of, own_groups, trunk_patterns, with_groups
from headstart.heads.head import Head, own_quantization
from headstart.heads.ignore_lists import (
    has_list,
    is_listed,
    lookups,
    with_unquantized,
    without,
)

_CONFIG_FIELDS = ("quantization_config", "compression_config")
# how a weight is stored -> the methods whose loaders look for that
_READERS = {
    "weight_scale_inv": ("fp8",),
    "weight_scale": ("compressed-tensors", "modelopt", "quark", "fp8"),
    "weight_packed": ("compressed-tensors",),
    "qweight": ("gptq", "awq", "auto-round"),
}
_FOUR_BITS = ("fp4", "int4", "w4a")  # in the names of formats and algorithms
_MERGED = ("none", "compressed-tensors")  # configs that take the groups of a head's own
_SAME = ("quant_method", "quant_algo", "format", "weight_block_size")


def has_four_bits(name: str, info: Typed, quantization: Mapping[str, Any]) -> bool:
    """Whether a weight is stored in four bits; packed ones look alike, so the config tells."""
    if info.dtype == "F4":
        return True
    is_packed = is_quantized(name, info) and (
        name.rpartition(".")[2] in PACKED[1:] or info.dtype == "U8"
    )
    return is_packed and _bits(quantization) == 4


def _bits(quantization: Mapping[str, Any]) -> int | None:
    """The fewest bits of weights that a quantisation config names, None if it names none."""
    groups = quantization.get("config_groups")
    weights = [
        group["weights"]
        for group in (groups.values() if isinstance(groups, dict) else ())
        if isinstance(group, dict) and isinstance(group.get("weights"), dict)
    ]
    named = [quantization.get("bits"), *(part.get("num_bits") for part in weights)]
    bits = [value for value in named if type(value) is int]
    if bits:
        return min(bits)
    words = f"{quantization.get('format')} {quantization.get('quant_algo')}".lower()
    is_four = any(mark in words for mark in _FOUR_BITS) or quantization.get("load_in_4bit") is True
    return 4 if is_four else None


def check_scheme(head: Head, model: Checkpoint) -> None:
    """Refuse a quantised head that the model's config does not describe."""
    if not head.is_quantized or head.family.is_quantized_by_layout:
        return
    config, origin = quantization_of(model), own_quantization(head)
    method = str(config.get("quant_method") or "none")
    marks = set(_marks(head))
    is_readable = all(method.startswith(_READERS.get(mark, ())) for mark in marks)
    others = [f for f in _SAME if f in origin and f in config and origin[f] != config[f]]
    if (is_readable and not others) or (method in _MERGED and own_groups(head) is not None):
        return
    detail = "".join(f"; {f} is {origin[f]!r} there and {config[f]!r} here" for f in others)
    raise CheckpointError(
        f"the head is quantised (stored with {some(sorted(marks))}) and {model.folder} has "
        f"quantisation {method!r}{detail}. Engines could not read the head through that config. "
        "Add --dequantize."
    )


def _marks(head: Head) -> Iterator[str]:
    for name, source in head.tensors.items():
        if is_quantized(name, source):
            parameter = name.rpartition(".")[2]
            scale = scale_of(name, head.tensors) or ""
            mark = parameter if parameter in PACKED[1:] else scale.rpartition(".")[2]
            yield "weight_" + mark.partition("_proj_")[2] if "_proj_" in mark else mark


def relist(
    head: Head, model: Checkpoint, naming: Naming, config: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Edit the lists in `config`; returns further documents with lists, and notes."""
    notes = []
    text = text_part(config)
    for part in (config, {} if text is config else text):
        for field in _CONFIG_FIELDS:
            if not isinstance(part.get(field), dict):
                continue
            relisted = _relisted(head, naming, part[field])
            part[field] = with_groups(head, naming, relisted)
            if part[field].get("config_groups") != relisted.get("config_groups"):
                notes += _without_names(head, naming)
            if not has_list(part[field]) and not head.is_quantized:
                notes.append(
                    f"quantisation {part[field].get('quant_method')!r} keeps no list that is known "
                    "here: see that your engine leaves the head unquantised"
                )
    if head.is_quantized and not quantization_of(model):
        found = own_groups(head, naming)
        if found is not None:
            plain, _ = modules_of(head)
            ignored = [*trunk_patterns(head, naming), *lookups(head.family, naming, plain)]
            config["quantization_config"] = {**compressed_config(*found), "ignore": ignored}
            notes.append("the config says that the head alone is quantised (compressed-tensors)")
            notes += _without_names(head, naming)
    documents: dict[str, Any] = {}
    path = model.folder / MODELOPT_FILE
    if path.is_file():
        listing = modelopt_document(path)
        inner = listing.get("quantization")
        if isinstance(inner, dict):
            listed = {"quant_method": "modelopt", "ignore": inner.get("exclude_modules")}
            inner["exclude_modules"] = _relisted(head, naming, listed)["ignore"]
            documents[MODELOPT_FILE] = listing
    return documents, notes


def _without_names(head: Head, naming: Naming) -> list[str]:
    """A note where a group of the head's own cannot say under which names SGLang asks for it."""
    _, quantized = modules_of(head)
    is_served = "sglang" in served_by(head.family.name)
    if not is_served or lookups(head.family, naming, quantized, "sglang"):
        return []
    return [
        "SGLang asks for the head under names of the trunk, or under names that are not known "
        "here, so that it may take the quantised head for a plain one: serve it with another "
        "engine, give it to SGLang as a draft model (`headstart convert --to sglang`), or add "
        "--dequantize"
    ]


def _relisted(head: Head, naming: Naming, quantization: dict[str, Any]) -> dict[str, Any]:
    plain, quantized = modules_of(head)
    result = without(quantization, lookups(head.family, naming, quantized))
    asked = lookups(head.family, naming, quantized)
    excluded = [name for name in asked if is_listed(result, name)]
    if excluded:
        raise CheckpointError(
            f"the head is quantised, but a pattern in the model's quantisation config excludes "
            f"{some(excluded)}: engines would read quantised bytes as plain ones. Add --dequantize."
        )
    return with_unquantized(result, lookups(head.family, naming, plain))
