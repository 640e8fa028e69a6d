"""config.json and its neighbours, read raw.

Config classes drop, rename and default fields, so they are never used here. `text_config` of a
multi-modal model is what a head belongs to; `Config.text` finds it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.errors import BadConfig
from headstart.files import read_plain

# Largest sensible values: counts are walked one by one, so a corrupted one must not be believed.
_MAX_SIZE, _MAX_LAYERS, _MAX_EXPERTS, _MAX_MODULES = 2**31, 10_000, 10_000, 64
_NEVER_LISTS = ("num_hidden_layers", "first_k_dense_replace", "moe_layer_start_index",
                "moe_layer_end_index", "moe_layer_interval", "full_attention_interval")  # fmt: skip
# how many modules a head has, as families call it
COUNT_FIELDS = (
    "mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_modules", "num_mtp_layers",
)  # fmt: skip
_INT_FIELDS = {
    **dict.fromkeys(
        ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim",
         "intermediate_size", "moe_intermediate_size", "n_shared_experts", "q_lora_rank",
         "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        _MAX_SIZE,
    ),
    **dict.fromkeys(
        ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts",
         "mtp_num_experts", "mtp_n_routed_experts"),
        _MAX_EXPERTS,
    ),
    **dict.fromkeys(COUNT_FIELDS, _MAX_MODULES),
    **dict.fromkeys(_NEVER_LISTS, _MAX_LAYERS),
}  # fmt: skip
_TEXT_FIELDS = ("model_type", "hybrid_override_pattern", "mtp_hybrid_override_pattern")
_ONE_PER_LAYER = ("moe_layer_freq", "hybrid_layer_pattern")
_MAX_NESTING = 100
_OBJECT_FIELDS = ("text_config", "llm_config", "mtp_config")


@dataclass(frozen=True)
class Config:
    """A raw config.json: `raw` is the whole object, `text` the part that describes the LLM."""

    raw: dict[str, Any]

    @property
    def text(self) -> dict[str, Any]:
        return text_part(self.raw)

    @property
    def model_type(self) -> str:
        return str(self.raw.get("model_type") or "")

    @property
    def architectures(self) -> tuple[str, ...]:
        return tuple(self.raw.get("architectures") or ())

    @property
    def fields(self) -> dict[str, Any]:
        """The text part over the top level: what the family tables read. Nulls are left out."""
        merged = {**self.raw, **{k: v for k, v in self.text.items() if v is not None}}
        return {key: value for key, value in merged.items() if value is not None}

    @property
    def model_types(self) -> tuple[str, ...]:
        """model_type of the whole and, where it differs, of the text part."""
        inner = self.text.get("model_type")
        both = (self.model_type, inner if isinstance(inner, str) else "")
        return tuple(dict.fromkeys(name for name in both if name))

    def get(self, field: str, default: Any = None) -> Any:
        """A field of the text part, else of the top level, else `default`; null is absent."""
        for part in (self.text, self.raw):
            if part.get(field) is not None:
                return part[field]
        return default

    def at(self, path: str) -> Any:
        """The value at a dotted path of the whole config, or None."""
        value: Any = self.raw
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return value

    @property
    def quantization(self) -> dict[str, Any]:
        """The quantisation config as an object; empty where there is none (or xLLM's "")."""
        for part in (self.raw, self.text):
            found = part.get("quantization_config") or part.get("compression_config")
            if isinstance(found, dict):
                return found
        return {}


def text_part(raw: dict[str, Any]) -> dict[str, Any]:
    """The part of a raw config that describes the LLM: the whole, where it has no such part.

    `llm_config` is Nemotron's name for it; vision models that have one, too, count no head there.
    """
    text, other = raw.get("text_config"), raw.get("llm_config")
    if isinstance(text, dict):
        return text
    has_head = isinstance(other, dict) and any(field in other for field in COUNT_FIELDS)
    return other if isinstance(other, dict) and has_head else raw


def read_config(folder: Path) -> Config:
    """The checked config.json of `folder`."""
    path = folder / "config.json"
    if not path.is_file():
        inner = folder / "head"  # what `headstart train` writes has its result in there
        advice = (
            f"Did you mean {inner}?"
            if (inner / "config.json").is_file()
            else ("Give the folder of a whole checkpoint.")
        )
        raise BadConfig(f"{folder} has no config.json. {advice}")
    raw = read_json_object(path)
    check_fields(path, raw)
    return Config(raw)


def check_fields(path: Path, part: dict[str, Any], prefix: str = "") -> None:
    """Types and limits of the fields that are relied upon, in a config and its text part.

    `prefix` says where in `path` the config lies, for messages (`trunk_config.`).
    """
    _check_types(path, part, prefix)
    for field in _OBJECT_FIELDS:
        if isinstance(part.get(field), dict):
            _check_types(path, part[field], f"{prefix}{field}.")


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; BadConfig if it is anything else."""
    try:
        document = json.loads(read_plain(path).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadConfig(f"{path} cannot be read as JSON ({error}). Download it again.") from error
    if not isinstance(document, dict):
        kind = type(document).__name__
        raise BadConfig(f"{path} holds a JSON {kind}; expected an object. Download it again.")
    if _is_deeper(document, _MAX_NESTING):
        raise BadConfig(f"{path} nests more than {_MAX_NESTING} levels deep. Download it again.")
    return document


def _is_deeper(document: Any, levels: int) -> bool:
    level = [document]
    for _ in range(levels):
        inner = [v.values() if isinstance(v, dict) else v for v in level]
        level = [v for values in inner for v in values if isinstance(v, dict | list)]
    return bool(level)


def _check_types(path: Path, part: dict[str, Any], prefix: str) -> None:
    for field, limit in _INT_FIELDS.items():
        value = part.get(field)
        # A list is legal where a model gives one value per layer (Step-3.5, some pruned models).
        if value is None or (isinstance(value, list) and field not in _NEVER_LISTS):
            continue
        if field == "moe_layer_end_index" and value == -1:  # up to the last layer
            continue
        if type(value) is not int or not 0 <= value <= limit:
            raise _wrong(path, prefix + field, value, f"a whole number from 0 to {limit}")
    for field in _OBJECT_FIELDS:
        if part.get(field) is not None and not isinstance(part[field], dict):
            raise _wrong(path, prefix + field, part[field], "an object")
    for field in _TEXT_FIELDS:
        if part.get(field) is not None and not isinstance(part[field], str):
            raise _wrong(path, prefix + field, part[field], "a string")
    for field in _ONE_PER_LAYER:
        value, layers = part.get(field), part.get("num_hidden_layers") or 0
        if isinstance(value, list) and len(value) < layers:
            raise _wrong(path, prefix + field, value, f"one entry for each of {layers} layers")
    names = part.get("architectures")
    if names is not None and not (
        isinstance(names, list) and all(isinstance(name, str) for name in names)
    ):
        raise _wrong(path, prefix + "architectures", names, "a list of strings")
    quantization = part.get("quantization_config")
    if quantization not in (None, "") and not isinstance(quantization, dict):
        raise _wrong(path, prefix + "quantization_config", quantization, "an object")


def _wrong(path: Path, field: str, value: Any, expected: str) -> BadConfig:
    shown = repr(value) if len(repr(value)) < 60 else repr(value)[:57] + "..."
    return BadConfig(f"{path}: {field} is {shown}; expected {expected}. Correct the field.")
