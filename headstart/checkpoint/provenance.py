"""Where a result came from: written as headstart.json beside it.

Holds the command, versions, sources with digests, and what an operation changed. Formats that lose
information keep what they need to be inverted here.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.checkpoint.config import read_json_object
from headstart.checkpoint.config_fields import check_fields
from headstart.checkpoint.local_paths import shown, shown_words, without_paths
from headstart.errors import BadConfig, BrokenFile

if TYPE_CHECKING:
    from headstart.checkpoint.reader import Checkpoint

PROVENANCE_NAME = "headstart.json"
PROVENANCE_VERSION = 1
_SAMPLE_BYTES = 1 << 16
_OUR_NAME = re.compile(r"(modules\.(0|[1-9][0-9]{0,8})|shared)\.[A-Za-z_]\w*\..+", re.ASCII)


@dataclass(frozen=True)
class Made:
    """What headstart.json says about a head that Headstart wrote: what its format cannot carry."""

    family: str | None = None
    trunk_config: dict[str, Any] | None = None
    root: str = ""  # prefix of the head's published names
    left_out: tuple[str, ...] = ()  # copies of trunk tensors, our names
    experts: str | None = None  # "fused" or "per expert"
    lost_fields: tuple[str, ...] = ()  # fields of trunk_config that are not the trunk's own
    quantization: Mapping[str, Any] = field(default_factory=dict)  # the head's own config of it


def provenance(
    operation: str, sources: Iterable[Checkpoint], *, changes: Iterable[str] = (), **details: Any
) -> dict[str, Any]:
    """The document for one result; `details` are facts the reader of the format needs."""
    command = [Path(sys.argv[0]).name, *shown_words(sys.argv[1:])]
    document = {
        "provenance_version": PROVENANCE_VERSION,
        "operation": operation,
        "command": shlex.join(command),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "headstart": _version("headstart"),
            "python": platform.python_version(),
        },
        "sources": [
            {"path": shown(os.path.abspath(source.folder)), "digest": digest(source)}
            for source in sources
        ],
        "changes": list(changes),
        **details,
    }
    return without_paths(document)


def read_provenance(folder: Path) -> dict[str, Any]:
    """The provenance of `folder`, or an empty object where Headstart did not write it."""
    path = folder / PROVENANCE_NAME
    return read_json_object(path) if path.is_file() else {}


def made_by_us(folder: Path) -> Made:
    """The facts of headstart.json, checked; all absent where Headstart did not write `folder`."""
    path = folder / PROVENANCE_NAME
    found = read_provenance(folder)
    config = found.get("trunk_config")
    if config is not None:
        if not isinstance(config, dict):
            raise _wrong(path, "trunk_config", config, "an object")
        check_fields(path, config, "trunk_config.")
    left_out = _texts(path, found, "left_out")
    for name in left_out:
        if not is_our_name(name):
            raise _wrong(path, "left_out", name, "names such as modules.0.lm_head.weight")
    return Made(
        _text(path, found, "family"),
        config,
        _text(path, found, "root") or "",
        left_out,
        _text(path, found, "experts"),
        _texts(path, found, "lost_fields"),
        _quantization(path, found.get("quantization")),
    )


def _quantization(path: Path, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _wrong(path, "quantization", value, "an object")
    check_fields(path, {"quantization_config": value}, "")
    return value


def training_of(folder: Path) -> dict[str, Any] | None:
    """How the head in `folder` was trained by Headstart; None where it was not."""
    found = read_provenance(folder).get("training")
    if found is not None and not isinstance(found, dict):
        raise _wrong(folder / PROVENANCE_NAME, "training", found, "an object")
    return found


def sources_of(found: Mapping[str, Any]) -> list[Path]:
    """Where a result came from, by its provenance; what is not written as ours is passed over."""
    listed = found.get("sources")
    entries = listed if isinstance(listed, list) else []
    paths = [entry.get("path") for entry in entries if isinstance(entry, dict)]
    return [Path(path) for path in paths if isinstance(path, str)]


def model_of(folder: Path) -> str | None:
    """The model, by path or name, whose head `folder` holds by itself, where that is known."""
    found = read_provenance(folder)
    if isinstance(model := found.get("of_model"), str):
        return model
    sources = sources_of(found) if found.get("operation") == "export" else []
    return str(sources[0]) if sources else None


def is_our_name(name: str) -> bool:
    """Whether a tensor is called as we call those of a head: modules.0.fuse.weight."""
    return _OUR_NAME.fullmatch(name) is not None


def _text(path: Path, found: dict[str, Any], field: str) -> str | None:
    value = found.get(field)
    if value is not None and not isinstance(value, str):
        raise _wrong(path, field, value, "a string")
    return value


def _texts(path: Path, found: dict[str, Any], field: str) -> tuple[str, ...]:
    values = found.get(field)
    if values is None:
        return ()
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise _wrong(path, field, values, "a list of strings")
    return tuple(values)


def _wrong(path: Path, field: str, value: Any, expected: str) -> BadConfig:
    return BadConfig(
        f"{path}: {field} is {repr(value)[:60]}; expected {expected}. Export the head again, or "
        f"remove {PROVENANCE_NAME}."
    )


def digest(checkpoint: Checkpoint) -> str:
    """A quick identity: config, tensor table, and samples of every shard (not all bytes)."""
    state = hashlib.sha256()
    state.update(json.dumps(checkpoint.config.raw, sort_keys=True).encode())
    for name, info in sorted(checkpoint.tensors.items()):
        state.update(f"{name} {info.dtype} {info.shape}\n".encode())
    for file in sorted({info.file for info in checkpoint.tensors.values()}):
        try:
            with open(file, "rb", buffering=0) as handle:
                size = os.fstat(handle.fileno()).st_size
                for start in (0, size // 2, max(size - _SAMPLE_BYTES, 0)):
                    handle.seek(start)
                    state.update(handle.read(_SAMPLE_BYTES))
        except OSError as error:
            raise BrokenFile(
                f"{file} cannot be read ({error.strerror}). Check the disk, then run again."
            ) from error
    return f"sampled-sha256:{state.hexdigest()}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed (run from source)"
