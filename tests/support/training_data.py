"""Small datasets for the tests of training: records made by hand or by a model itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from headstart.checkpoint.reader import Checkpoint
from headstart.data.dataset import Header, write_dataset
from headstart.data.fingerprints import template_sha, tokenizer_sha
from headstart.data.records import Record
from headstart.heads.digest import trunk_digest


def record(name: str, ids: Sequence[int], num_prompt: int, category: str = "") -> Record:
    """A greedy answer: everything behind the prompt is masked."""
    return Record(
        id=name, prompt_id=name, category=category, turn=0, sample=0,
        ids=np.asarray(ids, np.int32), mask=np.arange(len(ids)) >= num_prompt, seed=None,
        sampling={}, finish_reason="stop", exact_ids=True, num_prompt=num_prompt,
    )  # fmt: skip


def random_records(
    count: int, *, vocab: int = 128, seed: int = 0, longest: int = 24, prefix: str = "r"
) -> list[Record]:
    generator = np.random.default_rng(seed)
    result = []
    for number in range(count):
        ids = generator.integers(2, vocab, int(generator.integers(6, longest)))
        prompt = int(generator.integers(1, 4))
        result.append(record(f"{prefix}{number}", ids, prompt, "even" if number % 2 else "odd"))
    return result


def write_data(
    model: Path, out: Path, train: Sequence[Record], heldout: Sequence[Record] = ()
) -> Path:
    """A dataset folder for a model."""
    checkpoint = Checkpoint.open(model)
    fields = checkpoint.config.fields
    header = Header(
        origin="import", trunk_digest=trunk_digest(checkpoint),
        tokenizer_sha=tokenizer_sha(checkpoint), template_sha=template_sha(checkpoint),
        vocab_size=fields["vocab_size"], hidden_size=fields["hidden_size"], sampling={}, seed=None,
        chat_template_kwargs={}, counts={}, report={},
    )  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    write_dataset(out, header, {"train": list(train), "heldout": list(heldout)})
    return out
