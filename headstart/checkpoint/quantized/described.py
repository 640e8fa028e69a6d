"""What a quantisation config says of one module, where names and shapes alone do not tell.

Which modules are quantised is not asked here: that is decided by what is stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from headstart.checkpoint.config import read_json_object
from headstart.checkpoint.config_fields import QUANTIZATION, check_kinds
from headstart.checkpoint.quantized.patterns import matches
from headstart.checkpoint.reader import Checkpoint
from headstart.errors import BadConfig, UnsupportedFamily

MODELOPT_FILE = "hf_quant_config.json"
Packing = Literal["awq", "gptq"]
# packing_format of AutoRound -> whose layout it is, and whether zero points are stored minus one
_AUTO_ROUND: dict[str, tuple[Packing, bool]] = {
    "auto_round": ("gptq", False),
    "auto_round:gptqmodel": ("gptq", False),
    "auto_round:auto_gptq": ("gptq", True),
    "auto_round:gptq": ("gptq", True),
    "auto_round:auto_awq": ("awq", False),
    "auto_round:awq": ("awq", False),
}
_AUTO_ROUND_METHODS = ("auto-round", "auto_round", "intel/auto-round")
# data_type of AutoRound whose tensors are told by their names and types; of mx_int they are not,
# since bytes of two integers look like bytes of two 4-bit floats.
_AUTO_ROUND_TYPES = re.compile(r"(?:(?:opt_)?rtn_)?(?:int|fp|block_fp8|mx_fp|nv_fp)")
# Turns of activations that an engine would have to make while it computes. AutoRound's lie at the
# top level of config.json where there is no quantization_config.
_AUTO_ROUND_TURNS = ("rotation_config", "spinquant_config")
_TURNS = ("transform_config", "rotation", *_AUTO_ROUND_TURNS)
# format of compressed-tensors -> parameter and dtype that it stores; None: of several kinds
_STORED_AS: dict[str, tuple[str, str] | None] = {
    "pack-quantized": ("weight_packed", "I32"),
    "int-quantized": ("weight", "I8"),
    "float-quantized": ("weight", "F8_E4M3"),
    "naive-quantized": None,
    "mixed-precision": None,
    "nvfp4-pack-quantized": ("weight_packed", "U8"),
    "mxfp4-pack-quantized": ("weight_packed", "U8"),
    "mxfp8-quantized": ("weight", "F8_E4M3"),
}
# actorder of compressed-tensors -> whether columns belong to groups by g_idx
_ORDERS = {"group": True, "dynamic": True, "weight": False, "static": False}
_REGEX = frozenset("*+?^$()[]{}|\\")  # characters that tell a pattern from a name
_GPTQ: dict[str, bool] = {"gptq": True, "gptq_v2": False}  # checkpoint_format -> z - 1 is stored


@dataclass(frozen=True)
class Described:
    """What a config says of one module's weights; None where it is silent."""

    method: str
    bits: int | None = None
    group_size: int | None = None  # -1: one group for a whole row
    is_symmetric: bool | None = None
    block: tuple[int, int] | None = None  # of FP8 scales: rows and columns
    packing: Packing | None = None  # of `qweight`
    stores_less_one: bool = False  # whether stored zero points are z - 1
    is_sorted: bool | None = None  # whether columns belong to groups by g_idx (desc_act)
    kind: str | None = None  # int or float, of compressed-tensors
    stored_as: tuple[str, str] | None = None  # parameter and dtype, of compressed-tensors


def quantization_of(model: Checkpoint) -> dict[str, Any]:
    """The quantisation config; ModelOpt may keep it in a file of its own."""
    found = model.config.quantization
    path = model.folder / MODELOPT_FILE
    if found or not path.is_file():
        return found
    inner = modelopt_document(path).get("quantization")
    if not isinstance(inner, dict):
        return {}
    return {**inner, "quant_method": "modelopt", "ignore": inner.get("exclude_modules")}


def modelopt_document(path: Path) -> dict[str, Any]:
    """ModelOpt's own file, with its list checked."""
    found = read_json_object(path)
    if isinstance(found.get("quantization"), dict):
        check_kinds(path, found["quantization"], QUANTIZATION, "quantization.")
    return found


def described(module: str, quantization: Mapping[str, Any]) -> Described:
    """What the config says of `module`, a published name without `.weight`."""
    method = str(quantization.get("quant_method") or "")
    _refuse_turns(quantization)
    if method == "compressed-tensors":
        return _of_group(module, quantization)
    fields: Mapping[str, Any] = quantization
    for override in _overrides(module, quantization):
        fields = {**fields, **override}
    result = Described(
        method, _whole(fields.get("bits", fields.get("w_bit"))),
        _whole(fields.get("group_size", fields.get("q_group_size"))),
        _flag(fields.get("sym")), _block("weight_block_size", fields.get("weight_block_size")),
        is_sorted=_flag(fields.get("desc_act")),
    )  # fmt: skip
    if method == "awq":
        return _awq(result, fields)
    if method == "gptq":
        return _gptq(module, result, fields)
    if method in _AUTO_ROUND_METHODS:
        return _auto_round(module, result, fields)
    return result


def refuse_turned(model: Checkpoint) -> None:
    """Refuse a model whose config says that weights were turned, be they quantised or plain."""
    _refuse_turns(quantization_of(model))
    _refuse_any(model.config.raw, _AUTO_ROUND_TURNS, "")


def _refuse_turns(quantization: Mapping[str, Any]) -> None:
    meta = quantization.get("meta")
    for part in (quantization, meta if isinstance(meta, dict) else {}):
        _refuse_any(part, _TURNS, "quantization_config.")


