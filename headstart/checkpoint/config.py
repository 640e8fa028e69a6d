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

_INT_FIELDS = (
    "num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "intermediate_size", "num_nextn_predict_layers",
    "mtp_num_hidden_layers", "num_mtp_modules", "n_routed_experts", "num_experts",
)  # fmt: skip
_OBJECT_FIELDS = ("text_config", "mtp_config")


@dataclass(frozen=True)
class Config:
    """A raw config.json: `raw` is the whole object, `text` the part that describes the LLM."""

    raw: dict[str, Any]

    @property
    def text(self) -> dict[str, Any]:
        nested = self.raw.get("text_config")
        return nested if isinstance(nested, dict) else self.raw

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


def read_config(folder: Path) -> Config:
    """The checked config.json of `folder`."""
    path = folder / "config.json"
    if not path.is_file():
        raise BadConfig(f"{folder} has no config.json. Give the folder of a whole checkpoint.")
    raw = read_json_object(path)
    config = Config(raw)
    _check_types(path, raw, "")
    if isinstance(raw.get("text_config"), dict):
        _check_types(path, raw["text_config"], "text_config.")
    return config


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; BadConfig if it is anything else."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadConfig(f"{path} cannot be read as JSON ({error}). Download it again.") from error
    if not isinstance(document, dict):
        kind = type(document).__name__
        raise BadConfig(f"{path} holds a JSON {kind}; expected an object. Download it again.")
    return document


def _check_types(path: Path, part: dict[str, Any], prefix: str) -> None:
    for field in _INT_FIELDS:
        value = part.get(field)
        # A list is legal where a model gives one value per layer (Step-3.5, some pruned models).
        if value is None or (isinstance(value, list) and field != "num_hidden_layers"):
            continue
        if type(value) is not int or value < 0:
            raise _wrong(path, prefix + field, value, "a whole number of 0 or more")
    for field in _OBJECT_FIELDS:
        if part.get(field) is not None and not isinstance(part[field], dict):
            raise _wrong(path, prefix + field, part[field], "an object")
    model_type = part.get("model_type")
    if model_type is not None and not isinstance(model_type, str):
        raise _wrong(path, prefix + "model_type", model_type, "a string")
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
