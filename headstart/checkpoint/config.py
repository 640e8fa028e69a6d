"""config.json and its neighbours, read raw.

Config classes drop, rename and default fields, so they are never used here. `text_config` of a
multi-modal model is what a head belongs to; `Config.text` finds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.checkpoint.config_fields import COUNT_FIELDS, check_fields
from headstart.documents import parse_json
from headstart.errors import BadConfig
from headstart.files import read_plain, why_unreadable

_MAX_NESTING = 100


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


def read_json_object(path: Path, advice: str = "Download it again.") -> dict[str, Any]:
    """The JSON object in `path`; BadConfig if it is anything else."""
    try:
        document = parse_json(read_plain(path).decode("utf-8"))
    except (OSError, ValueError) as error:
        raise BadConfig(
            f"{path} cannot be read as JSON ({why_unreadable(error)}). {advice}"
        ) from error
    if not isinstance(document, dict):
        kind = type(document).__name__
        raise BadConfig(f"{path} holds a JSON {kind}; expected an object. {advice}")
    if _is_deeper(document, _MAX_NESTING):
        raise BadConfig(f"{path} nests more than {_MAX_NESTING} levels deep. {advice}")
    return document


def _is_deeper(document: Any, levels: int) -> bool:
    level = [document]
    for _ in range(levels):
        inner = [v.values() if isinstance(v, dict) else v for v in level]
        level = [v for values in inner for v in values if isinstance(v, dict | list)]
    return bool(level)
