"""Several heads trained side by side on one pass of the frozen trunk.

The file is a JSON list of {"name": ..., "overrides": {option: value}}. Whatever decides which
records a step sees, or how the trunk is run, is common to all of them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from headstart.documents import parse_json
from headstart.errors import ConfigError
from headstart.files import read_plain, why_unreadable
from headstart.train.options import ORDER_FIELDS, TrainOptions, changed, resolve

SHARED_FIELDS = (
    *ORDER_FIELDS, "device", "dtype", "cache", "cache_dtype", "states_from", "shard",
    "eval_every", "eval_limit", "save_every",
)  # fmt: skip
_EXPECTED = """Give a JSON file such as [{"name": "a", "overrides": {"loss": "kl"}}]."""
_NAME = re.compile(r"\w[\w.-]*", re.ASCII)


def read_variants(path: Path, base: TrainOptions) -> dict[str, TrainOptions]:
    """Name -> resolved options."""
    try:
        entries = parse_json(read_plain(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}). {_EXPECTED}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({why_unreadable(error)}). {_EXPECTED}") from error
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path} holds no list with a variant in it. {_EXPECTED}")
    result: dict[str, TrainOptions] = {}
    for entry in entries:
        name, overrides = _entry(path, entry)
        if name in result:
            raise ConfigError(f"{path}: two variants are called {name!r}; give each its own name.")
        result[name] = resolve(changed(base, overrides))
    _check_shared(path, result)
    return result


def _entry(path: Path, entry: Any) -> tuple[str, dict[str, Any]]:
    fields = entry if isinstance(entry, dict) else {}
    name, overrides = fields.get("name"), fields.get("overrides", {})
    if (
        not isinstance(name, str)
        or not _NAME.fullmatch(name)
        or not isinstance(overrides, dict)
        or set(fields) - {"name", "overrides"}
    ):
        raise ConfigError(
            f'{path}: {json.dumps(entry)[:80]} is no variant; expected {{"name": "...", '
            '"overrides": {"loss": "kl"}}, the name fit for a folder.'
        )
    return name, overrides


def _check_shared(path: Path, variants: dict[str, TrainOptions]) -> None:
    first, *others = variants
    for field in SHARED_FIELDS:
        for other in others:
            here, there = getattr(variants[first], field), getattr(variants[other], field)
            if here != there:
                raise ConfigError(
                    f"{path}: {field} is {here!r} in {first} and {there!r} in {other}; variants "
                    f"see the same data in one pass. Give it once, on the command line."
                )