def _refuse_any(part: Mapping[str, Any], fields: Iterable[str], path: str) -> None:
    for field in fields:
        value = part.get(field)
        if any(value.values()) if isinstance(value, dict) else value:
            raise UnsupportedFamily(
                f"{path}{field} asks for turns of activations (or weights that were turned), "
                "which is not computed here; expected none. Take another quantisation of the model."
            )


def _awq(found: Described, fields: Mapping[str, Any]) -> Described:
    version = str(fields.get("version") or "gemm").lower()
    if version != "gemm":
        raise UnsupportedFamily(
            f"quantization_config.version is {version!r} of awq; expected gemm, the one packing of "
            "AWQ that is read here. Take another quantisation of the model."
        )
    has_zeros = _flag(fields.get("zero_point"))
    symmetric = None if has_zeros is None else not has_zeros
    return replace(found, packing="awq", is_symmetric=symmetric, is_sorted=False)


def _gptq(module: str, found: Described, fields: Mapping[str, Any]) -> Described:
    form = str(fields.get("checkpoint_format") or fields.get("format") or "gptq").lower()
    if form not in _GPTQ:
        raise UnsupportedFamily(
            f"checkpoint_format is {form!r} of gptq ({module}); expected one of "
            f"{', '.join(_GPTQ)}. Take another quantisation of the model."
        )
    return replace(found, packing="gptq", stores_less_one=_GPTQ[form])


def _auto_round(module: str, found: Described, fields: Mapping[str, Any]) -> Described:
    kind = fields.get("data_type")
    if kind is not None and not _AUTO_ROUND_TYPES.match(str(kind)):
        raise UnsupportedFamily(
            f"data_type is {kind!r} of auto-round ({module}), which is not read here; expected "
            "int, fp, mx_fp or nv_fp. Take another quantisation of the model."
        )
    form = str(fields.get("packing_format") or "")
    if form.endswith("llm_compressor") or ":fp8" in form or not form:
        return found  # tensors of compressed-tensors, or FP8: their names tell
    if form not in _AUTO_ROUND:
        raise UnsupportedFamily(
            f"packing_format is {form!r} of auto-round ({module}); expected one of "
            f"{', '.join(_AUTO_ROUND)}. Take another quantisation of the model."
        )
    packing, less_one = _AUTO_ROUND[form]
    return replace(found, packing=packing, stores_less_one=less_one, is_sorted=False)


def _overrides(module: str, quantization: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """GPTQ's `dynamic` rules by pattern, AutoRound's `extra_config` by name or pattern."""
    rules = quantization.get("dynamic")
    for rule, values in (rules if isinstance(rules, dict) else {}).items():
        pattern = rule.removeprefix("+:")
        if isinstance(values, dict) and not rule.startswith("-:") and matches(pattern, module):
            yield values
            break
    extra = quantization.get("extra_config")
    extra = extra if isinstance(extra, dict) else {}
    patterns = [name for name in extra if _REGEX & set(name)]
    for name in [module, *patterns]:
        values = extra.get(name)
        if isinstance(values, dict) and (name == module or matches(f".*(?:{name})", module)):
            yield values
            break


def group_of(module: str, quantization: Mapping[str, Any]) -> Mapping[str, Any]:
    """The group of compressed-tensors whose targets name the module; classes of modules last."""
    groups = quantization.get("config_groups")
    named, by_class = None, None
    for group in (groups if isinstance(groups, dict) else {}).values():
        targets = group.get("targets") if isinstance(group, dict) else None
        for target in targets if isinstance(targets, list) else []:
            if _is_target(str(target), module):
                named = named or group
            elif "." not in str(target) and not str(target).startswith("re:"):
                by_class = by_class or group
    return (named or by_class) or {}


def _of_group(module: str, quantization: Mapping[str, Any]) -> Described:
    chosen = group_of(module, quantization)
    stored_as = _stored_as(chosen.get("format") or quantization.get("format"))
    weights = chosen.get("weights")
    if not isinstance(weights, dict):
        return Described("compressed-tensors", stored_as=stored_as)
    size = _whole(weights.get("group_size"))
    return Described(
        "compressed-tensors", _whole(weights.get("num_bits")),
        size if weights.get("strategy") in ("group", "tensor_group", None) else None,
        _flag(weights.get("symmetric")),
        _block("block_structure", weights.get("block_structure")),
        is_sorted=_is_sorted(weights.get("actorder")), kind=weights.get("type"),
        stored_as=stored_as,
    )  # fmt: skip


def _stored_as(form: Any) -> tuple[str, str] | None:
    if form is None:
        return None
    if form not in list(_STORED_AS):
        raise UnsupportedFamily(
            f"format is {form!r} of compressed-tensors; expected one of {', '.join(_STORED_AS)}. "
            "Take another quantisation of the model."
        )
    return _STORED_AS[form]


def _is_sorted(order: Any) -> bool | None:
    """None where the config is silent: then g_idx decides."""
    if order is None or isinstance(order, bool):
        return order
    if order not in list(_ORDERS):
        raise BadConfig(
            f"actorder is {order!r}; expected one of {', '.join(_ORDERS)}. Correct the config."
        )
    return _ORDERS[order]


def _is_target(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return matches(target[3:], module)
    return "." in target and (target == module or module.endswith(f".{target}"))


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _block(field: str, value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if isinstance(value, list) and len(value) == 2 and all(type(n) is int and n > 0 for n in value):
        return value[0], value[1]
    raise BadConfig(
        f"{field} is {value!r}; expected two numbers, of rows and of columns. Correct the config."
    )
