"""What a state cache holds, how a record's states become bytes and back, and what they weigh.

A record of T tokens is its states row after row; fp8 (e4m3) records are followed by one fp32 scale
per token. Records follow each other without gaps: all start at a multiple of their item's size.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from headstart.documents import parse_json
from headstart.errors import ConfigError, DataError
from headstart.files import read_plain
from headstart.models.unroll import StateKind

FORMAT_VERSION = 2
HEADER_NAME, INDEX_NAME, JOURNAL_NAME = "header.json", "index.json", "journal.jsonl"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}
HIDDEN_KINDS = get_args(StateKind)
_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
_SCALE_BYTES = 4
_REMEDIES = {
    "format_version": "It was written by another version of Headstart",
    "trunk_digest": "The states are another trunk's",
    "tokenizer_sha": "The states belong to text of another tokenizer",
    "template_sha": "The states belong to text of another chat template",
    "dataset_fingerprint": "The states belong to another dataset",
    "hidden_kind": "The head's contract names the other side of the final norm",
    "fuse_order": "The head's contract fuses in the other order",
    "recycled_hidden": "The head's contract recycles another state",
    "compute_dtype": "The trunk computed in another precision (--dtype, or another device)",
    "dtype": "The states are stored in another precision (--cache-dtype)",
    "hidden_size": "The states are another trunk's",
}


@dataclass(frozen=True, kw_only=True)
class CacheHeader:
    """The hidden-state contract: a cache is used only where every field is as expected.

    Fields that are None are not known yet, and not compared; a cache is written with all of them.
    """

    format_version: int = FORMAT_VERSION
    trunk_digest: str
    tokenizer_sha: str
    template_sha: str | None = None
    dataset_fingerprint: str  # of states/source.py
    hidden_kind: str  # one of HIDDEN_KINDS
    fuse_order: str | None = None
    recycled_hidden: str | None = None
    compute_dtype: str | None = None  # of the trunk
    dtype: str  # as stored, one of DTYPES
    hidden_size: int

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"cache dtype is {self.dtype!r}; expected one of {', '.join(DTYPES)}")
        if self.hidden_kind not in HIDDEN_KINDS:
            raise ConfigError(
                f"hidden_kind is {self.hidden_kind!r}; expected one of {', '.join(HIDDEN_KINDS)}"
            )

    def document(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


def check_header(folder: Path, expected: CacheHeader) -> None:
    """Refuse a cache folder whose header is not `expected`, naming the first field that differs."""
    path = folder / HEADER_NAME
    found = read_object(path)
    for field in fields(CacheHeader):
        here, wanted = found.get(field.name), getattr(expected, field.name)
        if wanted is not None and here != wanted:
            is_text = field.name == "dataset_fingerprint"
            why = other_text(str(here), str(wanted)) if is_text else _REMEDIES[field.name]
            raise DataError(
                f"{folder} is no cache for this run. {why}; give another --cache "
                f"folder, or remove this one. ({field.name} is {here!r}, expected {wanted!r})"
            )


def other_text(here: str, wanted: str) -> str:
    """What differs between two fingerprints, `<records>-<longest>-<tokens>`."""
    (names, longest, _), (own_names, own_longest, _) = (
        f"{x}--".split("-", 2) for x in (here, wanted)
    )
    if names != own_names:
        return _REMEDIES["dataset_fingerprint"]
    if longest != own_longest:
        return (
            f"The states belong to these records cut at another length ({longest} tokens, now "
            f"{own_longest}: --max-len or --long-records has changed)"
        )
    return (
        "The states belong to these records with another text (distilled again, or cut otherwise)"
    )


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object of a cache folder."""
    try:
        found = parse_json(read_plain(path))
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}); expected a state cache. "
            f"Give another --cache folder."
        ) from error
    except ValueError as error:
        raise damaged(path, "is not JSON") from error
    if not isinstance(found, dict):
        raise damaged(path, "is not a JSON object")
    return found


def damaged(path: Path, what: str) -> DataError:
    return DataError(f"{path} {what}: the cache is damaged. Remove {path.parent} and run again.")


def disk_bill(num_tokens: int, hidden_size: int, dtype: str) -> int:
    """Bytes that the states of so many tokens take, of a record or of a dataset."""
    scale = _SCALE_BYTES if dtype == "fp8" else 0
    return num_tokens * (hidden_size * DTYPES[dtype].itemsize + scale)


def check_free_space(folder: Path, needed_bytes: int) -> None:
    """Refuse to start a cache that its disk cannot hold."""
    place = folder
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed_bytes > free:
        raise DataError(
            f"{folder} needs {needed_bytes / 2**30:.1f} GiB for cached states, its disk has "
            f"{free / 2**30:.1f} GiB free. Give a --cache folder on another disk, store fp8, or "
            f"train without a cache."
        )


def encode(states: Tensor, dtype: str) -> list[Tensor]:
    """The parts of a record [T, D], as they are stored one after another, on the CPU."""
    if dtype != "fp8":
        return [states.to("cpu", DTYPES[dtype]).contiguous()]
    wide = states.float()
    largest = wide.abs().amax(-1, keepdim=True)
    scale = torch.where(largest > 0, largest / _FP8_MAX, 1.0)
    # Rounding of the quotient may pass the largest number, which e4m3 would store as NaN.
    small = (wide / scale).clamp(-_FP8_MAX, _FP8_MAX).to(DTYPES[dtype])
    return [small.cpu().contiguous(), scale.squeeze(-1).cpu().contiguous()]


def decode(stored: Tensor, header: CacheHeader, num_tokens: int, dtype: torch.dtype) -> Tensor:
    """States [T, D] from a record's bytes; a view of them where they are in `dtype` already."""
    size = num_tokens * header.hidden_size * DTYPES[header.dtype].itemsize
    states = stored[:size].view(DTYPES[header.dtype]).view(num_tokens, header.hidden_size)
    if header.dtype != "fp8":
        return states.to(dtype)
    # The scales may lie at any byte: a small copy puts them where fp32 may be.
    scale = stored[size:].clone().view(torch.float32)
    return states.float().mul_(scale.unsqueeze(-1)).to(dtype)


def canonical(document: Mapping[str, Any]) -> bytes:
    """The bytes that the index's own checksum covers."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
