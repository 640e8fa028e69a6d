"""Python code in a checkpoint's folder: whether all of it is what Headstart itself wrote there.

An engine that may run code runs all that the folder's JSON files name, from files beside them or
from other repositories of the hub.
"""

from __future__ import annotations

import json
from pathlib import Path

from headstart.documents import parse_json
from headstart.families.base import Family
from headstart.files import read_plain

_NAMES_NO_CODE = ("tokenizer.json", "model.safetensors.index.json")  # large, too


def has_own_code_only(folder: Path, family: Family) -> bool:
    """Whether config and Python files are as in the family's table, and no other file names code.

    What cannot be read counts as foreign.
    """
    try:
        documents = {
            path.name: parse_json(read_plain(path))
            for path in folder.glob("*.json")
            if path.name not in _NAMES_NO_CODE
        }
        code = {path.name: read_plain(path).decode() for path in folder.glob("*.py")}
        config = documents.pop("config.json")
        named = config.pop("auto_map")
        others = json.dumps([config, documents])  # a name in it has no escapes any more
    except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError):
        return False
    is_ours = dict(family.auto_map) == named and dict(family.remote_code) == code
    return is_ours and '"auto_map"' not in others
