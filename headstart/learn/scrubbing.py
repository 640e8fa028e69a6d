"""Takes the first words of prompts, the names of kinds, out of what lies beside learned heads.

Earlier versions wrote them there; kinds are numbered now.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.checkpoint.provenance import PROVENANCE_NAME
from headstart.documents import parse_json
from headstart.files import read_plain, write_whole
from headstart.learn.kinds import numbered

if TYPE_CHECKING:
    from headstart.learn.folder import Folder


def scrub(folder: Folder) -> list[Path]:
    """Number kinds in all records below `heads`; gives those that cannot be read, and stay.

    Belongs to the holder of the folder's lock. What a kill left half written goes.
    """
    for path in folder.heads.glob(".*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with contextlib.suppress(OSError):  # what cannot be read now may be whole
        if not _scrub(folder.known):
            folder.known.unlink()  # it is made anew
    records = [folder.record, *folder.heads.glob(f"*/{PROVENANCE_NAME}")]
    return [path for path in records if not _is_clean(path)]


def _is_clean(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return _scrub(path)
    return False


def _scrub(path: Path) -> bool:
    """False for a file that is no JSON; OSError where it cannot be read."""
    try:
        found = parse_json(read_plain(path))
    except FileNotFoundError:
        return True
    except ValueError:
        return False
    clean = _without_words(found)
    if clean != found:
        write_whole(path, (json.dumps(clean, indent=1) + "\n").encode(), is_only_writer=True)
    return True


def _without_words(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_words(each) for each in value]
    if not isinstance(value, dict):
        return value
    result = {name: _without_words(each) for name, each in value.items()}
    if isinstance(value.get("by_kind"), dict):
        result["by_kind"] = numbered(value["by_kind"])
    if isinstance(value.get("kind"), str) and "rounds" in value:  # a walk in known.json
        result["kind"] = ""
    return result
