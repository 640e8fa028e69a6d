"""The records to score, checked against the model: ids and text must be its own."""

from __future__ import annotations

from pathlib import Path

from headstart.checkpoint.reader import Checkpoint
from headstart.data.dataset import SPLITS, Dataset
from headstart.data.fingerprints import tokenizer_sha
from headstart.data.records import Record, spread
from headstart.errors import ConfigError, DataError
from headstart.heads.digest import trunk_digest


def open_records(
    folder: Path, split: str, checkpoint: Checkpoint, limit: int | None = None
) -> list[Record]:
    """The answers of one split, at most `limit`, taken from all categories.

    DataError if another model wrote them.
    """
    if split not in SPLITS:
        raise ConfigError(f"--split is {split!r}; expected {' or '.join(SPLITS)}.")
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit is {limit}; give a number of answers, 1 or more.")
    dataset = Dataset.open(folder)
    header, model = dataset.header, trunk_digest(checkpoint)
    vocab_size = int(checkpoint.config.get("vocab_size", 0))
    header.check(tokenizer_sha=tokenizer_sha(checkpoint), vocab_size=vocab_size)
    if header.trunk_digest != model:
        raise DataError(
            f"{folder} was written by the trunk {_short(header.trunk_digest)}, the model has "
            f"{_short(model)}: acceptance on another model's text would say little. Distill with "
            "this model, or score the one that wrote it."
        )
    records = [record for record in dataset.records(split) if record.mask.any()]
    if not records:
        counts = ", ".join(f"{name} {header.counts[name]['records']}" for name in SPLITS)
        raise DataError(
            f"{folder} has no answers in its {split} split (records: {counts}). Choose another "
            "--split, or distill again with a larger --heldout or more prompts."
        )
    return spread(records, limit)


def _short(digest: str) -> str:
    return digest.rpartition(":")[2][:12]
