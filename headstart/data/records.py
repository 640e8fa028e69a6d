"""Records, and the file that holds many of them: ids, mask, offsets and a JSON line each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.documents import misfit, parse_json
from headstart.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_ROW_FIELDS = {
    "id": str, "prompt_id": str, "category": str, "turn": int, "sample": int, "seed": int | None,
    "finish_reason": str, "exact_ids": bool, "num_prompt": int, "max_tokens": int | None,
}  # fmt: skip
_TENSORS = {"ids": "int32", "mask": "uint8", "offsets": "int64", "rows": "uint8"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Record:
    """One answer with its prompt."""

    id: str
    prompt_id: str
    category: str
    turn: int  # of the conversation, from 0
    sample: int  # from 0
    ids: NDArray[np.int32]  # prompt, then the answer as it was decoded, its end token included
    mask: NDArray[np.bool_]  # True where a token is the model's (or, imported, the assistant's)
    seed: int | None  # of the noise that chose the answer: the engine's Request.seed; else None
    sampling: dict[str, Any]  # temperature, top_k, top_p, max_tokens; empty for an import
    finish_reason: str
    exact_ids: bool  # False: the ids are a new tokenisation of a text
    num_prompt: int  # tokens before the first masked one
    max_tokens: int | None = None  # how long the answer could have become; None: not known

    @property
    def is_replayable(self) -> bool:
        """Whether our engine chose these very tokens with noise that is known."""
        return self.seed is not None and self.exact_ids


def spread(records: Sequence[Record], limit: int | None) -> list[Record]:
    """At most `limit` records, in their order, with the categories' shares of the whole.

    Chosen by a hash of the prompt's id, so that neither the order nor records that are added
    decide; answers to one prompt are taken together.
    """
    if limit is None or limit >= len(records):
        return list(records)
    by_category: dict[str, list[Record]] = {}
    for record in sorted(records, key=_draw):
        by_category.setdefault(record.category, []).append(record)
    # Each record's place in its category, as a share: the smallest shares of all are taken.
    places = [
        ((index + 0.5) / len(part), _draw(record), record)
        for part in by_category.values()
        for index, record in enumerate(part)
    ]
    chosen = {id(record) for _, _, record in sorted(places, key=lambda p: p[:2])[:limit]}
    return [record for record in records if id(record) in chosen]


def _draw(record: Record) -> tuple[str, str]:
    hashed = hashlib.sha256(record.prompt_id.encode(errors="backslashreplace")).hexdigest()
    return hashed, record.id


def pack(records: Sequence[Record], stamp: str) -> bytes:
    """The bytes of a safetensors file."""
    import numpy as np
    from safetensors.numpy import save

    offsets = np.zeros(len(records) + 1, np.int64)
    np.cumsum([len(record.ids) for record in records], out=offsets[1:])
    lines = "".join(json.dumps(_row(record), ensure_ascii=False) + "\n" for record in records)
    tensors = {
        "ids": _joined([record.ids for record in records], np.int32),
        "mask": _joined([record.mask for record in records], np.uint8),
        "offsets": offsets,
        "rows": np.frombuffer(lines.encode("utf-8", errors="backslashreplace"), np.uint8),
    }
    return bytes(save(tensors, metadata={"stamp": stamp}))


def unpack(
    path: Path, *, vocab_size: int, sampling: dict[str, Any]
) -> tuple[list[Record], str | None]:
    """Records and stamp of a file, checked; DataError says what is wrong with it."""
    tensors, stamp = _load(path)
    for name, kind in _TENSORS.items():
        if str(tensors[name].dtype) != kind or tensors[name].ndim != 1:
            raise _broken(path, f"has no vector `{name}` of {kind}")
    ids, mask, offsets = tensors["ids"], tensors["mask"].astype(bool), tensors["offsets"]
    if len(ids) != len(mask):
        raise _broken(path, f"has {len(ids)} ids and {len(mask)} mask values")
    ends = (0, len(ids))
    if not len(offsets) or (offsets[0], offsets[-1]) != ends or (offsets[1:] <= offsets[:-1]).any():
        raise _broken(path, "has offsets that do not cut its ids into records")
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise _broken(path, f"has ids from {ids.min()} to {ids.max()} of {vocab_size} tokens")
    rows = _rows(path, tensors["rows"].tobytes(), len(offsets) - 1)
    spans = zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    records = [
        Record(**row, ids=ids[start:stop], mask=mask[start:stop], sampling=sampling)
        for row, (start, stop) in zip(rows, spans, strict=True)
    ]
    return records, stamp


def _joined(parts: list[Any], kind: Any) -> Any:
    import numpy as np

    return np.concatenate(parts).astype(kind) if parts else np.zeros(0, kind)


def _row(record: Record) -> dict[str, Any]:
    return {name: getattr(record, name) for name in _ROW_FIELDS}


def _rows(path: Path, data: bytes, count: int) -> list[dict[str, Any]]:
    try:
        rows = [parse_json(line) for line in data.split(b"\n") if line]
    except ValueError as error:
        raise _broken(path, f"has rows that are not JSON ({error})") from error
    if len(rows) != count:
        raise _broken(path, f"has {len(rows)} rows and {count} records")
    for row in rows:
        if not isinstance(row, dict) or set(row) != set(_ROW_FIELDS):
            raise _broken(path, "has a row with missing or strange fields")
        if wrong := misfit(_ROW_FIELDS, row):
            raise _broken(path, f"has a row whose {wrong}")
    return rows


def _load(path: Path) -> tuple[dict[str, Any], str | None]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            return {name: file.get_tensor(name) for name in _TENSORS}, metadata.get("stamp")
    except (OSError, SafetensorError) as error:
        raise _broken(path, f"cannot be read ({error})") from error


def _broken(path: Path, what: str) -> DataError:
    return DataError(
        f"{path} {what}; expected what `headstart distill` wrote. Run the same command again: it "
        "writes the file anew from the journal."
    )
