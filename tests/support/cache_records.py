"""A header and records for tests of the state cache."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from headstart.train.states.cache import StateCache
from headstart.train.states.header import CacheHeader
from headstart.train.states.writer import CacheWriter

HEADER = CacheHeader(
    trunk_digest="trunk-a",
    tokenizer_sha="tok-a",
    template_sha="template-a",
    dataset_fingerprint="data-a",
    hidden_kind="after_final_norm",
    fuse_order="embed_first",
    recycled_hidden="after_out_norm",
    compute_dtype="float32",
    dtype="fp32",
    hidden_size=24,
)
SHARD_BYTES = 1000  # two or three of the records below


def states(number: int) -> Tensor:
    """Record `number`: 3 to 9 tokens of very different sizes."""
    made = torch.Generator().manual_seed(number)
    rows = torch.randn(3 + number % 7, 24, generator=made)
    return rows * torch.logspace(-3, 3, len(rows)).unsqueeze(-1)


def fill(folder: Path, header: CacheHeader = HEADER, records: range = range(12)) -> None:
    with CacheWriter(folder, header, shard_bytes=SHARD_BYTES) as writer:
        for number in records:
            if f"r{number}" not in writer:
                writer.add(f"r{number}", states(number))
        writer.finish()


def check_whole(folder: Path, records: range = range(12)) -> None:
    cache = StateCache.open(folder, HEADER)
    assert list(cache) == [f"r{number}" for number in records]
    for number in records:
        assert torch.equal(cache.states(f"r{number}", torch.float32), states(number))
